"""Padding from the dispatcher's flag to the tensors, between real processes."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout_dispatcher.errors import ConfigError, RankRefused
from rollout_workers import MicroBatch, MicroBatchStream, RolloutProducer
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


@pytest.mark.parametrize(
    ("layout", "packed_length"),
    [("packed", None), ("packed", BUDGET), ("packed", 100), ("padded", None)],
)
def test_samples_are_planned_and_padded_to_the_same_multiple_within_the_budget(
    tmp_path: Path, layout: str, packed_length: int | None
) -> None:
    options = STEPS | {"micro_batch_tokens": BUDGET, "sample_length_multiple": MULTIPLE}
    with ServeProcess(tmp_path, layout=layout, **options) as server:
        ids = push(server.endpoint)
        with MicroBatchStream(
            server.endpoint, packed_length=packed_length, weights_dtype=torch.float64
        ) as stream:
            step = next(stream)
            batches = list(step)
            step.commit()
        metrics = server.scrape()
    rows = [batch.input_ids.numel() for batch in batches]
    assert max(rows) <= (packed_length or BUDGET)
    assert packed_length is None or set(rows) == {packed_length}
    for batch in batches:
        starts = batch.placement.starts.tolist()
        assert not any(start % MULTIPLE for start in starts)
    plain = [batch.as_packed() for batch in batches]
    found = {}
    for batch in plain:
        for name, (start, stop) in zip(
            batch.sample_ids, pairwise(batch.cu_seqlens.tolist()), strict=True
        ):
            found[name] = batch.input_ids[start:stop].tolist()
    assert found == ids
    assert sum(batch.tokens for batch in batches) == step.tokens == sum(LENGTHS)
    assert sum(float(batch.loss_weights.sum()) for batch in batches) == step.loss_tokens
    assert metrics["padding_tokens_total"] == sum(rows) - sum(LENGTHS)
    assert metrics["dispatched_tokens_total"] == sum(LENGTHS)
    if layout == "packed":
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
