"""Padding from the dispatcher's flag to the tensors, between real processes."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout_dispatcher.errors import ConfigError, RankRefused
from rollout_workers import MicroBatch, MicroBatchStream, RolloutProducer
from rollout_workers.rank.client import RankClient
from tests.support.server import ServeProcess
from tests.workers.support.tiny_model import TinyModel

pytestmark = pytest.mark.e2e

STEPS: dict[str, Any] = {"dp_size": 1, "global_batch_size": 16, "window": 1}
BUDGET, MULTIPLE = 64, 8
LENGTHS = [1, 5, 8, 9, 13, 16, 17, 21, 24, 25, 30, 32, 3, 7, 11, 64]


def push(endpoint: str) -> dict[str, list[int]]:
    """A step of samples of these lengths; their ids."""
    random = np.random.default_rng(5)
    made = {f"s{n}": random.integers(0, 17, n) for n in LENGTHS}
    with RolloutProducer(endpoint) as producer:
        for name, ids in made.items():
            producer.push({"input_ids": ids}, sample_id=name)
    return {name: ids.tolist() for name, ids in made.items()}


def gradient(batches: list[MicroBatch]) -> torch.Tensor:
    """Of a step, for a model that takes the padding of a sample for tokens of it."""
    model = TinyModel()
    for batch in batches:
        losses = model(batch.input_ids, batch.cu_seqlens.tolist())
        ((losses * batch.loss_weights).sum() * batch.loss_scale).backward()
    grads = [item.grad for item in model.parameters() if item.grad is not None]
    return torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize("packed_length", [None, BUDGET, 100])
def test_samples_are_planned_and_padded_to_the_same_multiple(
    tmp_path: Path, packed_length: int | None
) -> None:
    options = STEPS | {"micro_batch_tokens": BUDGET, "sample_length_multiple": MULTIPLE}
    with ServeProcess(tmp_path, **options) as server:
        ids = push(server.endpoint)
        stream = MicroBatchStream(
            server.endpoint, packed_length=packed_length, weights_dtype=torch.float64
        )
        with stream:
            step = next(stream)
            batches = list(step)
            step.commit()
        metrics = server.scrape()
    rows = [len(batch.input_ids) for batch in batches]
    assert max(rows) <= (packed_length or BUDGET)
    if packed_length is not None:
        assert set(rows) == {packed_length}
    found = {}
    for batch in batches:
        starts = batch.cu_seqlens.tolist()
        assert not any(start % MULTIPLE for start in starts[:-1])
        for name, start, size in zip(batch.sample_ids, starts, batch.lengths, strict=False):
            found[name] = batch.input_ids[start : start + size].tolist()
    assert found == ids
    assert sum(batch.tokens for batch in batches) == step.tokens == sum(LENGTHS)
    assert sum(float(batch.loss_weights.sum()) for batch in batches) == step.loss_tokens
    assert metrics["padding_tokens_total"] == sum(rows) - sum(LENGTHS)
    assert metrics["dispatched_tokens_total"] == sum(LENGTHS)
    plain = [batch.as_packed() for batch in batches]
    torch.testing.assert_close(gradient(batches), gradient(plain), rtol=0, atol=1e-12)


def test_a_packed_length_below_the_budget_is_refused_at_the_start(tmp_path: Path) -> None:
    with ServeProcess(tmp_path, **STEPS, micro_batch_tokens=BUDGET) as server:
        with pytest.raises(RankRefused, match=r"packed_length=63 .* 64 \(--micro-batch-tokens 64"):
            MicroBatchStream(server.endpoint, packed_length=BUDGET - 1)
        with pytest.raises(ConfigError, match="packed_length"):
            MicroBatchStream(server.endpoint, packed_length=0)
        with pytest.raises(ConfigError, match="for packed micro-batches, and these are jagged"):
            MicroBatchStream(server.endpoint, packed_length=BUDGET, layout="jagged")
        MicroBatchStream(server.endpoint, packed_length=BUDGET).close()


@pytest.mark.parametrize("multiple", [1, MULTIPLE])
def test_padded_micro_batches_of_any_number_stay_within_the_budget(
    tmp_path: Path, multiple: int
) -> None:
    """Two ranks, each with a stream of its own: rows of every micro-batch, and the gradient."""
    options = STEPS | {
        "dp_size": 2,
        "micro_batch_tokens": BUDGET,
        "layout": "padded",
        "sample_length_multiple": multiple,
    }
    with ServeProcess(tmp_path, **options) as server:
        ids = push(server.endpoint)
        with RankClient(server.endpoint, dp_rank=0, dp_size=2) as asking:
            generation = asking.generation
        ranks = [
            MicroBatchStream(
                server.endpoint,
                dp_rank=rank,
                dp_size=2,
                generation=generation,
                weights_dtype=torch.float64,
            )
            for rank in range(2)
        ]
        with ThreadPoolExecutor(2) as pool:
            steps = list(pool.map(next, ranks))
            batches = [batch for step in steps for batch in step]
            for step in steps:
                step.commit()
        metrics = server.scrape()
        for stream in ranks:
            stream.close()
    shapes = [tuple(batch.input_ids.shape) for batch in batches]
    assert len(steps[0]) == len(steps[1])
    assert all(len(batch.lengths) == rows for batch, (rows, _) in zip(batches, shapes, strict=True))
    assert all(rows * width <= BUDGET and not width % multiple for rows, width in shapes)
    assert len({rows for rows, _ in shapes}) > 1
    found = {
        name: batch.input_ids[row, :size].tolist()
        for batch in batches
        for row, (name, size) in enumerate(zip(batch.sample_ids, batch.lengths, strict=True))
    }
    assert found == ids
    computed = sum(rows * width for rows, width in shapes)
    assert metrics["padding_tokens_total"] == computed - sum(LENGTHS)
    assert computed < 2 * sum(LENGTHS)
    again = [batch.as_packed().as_padded() for batch in batches]
    assert all(
        torch.equal(one.input_ids, other.input_ids[:, : one.input_ids.shape[1]])
        for one, other in zip(again, batches, strict=True)
    )
    assert sum(float(batch.loss_weights.sum()) for batch in batches) == steps[0].loss_tokens
