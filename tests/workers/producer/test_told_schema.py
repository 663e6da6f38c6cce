"""Producers hear which fields the run's samples have, at once or later, and fit what they push."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_dispatcher.errors import SampleRefused
from rollout_dispatcher.sample import Outcome
from rollout_workers import RolloutProducer
from tests.support.server import ServeProcess

PLAIN: dict[str, Any] = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "reward": 1}


def serve(folder: Path, **options: Any) -> ServeProcess:
    settings = {"dp_size": 1, "global_batch_size": 2, "window": 1} | options
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


def test_the_first_push_decides_and_another_type_is_refused_to_its_producer_at_once(
    tmp_path: Path,
) -> None:
    with (
        serve(tmp_path) as server,
        RolloutProducer(server.endpoint) as one,
        RolloutProducer(server.endpoint) as other,
    ):
        one.push(typed(0.5))
        other.close_group("nothing")  # answered behind what was said before
        assert other.push(PLAIN) is Outcome.ACCEPTED, "plain numbers are made of the run's types"
        with pytest.raises(
            SampleRefused, match=r"reward is float32\[2\] per sample, not"
        ) as caught:
            other.push(typed(0.5) | {"reward": np.zeros(2, np.float32)})
        assert "set by the first accepted push, from producer" in str(caught.value)
        assert "if that push was wrong, restart with the right --fields" in str(caught.value)
        body = json.dumps({"fields": {"input_ids": [5, 6, 7]}}).encode()
        answer = server.post("/v1/samples", body)
        assert answer.status == 422
        assert "reward is missing" in answer.json["errors"]["0"]
        assert server.scrape()["samples_dropped_total{reason=schema}"] == 0
