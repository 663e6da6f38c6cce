"""Producers hear which fields the run's samples have, at once or later, and fit what they push."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_dispatcher.errors import SampleRefused
from rollout_dispatcher.sample import Outcome
from rollout_workers import RolloutProducer
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
