"""Peers that are slow, silent or too many: deadlines end them, and nobody else waits for it."""

from time import monotonic

import pytest

from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.frame import MAGIC, PREFIX
from tests.service.conftest import Serve
from tests.support.client import Producer, Rank, Trainer, WireClient, make_push
from tests.support.server import ServeProcess, eventually


def train_a_step(server: ServeProcess, producer: Producer, trainer: Trainer) -> None:
    committed = server.status()["steps_committed"]
    assert producer.push([3, 4, 5, 6]).outcomes == ["accepted"] * 4
    assert trainer.train()
    server.await_status(steps_committed=committed + 1, balanced=True)


@pytest.mark.parametrize("said", [b"", MAGIC, PREFIX.pack(MAGIC, 1, 0, 64, 0)], ids=len)
def test_a_peer_that_does_not_introduce_itself_is_told_so_and_closed(
    said: bytes, serve: Serve
) -> None:
    server = serve(handshake_timeout="500ms")
    producer, trainer = Producer(server.endpoint, "p"), Trainer(server.endpoint, 2)
    with WireClient(server.endpoint) as silent:
        silent.send_bytes(said)
        assert silent.expect_error("protocol").message == "no hello within 0.5 s"
    train_a_step(server, producer, trainer)


def test_a_rank_that_stops_reading_is_dropped_and_gets_its_step_when_it_returns(
    serve: Serve,
) -> None:
    # One micro-batch is larger than what the kernel buffers between two processes.
    server = serve(
        global_batch_size=2, micro_batch_tokens=2**20, write_timeout="1s", max_wait="10ms"
    )
    producer = Producer(server.endpoint, "p")
    first = Rank(server.endpoint, 0, 2, receive_buffer=4096)
    second = Rank(server.endpoint, 1, 2, generation=first.generation)
    for rank in (first, second):
        rank.demand(taken=-1)
    assert producer.push([2**20, 2**20]).outcomes == ["accepted"] * 2
    second.hold(0)
    second.prepare(0)
    server.await_scrape(
        lambda found: found.get("connection_errors_total{reason=write-timeout,role=rank}") == 1,
        "the rank that reads nothing is dropped",
    )
    second.settle()
    assert not second.steps[0].released
    producer.ping()
    server.await_status(ranks_connected=1, in_flight=2)

    first = first.reconnect()
    first.hold(0)
    first.prepare(0)
    for rank in (first, second):
        rank.await_release(0)
        rank.commit(0)
    server.await_status(steps_committed=1, balanced=True)


def test_a_rank_that_reads_slowly_is_left_alone(serve: Serve) -> None:
    # The kernel lets us write again once a third of its buffer, a megabyte or so, has been read:
    # the rank reads several times that within the timeout, and yet takes longer for its frame.
    timeout = 1.0
    server = serve(micro_batch_tokens=2**21, write_timeout=f"{timeout}s")
    producer = Producer(server.endpoint, "p")
    slow = Rank(server.endpoint, 0, 2, receive_buffer=1 << 16)
    other = Rank(server.endpoint, 1, 2, generation=slow.generation)
    for rank in (slow, other):
        rank.demand(taken=-1)
    for _ in range(4):
        assert producer.push([2**20]).outcomes == ["accepted"]
    other.hold(0)
    began = monotonic()
    slow.hold(0, pause=0.01)
    assert monotonic() - began > 1.5 * timeout, "this was not slow enough to show anything"
    assert server.status()["ranks_connected"] == 2


def test_a_producer_that_stops_reading_is_dropped_and_harms_nobody(serve: Serve) -> None:
    server = serve(write_timeout="300ms")
    producer, trainer = Producer(server.endpoint, "p"), Trainer(server.endpoint, 2)
    deaf = WireClient(server.endpoint, receive_buffer=4096)
    deaf.send(m.HelloProducer(client_id="deaf"))
    # Every sample is refused with some words, so the answers are longer than the pushes.
    push, payload = make_push("deaf", 0, [0] * 500)
    frame = codec.encode(push, len(payload)) + payload

    def is_dropped() -> bool:
        try:
            deaf.send_bytes(frame)
        except (ConnectionError, TimeoutError):
            return True
        return False

    eventually(is_dropped, "the producer that reads nothing is dropped")
    server.await_scrape(
        lambda found: found.get("connection_errors_total{reason=write-timeout,role=producer}") == 1,
        "its connection is counted",
    )
    train_a_step(server, producer, trainer)


def test_a_goodbye_ends_a_connection_that_is_not_read_from(serve: Serve) -> None:
    server = serve(global_batch_size=2, micro_batch_tokens=2**20, write_timeout="60s")
    producer = Producer(server.endpoint, "p")
    leaver = Rank(server.endpoint, 0, 2, receive_buffer=4096)
    other = Rank(server.endpoint, 1, 2, generation=leaver.generation)
    assert producer.push([2**20, 2**20]).outcomes == ["accepted"] * 2
    for rank in (leaver, other):
        rank.demand(taken=-1)
    other.hold(0)
    leaver.send(m.Bye())
    assert "DP rank 0 closed its stream" in other.expect_error("peer-lost").message
    server.await_status(ranks_connected=0)


def test_connections_beyond_the_limit_are_told_so_and_may_retry(serve: Serve) -> None:
    server = serve(max_connections=3)
    producer, trainer = Producer(server.endpoint, "p"), Trainer(server.endpoint, 2)
    refusals = "connection_errors_total{reason=connection-limit,role=unknown}"
    with WireClient(server.endpoint) as fourth:
        error = fourth.expect_error("connection-limit")
        assert error.retriable
        assert "serves 3 connections; raise --set max-connections" in error.message
    server.await_scrape(lambda found: found.get(refusals) == 1, "the refused connection is gone")
    train_a_step(server, producer, trainer)
    producer.bye()
    train_a_step(server, Producer(server.endpoint, "q"), trainer)
