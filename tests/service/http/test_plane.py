"""The HTTP plane: health, metrics, and samples from producers in any language."""

import json
import re
from collections.abc import Iterator

import pytest

from rollout_dispatcher import __version__
from rollout_dispatcher.protocol import messages as m
from tests.service.conftest import SMALL, Serve
from tests.support.client import Trainer
from tests.support.server import ServeProcess

#: How long a reason to wait is there, behind its words.
AGE = r" \(\d+ s\)"
SAMPLE = {"fields": {"input_ids": [1, 2, 3], "loss_mask": [False, True, True]}}
VERSIONED = {"fields": {"input_ids": [1, 2, 3]}, "policy_version": 3}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("shared")
    options = SMALL | {"buffer_capacity": 1000, "max_body_bytes": "64KiB"}
    with ServeProcess(folder, warm=True, **options) as server:
        yield server


def body(*samples: object) -> bytes:
    """One object alone, several as NDJSON."""
    return b"\n".join(json.dumps(sample).encode() for sample in samples)


def test_a_live_and_ready_dispatcher_says_so(shared: ServeProcess) -> None:
    assert (shared.get("/livez").status, shared.get("/livez").text) == (200, "ok\n")
    for probe in "/livez", "/readyz":
        headers = shared.get(probe).headers
        assert headers["Rollout-Dispatcher-Run-Id"] == shared.status()["run_id"]
        assert headers["Rollout-Dispatcher-Version"] == __version__
    lines = re.sub(AGE, "", shared.get("/readyz").text).splitlines()
    waits_for = "DP ranks 0, 1 not joined yet; 0 of 4 samples are ready; no producer is connected"
    lost = "lost: no time of DP ranks is accounted for: no step was begun, or the run is over"
    first = "ok: running; no DP rank is connected"
    assert lines == [first, f"the next step waits for: {waits_for}", lost]
    assert shared.get("/readyz").status == 200


@pytest.mark.parametrize(
    "data",
    [body(SAMPLE), json.dumps([SAMPLE, SAMPLE]).encode(), body(SAMPLE, SAMPLE, SAMPLE) + b"\n\n"],
    ids=["object", "array", "NDJSON"],
)
def test_samples_are_accepted(data: bytes, shared: ServeProcess) -> None:
    answer = shared.post("/v1/samples", data)
    assert answer.status == 200
    assert set(answer.json["outcomes"]) == {"accepted"}
    assert len(answer.json["outcomes"]) == data.count(b"input_ids")
    assert answer.json["errors"] == {}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "holds no sample"),
        (body(SAMPLE) + b"\n{", "and the body's end comes (line 2 column 2)"),
        (body({"field": {}}), "field: there is no such key (did you mean fields?)"),
        (body(SAMPLE | {"group_id": "p", "group_size": 0}), "group_size: it must be greater than"),
        (body({"input_ids": [1, 2]}), 'stand in fields: {"fields": {"input_ids": ...}} (line 1'),
        (body(SAMPLE | {"policy_version": -1}), "policy_version: "),
        (body(SAMPLE | {"staleness_exempt": 1}), "staleness_exempt: it must be a valid boolean"),
        (body(SAMPLE, SAMPLE | {"sample_id": "x"}), "either all samples"),
        (body({"fields": {"input_ids": [1], "x" * 200: 1}}), "at most 128 characters"),
    ],
)
def test_a_body_that_is_no_sample_is_answered_400_and_says_why(
    data: bytes, words: str, shared: ServeProcess
) -> None:
    answer = shared.post("/v1/samples", data)
    assert answer.status == 400
    assert answer.json["code"] == "invalid"
    assert words in answer.json["message"]


def test_a_refused_sample_is_422_and_the_others_are_unharmed(shared: ServeProcess) -> None:
    long = {"fields": {"input_ids": list(range(65)), "loss_mask": [True] * 65}}
    empty = {"fields": {"input_ids": {"dtype": "int64", "data": []}, "loss_mask": []}}
    empty["fields"]["loss_mask"] = {"dtype": "bool", "data": []}
    answer = shared.post("/v1/samples", body(SAMPLE, long, empty))
    assert answer.status == 422
    assert answer.json["outcomes"] == ["accepted", "refused", "refused"]
    assert "65 tokens, the limit is 64" in answer.json["errors"]["1"]
    assert "no tokens" in answer.json["errors"]["2"]
    assert answer.json["reasons"] == {"1": "too-long", "2": "empty"}


def test_who_pushes_over_http_is_a_client_with_what_was_refused_last(serve: Serve) -> None:
    server = serve()
    assert server.post("/v1/samples", body(SAMPLE, SAMPLE)).status == 200
    (client,) = server.get("/v1/clients").json["clients"]
    assert (client["client_id"], client["role"]) == ("http 127.0.0.1", "producer")
    assert (client["connected"], client["samples_accepted"]) == (True, 2)
    assert client["last_error"] == ""
    refused = server.post("/v1/samples", b"{")
    (client,) = server.get("/v1/clients").json["clients"]
    assert client["last_error"] == refused.json["message"]


def test_a_full_buffer_is_429_with_when_to_retry(serve: Serve) -> None:
    server = serve()
    answer = server.post("/v1/samples", body(*[SAMPLE] * 5))
    assert answer.status == 429
    assert answer.headers["Retry-After"] == "1"
    assert answer.json["outcomes"] == ["accepted"] * 4 + ["full"]
    assert server.status()["pushes_held"] == 0


def test_a_group_can_be_closed_and_a_phase_ended(serve: Serve) -> None:
    server = serve()
    member = SAMPLE | {"group_id": "g 1", "group_size": 2, "policy_version": 1}
    assert server.post("/v1/samples", body(member)).status == 200
    assert server.post("/v1/groups/g%201/close").status == 200
    assert server.status()["buffered"] == 0
    assert server.post("/v1/phases/2/end").status == 200
    late = server.post("/v1/samples", body(SAMPLE | {"policy_version": 1}))
    assert (late.status, late.json["outcomes"]) == (422, ["refused"])


def test_a_group_of_which_nothing_is_known_is_not_closed(shared: ServeProcess) -> None:
    answer = shared.post("/v1/groups/unheard-of/close")
    assert (answer.status, answer.json["code"]) == (422, "unknown-group")
    assert "group unheard-of is not known, so closing it" in answer.json["message"]


@pytest.mark.parametrize("version", ["x", "-1", "1.5", "9" * 16, "9" * 5000])
def test_a_phase_that_is_no_number_is_400(version: str, shared: ServeProcess) -> None:
    answer = shared.post(f"/v1/phases/{version}/end")
    assert answer.status == 400
    assert "policy version" in answer.json["message"]


def test_an_answer_says_where_the_trainer_is(serve: Serve) -> None:
    server = serve(max_staleness=2)
    answer = server.post("/v1/samples", body(VERSIONED)).json
    kept = answer.keys() - {"outcomes", "errors", "reasons"}
    assert {name: answer[name] for name in kept} == {
        "policy_version": None, "expected_version": None, "staleness": None,
        "max_staleness": 2, "remaining": 3,
    }  # fmt: skip
    with Trainer(server.endpoint, 2) as trainer:
        trainer.ranks[0].send(m.PolicyVersion(policy_version=5, first_step=0))
        server.await_status(policy_version=5)
        answer = server.post("/v1/samples", body(VERSIONED)).json
    assert (answer["policy_version"], answer["expected_version"]) == (5, 5)
    assert answer["staleness"] == 2
