"""`examples/transferqueue_sampler.py` in a TransferQueue that runs here, read by two DP ranks."""

import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import ray
import torch
import transfer_queue as tq
from numpy.typing import NDArray
from omegaconf import OmegaConf
from ray import cloudpickle
from tensordict import TensorDict
from transfer_queue.dataloader import StreamingDataset
from transfer_queue.sampler import BaseSampler, SeqlenBalancedSampler, SequentialSampler

from examples.transferqueue_sampler import WindowSampler
from rollout_planner import Quadratic
from tests.support.ray_cluster import ray_cluster

RANKS, BATCH, MICRO, SAMPLES = 2, 8, 2, 192
TASK = "train-actor"
#: Tokens of each sample, in the order in which they are put.
LENGTHS = np.random.default_rng(7).lognormal(5.5, 0.9, SAMPLES).astype(int) + 1
#: Of each rank its micro-batches: the numbers of their samples.
Read = list[list[list[int]]]


class Rank:
    """A DP rank in a process of its own."""

    def __init__(self, dp_rank: int) -> None:
        self.dp_rank = dp_rank

    def begin(self, partition: str) -> None:
        """Read a partition of the queue that is there now."""
        controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
        conf = ray.get(controller.get_config.remote())
        self.stream = iter(
            StreamingDataset(conf, BATCH, MICRO, ["input_ids"], partition, TASK, self.dp_rank)
        )

    def batch(self) -> list[list[int]]:
        """The next one: of each micro-batch the numbers of its samples."""
        found = []
        for micro_batch, _ in islice(self.stream, BATCH // MICRO):
            samples = micro_batch["input_ids"].unbind()
            assert all(len(ids) == LENGTHS[ids[0]] for ids in samples)
            found.append([int(ids[0]) for ids in samples])
        return found


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[Any]]:
    """They read from a queue that was begun with our sampler, as its module's docstring says."""
    conf = {"controller": {"sampler": WindowSampler(RANKS, MICRO), "polling_mode": True}}
    with ray_cluster(num_cpus=6):
        cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers have no tests
        actor = ray.remote(Rank)
        actors = [actor.remote(dp_rank) for dp_rank in range(RANKS)]
        tq.init(OmegaConf.create(conf, flags={"allow_objects": True}))
        yield actors
        tq.close()


def register(sampler: BaseSampler) -> None:
    """From now on the controller asks this one."""
    controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
    ray.get(controller.register_sampler.remote(sampler))


def put(partition: str, first: int = 0, count: int = SAMPLES) -> None:
    numbers = range(first, first + count)
    ids = [torch.full((int(LENGTHS[number]),), number) for number in numbers]
    fields = TensorDict(
        {"input_ids": torch.nested.as_nested_tensor(ids, layout=torch.jagged)}, batch_size=count
    )
    tags = [{"total_lengths": int(LENGTHS[number])} for number in numbers]
    tq.kv_batch_put([f"s{number}" for number in numbers], partition, fields, tags=tags)


def read(ranks: list[Any], partition: str, batches: int) -> Read:
    """Ranks go on together, as those do that train."""
    ray.get([rank.begin.remote(partition) for rank in ranks])
    found: Read = [[] for _ in ranks]
    for _ in range(batches):
        got = ray.get([rank.batch.remote() for rank in ranks], timeout=60)
        for own, parts in zip(found, got, strict=True):
            own.extend(parts)
    return found


def costs(found: Read) -> NDArray[np.float64]:
    """Work of each micro-batch. Shape [ranks, micro-batches]."""
    work = Quadratic()(LENGTHS.astype(np.int64))
    return np.array([[work[part].sum() for part in rank] for rank in found])


def waiting(found: Read) -> float:
    """The share of their time that ranks wait for each other, in every micro-batch."""
    work = costs(found)
    return float(work.max(axis=0).sum() / work.mean(axis=0).sum() - 1)


def imbalance(found: Read) -> float:
    """The same if they wait once a batch: a mean over batches."""
    batches = costs(found).reshape(RANKS, -1, BATCH // MICRO).sum(axis=2)
    return float((batches.max(axis=0) / batches.mean(axis=0) - 1).mean())


def samples_of(found: Read) -> list[int]:
    return sorted(number for rank in found for part in rank for number in part)


def test_ranks_that_read_wait_less_than_with_the_samplers_of_transferqueue(
    ranks: list[Any],
) -> None:
    reads = dict[str, Read]()
    for sampler in (None, SequentialSampler(), SeqlenBalancedSampler(dp_size=RANKS)):
        name = "ours" if sampler is None else type(sampler).__name__
        if sampler is not None:
            register(sampler)
        put(name)
        reads[name] = read(ranks, name, SAMPLES // (RANKS * BATCH))
    register(WindowSampler(RANKS, MICRO))
    excess = {name: waiting(found) for name, found in reads.items()}
    once = {name: imbalance(found) for name, found in reads.items()}
    assert all(samples_of(found) == [*range(SAMPLES)] for found in reads.values())
    for theirs in ("SequentialSampler", "SeqlenBalancedSampler"):
        assert excess["ours"] < 0.1 * excess[theirs], excess
        assert once["ours"] < 0.2 * once[theirs], once


def test_ranks_wait_for_what_is_put_later_and_partitions_are_apart(ranks: list[Any]) -> None:
    put("step-0", count=RANKS * BATCH - 1)
    client = tq.get_client()
    asked = {"dp_rank": 0, "batch_index": 0, "task_name": TASK, "partition_id": "step-0"}
    few = client.get_meta(["input_ids"], BATCH, "step-0", task_name=TASK, sampling_config=asked)
    assert few.size == 0, "one is missing for a whole batch"
    put("step-0", first=RANKS * BATCH - 1, count=1)
    put("step-1", first=100, count=RANKS * BATCH)
    assert samples_of(read(ranks, "step-0", 1)) == [*range(RANKS * BATCH)]
    assert samples_of(read(ranks, "step-1", 1)) == [*range(100, 100 + RANKS * BATCH)]


class Partition:
    """The tags of a partition, as the controller hands them to a sampler."""

    def get_custom_meta(self, indexes: list[int]) -> dict[int, dict[str, int]]:
        return {at: {"total_lengths": int(LENGTHS[at % SAMPLES])} for at in indexes}


def test_no_sample_is_passed_over_for_ever_or_given_to_two_ranks() -> None:
    """Rank 0 is always a batch ahead; its samples alone are taken for consumed."""
    sampler, take = WindowSampler(RANKS, MICRO, max_skips=3), RANKS * BATCH
    consumed, oldest = set[int](), list[int]()
    for batch in range(20):
        ready = [at for at in range(take * (batch + 2)) if at not in consumed]
        oldest.append(batch - ready[0] // take)
        for rank, index in ((0, batch), (1, batch - 1)):
            if index >= 0:
                told: dict[str, Any] = {"task_name": TASK, "partition_id": "p", "dp_rank": rank}
                mine, done = sampler.sample(
                    ready, BATCH, partition=Partition(), batch_index=index, **told
                )
                assert len(mine) == BATCH
                assert not consumed & {*mine}
                assert done == mine
                consumed.update(mine)
    assert max(oldest) <= 3 + 1
