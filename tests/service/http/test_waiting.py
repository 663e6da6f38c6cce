"""A push over HTTP may wait for room: until there is some, its time is up, or nobody waits."""

import json
import select
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import monotonic, sleep

import pytest

from rollout_dispatcher.core.admission.eligibility import ASKS_AGAIN_S
from rollout_dispatcher.protocol import messages as m
from tests.service.conftest import Serve
from tests.service.http.test_limits import connect
from tests.support.client import Trainer
from tests.support.server import ServeProcess

SAMPLE = {"fields": {"input_ids": [1, 2, 3]}, "policy_version": 3}
#: Far longer than what is waited for takes.
LONG = "20s"


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def body(count: int) -> bytes:
    return json.dumps([SAMPLE] * count).encode()


def fill(server: ServeProcess) -> None:
    assert server.post("/v1/samples", body(4)).json["outcomes"] == ["accepted"] * 4
    assert server.post("/v1/samples", body(1)).status == 429


def request(wait: str) -> bytes:
    said = body(1)
    head = (
        f"POST /v1/samples?wait={wait} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(said)}\r\n\r\n"
    )
    return head.encode() + said


def test_it_is_accepted_once_there_is_room(serve: Serve, threads: ThreadPoolExecutor) -> None:
    server = serve()
    fill(server)
    waits = [threads.submit(server.post, f"/v1/samples?wait={LONG}", body(2)) for _ in range(2)]
    with Trainer(server.endpoint, 2) as trainer:
        trainer.train()
        answers = [waiting.result() for waiting in waits]
    assert [answer.status for answer in answers] == [200, 200]
    assert [answer.json["outcomes"] for answer in answers] == [["accepted"] * 2] * 2
    found = server.scrape()
    assert found["samples_received_total{outcome=accepted}"] == 8


def test_of_what_does_not_fit_in_time_it_says_so(serve: Serve) -> None:
    server, began = serve(), monotonic()
    answer = server.post("/v1/samples?wait=300ms", body(6))
    assert monotonic() - began >= 0.3
    assert answer.status == 429
    assert answer.headers["Retry-After"] == "1"
    assert answer.json["outcomes"] == ["accepted"] * 4 + ["full"] * 2


def test_nobody_waits_longer_than_a_request_may_take(serve: Serve) -> None:
    server, began = serve(request_timeout="300ms"), monotonic()
    assert server.post(f"/v1/samples?wait={LONG}", body(5)).status == 429
    assert 0.3 <= monotonic() - began < 10


def test_a_client_that_hangs_up_makes_room_for_another(serve: Serve) -> None:
    server = serve(max_waiting_bodies=1)
    fill(server)
    with connect(server) as one, connect(server) as other:
        for client in (one, other):
            client.sendall(request(LONG))
        ((answered, *_), _, _) = select.select([one, other], [], [], 10)
        assert answered.recv(65536).startswith(b"HTTP/1.1 429"), "only one of them may wait"
        held = other if answered is one else one
        held.settimeout(0.2)
        with pytest.raises(TimeoutError):
            held.recv(1)
    deadline = monotonic() + 10
    while monotonic() < deadline:  # until it is seen that the first has gone
        began = monotonic()
        assert server.post("/v1/samples?wait=200ms", body(1)).status == 429
        if monotonic() - began >= 0.2:
            return
    pytest.fail("nobody may wait, though nobody does")


def test_a_drain_answers_at_once(serve: Serve) -> None:
    server = serve()
    fill(server)
    with connect(server) as held:
        held.sendall(request(LONG))
        held.settimeout(0.2)
        with pytest.raises(TimeoutError):
            held.recv(1)
        began = monotonic()
        server.send_signal(signal.SIGTERM)
        held.settimeout(20)
        assert held.recv(65536).startswith(b"HTTP/1.1 429")
        assert monotonic() - began < 10


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("wait=5", "write a number and a unit"),
        ("wait=-1s", "write a number and a unit"),
        ("wait=0s", "greater than 0"),
        ("wiat=5s", "wiat: there is no such key (did you mean wait?)"),
    ],
)
def test_what_cannot_be_waited_for_is_400(query: str, words: str, serve: Serve) -> None:
    answer = serve().post(f"/v1/samples?{query}", body(1))
    assert (answer.status, answer.json["code"]) == (400, "invalid")
    assert words in answer.json["message"]


def test_an_answer_says_where_the_trainer_is(serve: Serve) -> None:
    server = serve(max_staleness=2)
    answer = server.post("/v1/samples", body(1)).json
    kept = answer.keys() - {"outcomes", "errors", "reasons"}
    assert {name: answer[name] for name in kept} == {
        "policy_version": None, "expected_version": None, "staleness": None,
        "max_staleness": 2, "remaining": 3,
    }  # fmt: skip
    with Trainer(server.endpoint, 2) as trainer:
        trainer.ranks[0].send(m.PolicyVersion(policy_version=5, first_step=0))
        server.await_status(policy_version=5)
        answer = server.post("/v1/samples", body(1)).json
    assert (answer["policy_version"], answer["expected_version"]) == (5, 5)
    assert answer["staleness"] == 2


def test_at_a_hard_cap_ranks_that_come_late_get_a_smaller_step_for_it(
    serve: Serve, threads: ThreadPoolExecutor
) -> None:
    """The core gives room for those alone who keep asking, and who is held asks nothing himself."""
    server = serve(buffer_bytes="64B")  # two samples of 24 bytes, and half a step
    waiting = threads.submit(server.post, f"/v1/samples?wait={LONG}", body(3))
    server.await_status(buffered=2)
    sleep(ASKS_AGAIN_S + 0.5)
    with Trainer(server.endpoint, 2) as trainer:
        trainer.train()
        answer = waiting.result()
    assert (answer.status, answer.json["outcomes"]) == (200, ["accepted"] * 3)
