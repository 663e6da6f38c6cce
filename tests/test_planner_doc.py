"""docs/planner.md and examples/seams: each seam does what the function does that it replaces.

The frameworks are not installed here: small stand-ins have the parts of their data types that the
seams use. What a seam returns is held to what its framework's own tests ask for.
"""

import asyncio
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rollout_planner.types import Sync, straggler_excess
from tests.support.seams import SEAMS, DataProto, KVBatchMeta, at_hand, module, padded, seam, select
from tests.support.source import ROOT

LENGTHS = np.clip(np.random.default_rng(7).lognormal(6, 1, 64), 4, 4000).astype(int).tolist()


def work_of(length: int) -> float:
    return length**2 + 24576.0 * length


def most(lengths: list[int], parts: list[list[int]]) -> float:
    """Work of the part that has most, over the mean."""
    work = [sum(work_of(lengths[i]) for i in part) for part in parts]
    return max(work) * len(work) / sum(work)


def test_the_functions_are_called_as_shown() -> None:
    text = (ROOT / "docs" / "planner.md").read_text()
    shown = re.search(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert shown is not None
    names: dict[str, Any] = {"rows": np.arange(8).reshape(8, 1), "rewards": np.arange(8.0)}
    exec(shown[1], names)
    restored = np.concatenate([chunk["reward"] for chunk in names["chunks"]])[names["inverse"]]
    assert restored.tolist() == names["rewards"].tolist()
    assert sorted(re.findall(r"\(\.\./examples/seams/(\w+\.py)\)", text)) == sorted(
        path.name for path in SEAMS.glob("*.py")
    )


# -- verl -------------------------------------------------------------------------------------


def verl_balanced(**actor: Any) -> tuple[list[list[int]], dict[str, float], Tensor]:
    """Rows of each of 4 ranks, the metrics, and what was planned of each row."""
    batch, metrics = DataProto(padded(LENGTHS)), dict[str, float]()
    keep_minibatch = actor.pop("keep_minibatch", False)
    trainer = SimpleNamespace(
        _get_dp_size=lambda *_: 4,
        actor_rollout_wg=None,
        config=SimpleNamespace(
            actor_rollout_ref=SimpleNamespace(
                actor=SimpleNamespace(ppo_mini_batch_size=32, **actor),
            )
        ),
    )
    seam("_balance_batch")["_balance_batch"](trainer, batch, metrics, keep_minibatch=keep_minibatch)
    rows = batch.batch["input_ids"].amax(1).tolist()
    assert sorted(rows) == list(range(64))
    ranks = [rows[first : first + 16] for first in range(0, 64, 16)]
    return ranks, metrics, batch.batch["planned"]


@pytest.mark.parametrize("keep_minibatch", [False, True])
def test_verl_s_batch_is_planned_over_ranks_and_cut_so(keep_minibatch: bool) -> None:
    """Rows 0, 1, ... of a rank are a step; with mini-batches they are two."""
    ranks, metrics, planned = verl_balanced(
        strategy="fsdp", use_dynamic_bsz=True, keep_minibatch=keep_minibatch,
        ppo_max_token_len_per_gpu=8000,
    )  # fmt: skip
    if keep_minibatch:
        assert all(sum(row < 32 for row in rank) == 8 for rank in ranks)
    assert metrics["global_seqlen/mean"] == sum(LENGTHS) / 4
    assert set(metrics) == {
        f"global_seqlen/{name}"
        for name in ("min", "max", "minmax_diff", "balanced_min", "balanced_max", "mean")
    }
    each = 8 if keep_minibatch else 16
    cut = seam("rearrange_micro_batches", index_select_tensor_dict=select)
    steps: dict[int, list[list[float]]] = {}
    for rank, column in zip(ranks, planned.reshape(4, 16, 3), strict=True):
        for first in range(0, 16, each):
            rows, own = rank[first : first + each], column[first : first + each]
            batch = padded([LENGTHS[row] for row in rows]) | {"planned": own}
            _, parts = cut["rearrange_micro_batches"](batch, 8000)
            assert sorted(i for part in parts for i in part) == list(range(each))
            assert all(sum(LENGTHS[rows[i]] for i in part) <= 8000 for part in parts)
            work = [sum(work_of(LENGTHS[rows[i]]) for i in part) for part in parts]
            steps.setdefault(first, []).append(work)
    for works in steps.values():
        assert straggler_excess(np.array(works), Sync.MICRO_STEP) < 0.05


@pytest.fixture
def lonely_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_verl_s_micro_batches_keep_to_the_budget(lonely_group: None) -> None:
    cut = seam("rearrange_micro_batches", index_select_tensor_dict=select)[
        "rearrange_micro_batches"
    ]
    ids = [torch.zeros(length) for length in LENGTHS]
    jagged = {"input_ids": torch.nested.as_nested_tensor(ids, layout=torch.jagged)}
    for batch in (padded(LENGTHS), jagged):
        for group in (None, dist.group.WORLD):
            micro_batches, indices = cut(batch, 8000, group, num_batches_divided_by=2)
            assert micro_batches == indices
            assert len(indices) % 2 == 0
            assert sorted(i for part in indices for i in part) == list(range(64))
            assert all(sum(LENGTHS[i] for i in part) <= 8000 for part in indices)
            work = [sum(work_of(LENGTHS[i]) for i in part) for part in indices]
            assert min(work) in (work[0], work[-1])
            assert max(work) not in (work[0], work[-1])
    _, pairs = cut(padded(LENGTHS), 8000, force_group_size=2, min_num_micro_batch=9)
    assert len(pairs) >= 9
    assert all((row ^ 1) in part for part in pairs for row in part)


@pytest.mark.parametrize("group", [True, False])
def test_verl_gets_no_empty_micro_batches(lonely_group: None, group: bool) -> None:
    framework = seam("rearrange_micro_batches", index_select_tensor_dict=select)
    with pytest.raises(ValueError, match="64 samples or groups cannot fill 70 bins"):
        framework["rearrange_micro_batches"](
            padded(LENGTHS), 8000, dist.group.WORLD if group else None, min_num_micro_batch=70
        )


def test_verl_s_sampler_takes_prompts_that_balance() -> None:
    best = seam("best_prompts")["best_prompts"]
    lengths_of = {f"p{at}": [900, 30, 40, 50] if at == 1 else [40] * 4 for at in range(6)}
    taken = best(lengths_of, dict.fromkeys(lengths_of, 0), 4, dp_size=4, micro_batch_tokens=1000)
    assert len(taken) == 4
    assert "p1" not in taken
    overdue = dict.fromkeys(lengths_of, 0) | {"p1": 6}
    assert "p1" in best(lengths_of, overdue, 4, dp_size=4, micro_batch_tokens=1000)


# -- slime ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("dynamic", [True, False])
def test_slime_s_schedule_has_the_invariants_of_its_own(dynamic: bool, stages: int) -> None:
    args = SimpleNamespace(
        use_dynamic_batch_size=dynamic, micro_batch_size=2, max_tokens_per_gpu=2500
    )
    parallel = {"dp_size": 2, "cp_size": 2, "vpp_size": stages}
    parallel["microbatch_group_size_per_vp_stage"] = 2
    rollouts = [at // 2 for at in range(64)]
    build = seam("build_dp_schedule")["build_dp_schedule"]
    partitions, indices, counts, sizes = build(
        args, parallel, LENGTHS, global_batch_size=12, rollout_indices=rollouts
    )
    assert sizes == [12, 12]
    assert all(count % stages == 0 for count in counts)
    assert sorted(i for part in partitions for i in part) == list(range(48))  # the rest waits
    for partition, own in zip(partitions, indices, strict=True):
        assert len(own) == sum(counts)
        assert [i for part in own for i in part] == list(range(len(partition)))
        first = {rollouts[partition[i]] for part in own[: counts[0]] for i in part}
        assert max(first) < 12
        for part in own:
            held = sum(LENGTHS[partition[i]] for i in part)
            assert held <= 5000 if dynamic else len(part) <= 2


def test_slime_s_schedule_refuses_less_than_a_step() -> None:
    build = seam("build_dp_schedule")["build_dp_schedule"]
    args = SimpleNamespace(use_dynamic_batch_size=False, micro_batch_size=1)
    with pytest.raises(AssertionError, match="num_rollouts"):
        build(args, {"vpp_size": 1}, [3, 3], global_batch_size=4, rollout_indices=[0, 1])


# -- NeMo-RL ----------------------------------------------------------------------------------


def own_split(*given: Any, **options: Any) -> Any:
    """NeMo-RL's, as far as what it was asked."""
    return given, options


@pytest.fixture
def nemo_rl(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The seam, with the module at hand that it takes the framework's own function from."""
    preshard = SimpleNamespace(shard_meta_for_dp=own_split)
    monkeypatch.setitem(sys.modules, "nemo_rl", ModuleType("nemo_rl"))
    data_plane = SimpleNamespace(preshard=preshard)
    monkeypatch.setitem(sys.modules, "nemo_rl.data_plane", data_plane)
    return seam("shard_meta_for_dp")["shard_meta_for_dp"]


def test_nemo_rl_s_shards_carry_their_packing(nemo_rl: Any) -> None:
    names = [f"s{at}" for at in range(64)]
    packing = {"max_tokens_per_microbatch": 8000, "sequence_length_pad_multiple": 64}
    metas, unsorted = nemo_rl(
        KVBatchMeta(names, LENGTHS, {"kept": 1}), dp_world=4, batch_size=32,
        sequence_packing_args=packing,
    )  # fmt: skip
    together = [name for meta in metas for name in meta.sample_ids]
    assert [together[at] for at in unsorted] == names
    assert len({tuple(map(len, meta.extra_info["micro_batch_indices"])) for meta in metas}) == 1
    for meta in metas:
        assert meta.extra_info["kept"] == 1
        assert [LENGTHS[names.index(name)] for name in meta.sample_ids] == meta.sequence_lengths
        assert sum(meta.extra_info["elem_counts_per_gb"]) == len(meta.sample_ids)
        start = 0
        for ranges, tokens, count in zip(
            meta.extra_info["micro_batch_indices"],
            meta.extra_info["micro_batch_lengths"],
            meta.extra_info["elem_counts_per_gb"],
            strict=True,
        ):
            assert (ranges[0][0], ranges[-1][1]) == (0, count)
            batch = meta.sequence_lengths[start : start + count]
            start += count
            found = [sum(-(-length // 64) * 64 for length in batch[a:b]) for a, b in ranges]
            assert found == tokens
            assert max(found) <= 8000


def test_nemo_rl_s_own_split_goes_on_without_sequence_packing(nemo_rl: Any) -> None:
    options = {"dp_world": 4, "batch_size": 32, "dynamic_batching_args": {"of": "others"}}
    assert nemo_rl("meta", sequence_packing_args=None, **options) == (("meta",), options)
    packing = {"max_tokens_per_microbatch": 8000, "sequence_length_pad_multiple": 64}
    metas, _ = nemo_rl(
        KVBatchMeta(["a", "b"], [5, 6]), dp_world=2, batch_size=None,
        sequence_packing_args=packing, dynamic_batching_args=None,
    )  # fmt: skip
    assert sorted(name for meta in metas for name in meta.sample_ids) == ["a", "b"]


class WindowedSampler:
    """NeMo-RL's base of samplers, as far as which groups it is told to take."""

    def __init__(self, buffer: Any, *, max_staleness_versions: int) -> None:
        self._buffer, self.max_staleness_versions = buffer, max_staleness_versions

    def _validate_group_bounds(self, least: int, most: int) -> None:
        assert 0 < least <= most

    async def _finalize_selection(self, taken: list[int], least: int, most: int) -> list[int]:
        assert len(taken) <= most
        return taken if len(taken) >= least else []


def prompt_groups(sizes: dict[str, tuple[list[int], int, bool]]) -> SimpleNamespace:
    """A replay buffer: by group, lengths of its answers, version at its start, whether it is ready.

    Its columns are NeMo-RL's.
    """
    return SimpleNamespace(
        meta_list=[KVBatchMeta([name], lengths) for name, (lengths, _, _) in sizes.items()],
        start_weight_list=[version for _, version, _ in sizes.values()],
        ready_list=[ready for _, _, ready in sizes.values()],
    )


def taken_by(buffer: SimpleNamespace, versions: int, **bounds: int) -> list[int]:
    """The groups that NeMo-RL's trainer would get at version 7, that may be so many behind."""
    found = module("staleness_sampler", WindowedSampler=WindowedSampler)
    with at_hand({
        "nemo_rl": module("nemo_rl"),
        "nemo_rl.algorithms": module("algorithms"),
        "nemo_rl.algorithms.async_utils": module("async_utils"),
        "nemo_rl.algorithms.async_utils.staleness_sampler": found,
    }):  # fmt: skip
        sampler = seam("BalancedSampler")["BalancedSampler"]
    made = sampler(buffer, dp_size=4, micro_batch_tokens=1000, max_staleness_versions=versions)
    taken: list[int] = asyncio.run(made.select(current_train_weight=7, **bounds))
    return taken


def test_nemo_rl_s_sampler_takes_groups_that_balance_and_first_what_would_be_dropped_next() -> None:
    for behind, goes in ((0, False), (3, True)):
        groups = {f"g{at}": ([40] * 4, 7, True) for at in range(6)}
        groups["g1"] = ([900, 30, 40, 50], 7 - behind, True)
        taken = taken_by(prompt_groups(groups), 3, min_prompt_groups=4, max_prompt_groups=4)
        assert len(taken) == 4
        assert (1 in taken) == goes


def test_nemo_rl_s_sampler_leaves_what_is_not_ready_or_not_of_its_versions() -> None:
    given = {"old": 5, "kept": 6, "now": 7, "later": 8}
    buffer = prompt_groups({name: ([9] * 4, version, True) for name, version in given.items()})
    assert taken_by(buffer, 1, min_prompt_groups=1, max_prompt_groups=4) == [1, 2]
    buffer.ready_list[1] = False
    assert taken_by(buffer, 1, min_prompt_groups=1, max_prompt_groups=4) == [2]
    assert taken_by(buffer, 1, min_prompt_groups=2, max_prompt_groups=4) == []


# -- AReaL ------------------------------------------------------------------------------------


def test_areal_s_allocation_is_one_group_a_rank_or_keeps_to_a_capacity() -> None:
    allocate = seam("get_allocate_fn")["get_allocate_fn"]("kk")
    ranks = allocate(LENGTHS, capacity=int(1e12), min_groups=4)
    sums = [sum(LENGTHS[i] for i in rank) for rank in ranks]
    assert len(ranks) == 4
    assert max(sums) - min(sums) <= 0.01 * np.mean(sums)
    groups = allocate(LENGTHS, 8000, 2, n_groups_divisor=3)
    assert len(groups) % 3 == 0
    assert all(sum(LENGTHS[i] for i in group) <= 8000 for group in groups)
    with pytest.raises(RuntimeError, match="exceeds"):
        allocate([9000], 8000, 1)
    with pytest.raises(RuntimeError, match="2 samples or groups cannot fill 3 bins"):
        allocate([1, 2], 8000, 3)
    with pytest.raises(ValueError, match="Unknown packing algorithm"):
        seam("get_allocate_fn")["get_allocate_fn"]("best")


# -- SkyRL ------------------------------------------------------------------------------------


class TrainingInputBatch(dict[str, Tensor]):
    """SkyRL's: a dict of tensors that can be sliced, with metadata."""

    metadata: Any = None

    @property
    def batch_size(self) -> int:
        return len(next(iter(self.values())))

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, slice):
            return super().__getitem__(key)
        found = TrainingInputBatch({name: value[key] for name, value in self.items()})
        found.metadata = self.metadata
        return found


def pad_training_input_batch(batch: TrainingInputBatch, count: int) -> TrainingInputBatch:
    rows = {name: torch.cat([value, value[:1].repeat(count, 1)]) for name, value in batch.items()}
    found = TrainingInputBatch(rows)
    found.metadata = batch.metadata
    return found


def test_skyrl_s_chunks_are_of_equal_size_and_stay_in_their_mini_batch() -> None:
    ray = SimpleNamespace(put=lambda chunk: chunk)
    framework = {
        "ray": ray,
        "pad_training_input_batch": pad_training_input_batch,
        "TrainingInputBatch": TrainingInputBatch,
    }
    stage = seam("stage_chunks", **framework)["stage_chunks"]
    data = TrainingInputBatch(padded(LENGTHS))
    data.metadata = {"global_step": 3}
    staged = stage(None, 4, data, [(0, 32), (32, 63)])
    for first, chunks in zip((0, 32), staged, strict=True):
        assert [len(chunk["input_ids"]) for chunk in chunks] == [8] * 4
        assert all(chunk.metadata == data.metadata for chunk in chunks)
        ranks = [chunk["input_ids"].amax(1).tolist() for chunk in chunks]
        assert set().union(*ranks) == set(range(first, 32 if not first else 63))
        assert most(LENGTHS, ranks) < 1.05


# -- OpenRLHF ---------------------------------------------------------------------------------


@dataclass
class Experience:
    """OpenRLHF's, of one sample, or of several."""

    prompts: list[str]
    total_length: Any


@pytest.mark.parametrize("count", [4, 5, 9, 64])
def test_openrlhf_s_experiences_are_dealt_to_every_rank(count: int) -> None:
    framework = {
        "split_experience_batch": lambda each: [each],
        "make_experience_batch": lambda items: [item.prompts[0] for item in items],
    }
    args = SimpleNamespace(
        actor=SimpleNamespace(num_nodes=1, num_gpus_per_node=8),
        ds=SimpleNamespace(ring_attn_size=2, tensor_parallel_size=1),
    )
    given = [Experience([str(at)], torch.tensor([LENGTHS[at]])) for at in range(count)]
    balance = seam("balance_experiences", **framework)["balance_experiences"]
    batches = balance(given, args)
    assert [len(batch) > 0 for batch in batches] == [True] * 4
    assert max(map(len, batches)) == -(-count // 4)
    assert sorted(int(name) for batch in batches for name in batch) == list(range(count))


# -- TorchSpec --------------------------------------------------------------------------------


class Controller(SimpleNamespace):
    """TorchSpec's controller: a pool of samples, and a queue for each of 4 ranks."""

    @classmethod
    def with_samples(cls, lengths: list[int]) -> "Controller":
        """It trains steps of 32, two samples a rank at a time."""
        pool = [
            SimpleNamespace(mooncake_key=str(at), tensor_shapes={"input_ids": (1, length)})
            for at, length in enumerate(lengths)
        ]
        return cls(
            args=SimpleNamespace(global_batch_size=32, per_dp_rank_batch_size=2),
            train_queues=[[] for _ in range(4)],
            sample_pool=deque(pool),
            _sample_bytes={one.mooncake_key: 8 for one in pool},
            _pool_bytes=8 * len(pool),
            _pool_lock=threading.Lock(),
            _inference_error=None,
            _training_monitor=SimpleNamespace(record=lambda _count: None),
            batch_id=0,
        )

    def _dispatch_to_queues(self, batch: list[Any], queues: list[list[list[int]]]) -> None:
        """As TorchSpec's: sample by sample, in turn."""
        for rank, queue in enumerate(queues):
            queue.append([int(one.mooncake_key) for one in batch[rank :: len(queues)]])


def padded_time(lengths: list[int], queues: list[list[list[int]]]) -> float:
    """What the micro-steps take, each as long as its dearest micro-batch, padded to 256 tokens."""
    work = [
        [len(own) * work_of(-(-max(lengths[i] for i in own) // 256) * 256) for own in queue]
        for queue in queues
    ]
    return float(np.array(work).max(axis=0).sum())


def test_torchspec_s_dispatches_of_a_step_are_planned_together() -> None:
    lengths = LENGTHS + LENGTHS[:8]
    controller = Controller.with_samples(lengths)
    dispatch = seam("try_dispatch_batch")["try_dispatch_batch"]
    assert [dispatch(controller) for _ in range(9)] == [True] * 8 + [False]
    assert (controller.batch_id, len(controller.sample_pool), controller._pool_bytes) == (8, 8, 64)
    assert all([len(own) for own in queue] == [2] * 8 for queue in controller.train_queues)
    for step in (0, 4):
        mine = [queue[step : step + 4] for queue in controller.train_queues]
        first = 8 * step
        assert sorted(i for queue in mine for own in queue for i in own) == list(
            range(first, first + 32)
        )
        turns = range(first, first + 32, 8)
        theirs = [[[at + rank, at + 4 + rank] for at in turns] for rank in range(4)]
        assert padded_time(lengths, mine) < 0.9 * padded_time(lengths, theirs)
    controller._inference_error = "out of memory"
    with pytest.raises(RuntimeError, match="Inference engine failed: out of memory"):
        dispatch(controller)


# -- torchtitan -------------------------------------------------------------------------------


def test_torchtitan_s_rows_are_as_few_as_the_tokens_allow() -> None:
    rows_of = seam("_assign_training_samples_to_rows")["_assign_training_samples_to_rows"]
    batcher = SimpleNamespace(seq_len=4096, num_tokens_to_pack=len)
    samples = [[0] * length for length in LENGTHS]
    rows = rows_of(batcher, samples)
    assert sorted(len(sample) for row in rows for sample in row) == sorted(LENGTHS)
    assert all(sum(map(len, row)) <= 4096 for row in rows)
    assert len(rows) == -(-sum(LENGTHS) // 4096)
