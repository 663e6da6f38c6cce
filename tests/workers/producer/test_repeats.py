"""Samples that come in vain, as ids are used again: other content under an id, many duplicates."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_dispatcher.core.admission.eligibility import MANY
from rollout_dispatcher.sample import Outcome
from rollout_workers import RolloutProducer, RolloutSample
from tests.support.server import ServeProcess

ACCEPTED, DUPLICATE, CONFLICT = Outcome.ACCEPTED, Outcome.DUPLICATE, Outcome.CONFLICT


def rollout(*ids: int) -> dict[str, Any]:
    return {"input_ids": list(ids), "reward": 0.5, "env": "math"}


def serve(folder: Path, **options: Any) -> ServeProcess:
    settings = {"dp_size": 1, "global_batch_size": 64, "micro_batch_tokens": 512} | options
    return ServeProcess(folder, warm=True, **settings)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_an_epoch_that_uses_prompt_ids_again_is_told_and_the_first_samples_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serve(tmp_path) as server, RolloutProducer(server.endpoint) as producer:
        assert producer.push(rollout(1, 2), sample_id="p0", policy_version=1) is ACCEPTED
        assert producer.push(rollout(1, 2), sample_id="p0", policy_version=1) is DUPLICATE
        assert warnings(caplog) == []
        assert producer.push(rollout(1, 3), sample_id="p0", policy_version=1) is CONFLICT
        assert producer.push(rollout(1, 2), sample_id="p0", policy_version=2) is CONFLICT
        assert producer.push(rollout(1, 2), sample_id="p0", group_id="g", group_size=1) is CONFLICT
        (said,) = warnings(caplog)
        assert "sample p0 has other content than the accepted sample of this id" in said
        assert "with its epoch or step in it" in said
        seen = server.scrape()
        assert seen["samples_received_total{outcome=conflict}"] == 3
        assert seen["samples_received_total{outcome=duplicate}"] == 1
        assert seen["buffer_samples"] == 1
        producer.close()
        assert "3 samples had ids of accepted ones with other content" in warnings(caplog)[-1]
    assert server.log().count("has other content than the accepted sample of this id") == 1


def test_over_http_and_from_producers_the_same_content_is_the_same(tmp_path: Path) -> None:
    with serve(tmp_path) as server, RolloutProducer(server.endpoint) as producer:

        def post(**sample: Any) -> Any:
            return server.post("/v1/samples", json.dumps(sample).encode())

        fields = rollout(1, 2, 3)
        facts: Any = {"group_id": "g", "group_size": 2, "policy_version": 4}
        assert post(fields=fields, sample_id="a", **facts).json["outcomes"] == ["accepted"]
        assert producer.push(fields, sample_id="a", **facts) is DUPLICATE
        assert producer.push(fields, sample_id="b") is ACCEPTED
        assert post(fields=fields, sample_id="b").json["outcomes"] == ["duplicate"]
        answer = post(fields=rollout(1, 2, 4), sample_id="b")
        assert (answer.status, answer.json["outcomes"]) == (200, ["conflict"])


def test_content_is_known_again_from_the_journal_and_in_a_payload_store(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    store = f"file://{tmp_path / 'store'}"
    options = {"journal_dir": tmp_path / "journal", "payload_stores": store, "inline_limit": "64B"}
    large = {"input_ids": np.arange(200)}
    with serve(tmp_path, **options) as server, RolloutProducer(server.endpoint) as producer:
        assert producer.push(large, sample_id="a") is ACCEPTED
        assert server.scrape()["buffer_referenced_bytes"] == 1600
    with serve(tmp_path, **options) as server, RolloutProducer(server.endpoint) as producer:
        assert producer.push(large, sample_id="a") is DUPLICATE
        assert producer.push({"input_ids": np.arange(200) + 1}, sample_id="a") is CONFLICT
        assert server.status()["buffered"] == 1


def test_many_duplicates_in_a_row_are_logged_by_the_dispatcher(tmp_path: Path) -> None:
    with serve(tmp_path, global_batch_size=512) as server:
        samples = [RolloutSample(rollout(1, at), f"s{at}") for at in range(MANY)]
        with RolloutProducer(server.endpoint) as producer:
            producer.push_many(samples)
            assert set(producer.push_many(samples)) == {DUPLICATE}
        assert server.log().count(f"{MANY} samples in a row of producer") == 1
