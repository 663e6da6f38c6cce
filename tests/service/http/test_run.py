"""Which run answers over HTTP: each answer names it, and a request may name the one it expects."""

import json

import pytest

from tests.service.conftest import Serve

RUN = "Rollout-Dispatcher-Run-Id"
BODY = json.dumps({"fields": {"input_ids": [1, 2, 3]}}).encode()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/samples"),
        ("POST", "/v1/groups/g/close?size=2"),
        ("POST", "/v1/phases/3/end"),
        ("GET", "/statusz"),
    ],
)
def test_an_answer_names_the_run_and_a_request_for_another_one_is_refused(
    serve: Serve, method: str, path: str
) -> None:
    server = serve()
    run = server.status()["run_id"]
    body = BODY if path == "/v1/samples" else b""
    for names in (["another"], [run, "another"]):
        refused = server.request(method, path, body, *((RUN, name) for name in names))
        assert (refused.status, refused.headers[RUN]) == (409, run)
        assert refused.json["code"] == "run-changed"
        assert f"serves run {run} now, and no longer run another" in refused.json["message"]
    assert server.status()["accepted"] == 0
    for names in ([], [run]):
        taken = server.request(method, path, body, *((RUN, name) for name in names))
        assert (taken.status, taken.headers[RUN]) == (200, run)
    assert server.status()["accepted"] == 2 * bool(body)
