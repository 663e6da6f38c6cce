"""Producers hear which fields the run's samples have, at once or later, and fit what they push."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_dispatcher.errors import SampleRefused
from rollout_dispatcher.sample import Outcome
from rollout_workers import RolloutProducer, RolloutSample
from tests.support.client import Trainer
from tests.support.server import ServeProcess

PLAIN: dict[str, Any] = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "reward": 1}


def serve(folder: Path, **options: Any) -> ServeProcess:
    settings = {"dp_size": 1, "dispatch_batch_size": 2, "window_multiple": 1} | options
    return ServeProcess(folder, warm=True, micro_batch_tokens=512, **settings)


def typed(reward: float) -> dict[str, Any]:
    mask = np.array([False, True, True])
    return {"input_ids": np.arange(3), "loss_mask": mask, "reward": np.float32(reward)}


def test_declared_fields_are_told_with_the_welcome(tmp_path: Path) -> None:
    fields = "input_ids:int64,loss_mask:bool,reward:float32:per-sample"
    with serve(tmp_path, fields=fields) as server, RolloutProducer(server.endpoint) as producer:
        assert producer.push(PLAIN) is Outcome.ACCEPTED
        body = json.dumps({"fields": PLAIN}).encode()
        assert server.post("/v1/samples", body).json["outcomes"] == ["accepted"]
        with pytest.raises(SampleRefused, match=r"loss_mask\[1\] is 2, .* as bool \(declared by"):
            producer.push(PLAIN | {"loss_mask": [0, 2, 1]})
        with pytest.raises(SampleRefused, match="extra is unexpected") as caught:
            producer.push(PLAIN | {"extra": 0.5})
        assert "declared by --fields" in str(caught.value)
        assert "reward" not in str(caught.value), "that one was made to fit"


def test_producers_that_are_there_already_are_told_when_the_first_step_decides(
    tmp_path: Path,
) -> None:
    with (
        serve(tmp_path) as server,
        RolloutProducer(server.endpoint) as one,
        RolloutProducer(server.endpoint) as other,
        Trainer(server.endpoint, 1) as trainer,
    ):
        one.push_many([typed(0.5), typed(1)])
        trainer.train()
        other.close_group("nothing")  # answered behind what was said before
        assert other.push(PLAIN) is Outcome.ACCEPTED
        one.push(typed(0))
        trainer.train()
        server.await_status(samples_committed=4)


def wide(reward: float) -> dict[str, Any]:
    return typed(reward) | {"reward": np.array(reward)}


@pytest.mark.parametrize(("group", "kept"), [(None, "drop"), ("g", "drop"), ("g", "keep")])
def test_what_was_held_when_the_first_step_decided_is_made_to_fit(
    tmp_path: Path, group: str | None, kept: str
) -> None:
    """It was encoded before anybody knew: it is refused as it was, and comes in as it should be."""
    with (
        serve(tmp_path, incomplete_groups=kept) as server,
        RolloutProducer(server.endpoint) as one,
        RolloutProducer(server.endpoint) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        one.push_many([typed(0.5), typed(1)])
        samples = [RolloutSample(wide(0.1), f"s{n}", group, 2 if group else None) for n in range(2)]
        held = pool.submit(other.push_many, samples, timeout=30)
        server.await_scrape(lambda seen: seen["backpressure_active"] == 1, "a push is held")
        with Trainer(server.endpoint, 1) as trainer:
            trainer.train()
            assert held.result(30) == [Outcome.ACCEPTED] * 2
            (step,) = trainer.train()
            assert {name for part, _ in step.micro_batches for name in part.sample_ids} == {
                "s0",
                "s1",
            }
