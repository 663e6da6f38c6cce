"""The order of a step's micro-batches, and its cap of tokens, from flags to the training loop.

Pushed by a real producer, read from a stream, and once more after the dispatcher was killed.
"""

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_workers import MicroBatch, MicroBatchStream, RolloutProducer
from tests.support.addresses import free_address
from tests.support.server import ServeProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

STAGES = 4
LENGTHS = [3, 30, 8, 21, 64, 17, 40, 50]
OPTIONS: dict[str, Any] = {
    "dp_size": 1,
    "global_batch_size": len(LENGTHS),
    "window": 1,
    "micro_batch_tokens": 64,
    "micro_batch_multiple": 10,
    "sample_length_multiple": 4,
    "cost": "tokens",
}


def push(address: str) -> None:
    with RolloutProducer(address) as producer:
        for index, length in enumerate(LENGTHS):
            producer.push({"input_ids": np.arange(length)}, sample_id=f"s{index}")


def first_step(address: str) -> tuple[str, list[MicroBatch]]:
    """Its digest and micro-batches; it is not committed."""
    with MicroBatchStream(address) as stream:
        step = next(stream)
        return step.digest, list(step)


def held(batch: MicroBatch) -> int:
    """Tokens that a rank computes for it."""
    return 0 if batch.is_filler else sum(-(-length // 4) * 4 for length in batch.lengths)


@pytest.mark.parametrize("stages", [1, STAGES])
def test_a_stream_gets_the_peak_first_or_for_a_pipeline_small_ends(
    tmp_path: Path, stages: int
) -> None:
    address = free_address()
    options = OPTIONS | {"pipeline_stages": stages, "journal_dir": tmp_path / "journal"}
    with ServeProcess(tmp_path, listen=address, **options) as server:
        push(address)
        digest, batches = first_step(address)
        metrics = server.scrape()
        server.send_signal(signal.SIGKILL)
        server.wait()
    with ServeProcess(tmp_path, listen=address, **options):
        again = first_step(address)

    assert (digest, [one.sample_ids for one in batches]) == (
        again[0],
        [one.sample_ids for one in again[1]],
    )
    sizes = [held(one) for one in batches]
    peak = sizes.index(max(sizes))
    assert len(sizes) == 10
    assert sizes.count(0) == [one.is_filler for one in batches].count(True) == 2
    assert sizes[:peak] == sorted(sizes[:peak])
    assert sizes[peak:] == sorted(sizes[peak:], reverse=True)
    if stages == 1:
        assert peak == 0
        assert batches[-2].is_filler
    else:
        assert 4 <= peak <= 5
        assert batches[0].is_filler
        assert batches[-1].is_filler
    assert [one.is_last for one in batches] == [False] * 9 + [True]
    assert sorted(name for one in batches if not one.is_filler for name in one.sample_ids) == (
        sorted(f"s{index}" for index in range(len(LENGTHS)))
    )
    time = sum(sizes) + (stages - 1) * max(sizes)
    excess = time / (sum(sizes) * (1 + (stages - 1) / len(sizes))) - 1
    costs = [metrics[f"planned_cost_total{{split={split}}}"] for split in ("planned", "even")]
    assert costs[0] / costs[1] - 1 == pytest.approx(excess, abs=1e-9)


def test_a_step_is_smaller_where_a_rank_would_have_more_than_its_cap(tmp_path: Path) -> None:
    address = free_address()
    cap = 100
    options = OPTIONS | {"micro_batch_multiple": 1, "rank_tokens": cap}
    with ServeProcess(tmp_path, listen=address, **options) as server:
        push(address)
        with RolloutProducer(address) as producer:
            producer.end_stream(force=True)
        steps = []
        with MicroBatchStream(address) as stream:
            for step in stream:
                steps.append(list(step))
                step.commit()
        assert server.wait() == 0
    names = [name for step in steps for batch in step for name in batch.sample_ids]
    assert sorted(names) == sorted(f"s{index}" for index in range(len(LENGTHS)))
    assert all(sum(map(held, step)) <= cap for step in steps)
    assert len(steps) >= 3
