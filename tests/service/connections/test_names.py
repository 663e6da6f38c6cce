"""A producer's name is its own: who knows it and not its key cannot speak for it."""

import signal
from pathlib import Path

import pytest

from rollout_dispatcher.protocol import messages as m
from tests.service.conftest import Serve
from tests.support.client import WireClient, make_push
from tests.support.server import ServeProcess

KEY, ANOTHER = "0123456789abcdef", "fedcba9876543210"


def hello(server: ServeProcess, key: str | None, name: str = "victim") -> WireClient:
    client = WireClient(server.endpoint)
    client.send(m.HelloProducer(client_id=name, key=key))
    return client


def welcomed(server: ServeProcess, key: str | None, name: str = "victim") -> WireClient:
    client = hello(server, key, name)
    client.expect(m.WelcomeProducer)
    return client


def push(client: WireClient, seq: int, *, floor: int = 0) -> list[str]:
    client.send(*make_push("victim", seq, [3], floor=floor))
    return [str(outcome) for outcome in client.expect(m.Pushed).outcomes]


@pytest.mark.parametrize("key", [None, ANOTHER], ids=["none", "another"])
def test_who_shows_another_key_does_not_raise_the_floor(
    key: str | None, serve: Serve, tmp_path: Path
) -> None:
    server = serve(buffer_capacity=100, journal_dir=tmp_path / "journal")
    victim = welcomed(server, KEY)
    assert push(victim, 0) == ["accepted"]
    refused = hello(server, key).expect_error("unauthorized")
    assert "another client has the name victim" in refused.message
    assert KEY not in server.log()
    assert push(victim, 1) == ["accepted"]  # nobody has taken its connection either
    victim.close()
    hello(server, key).expect_error("unauthorized")  # nor while it is away
    assert push(welcomed(server, KEY), 2) == ["accepted"]

    # The next process remembers it.
    server.__exit__(None)
    again = serve(buffer_capacity=100, journal_dir=tmp_path / "journal")
    hello(again, key).expect_error("unauthorized")
    assert push(welcomed(again, KEY), 3) == ["accepted"]
    assert again.status()["accepted"] == 4


def test_a_name_without_a_key_is_everybodys_until_one_is_shown(serve: Serve) -> None:
    server = serve(buffer_capacity=100)
    assert push(welcomed(server, None), 0) == ["accepted"]
    assert push(welcomed(server, None), 0) == ["duplicate"]
    assert push(welcomed(server, KEY), 0) == ["duplicate"]
    hello(server, None).expect_error("unauthorized")


def test_who_said_goodbye_is_not_waited_for_after_a_crash(serve: Serve, tmp_path: Path) -> None:
    server = serve(buffer_capacity=100, journal_dir=tmp_path / "journal")
    for name in ("left", "back", "here"):
        producer = welcomed(server, KEY, name)
        assert push(producer, 0) == ["accepted"]
        if name != "here":
            producer.bye()
    assert push(welcomed(server, KEY, "back"), 1) == ["accepted"]
    server.send_signal(signal.SIGKILL)
    server.wait()
    again = serve(buffer_capacity=100, journal_dir=tmp_path / "journal")
    assert sorted(again.post("/v1/stream/end").json["waits_for"]) == ["back", "here"]
