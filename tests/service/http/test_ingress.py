"""Frames from many connections at once: bounded memory, turns in order, and nobody starves."""

import os
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic

import pytest

from rollout_dispatcher.errors import SampleRefused
from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import DType, Outcome
from rollout_workers import RolloutProducer
from tests.service.conftest import Serve
from tests.service.http.test_limits import connect
from tests.support.client import Producer, WireClient
from tests.support.server import ServeProcess, eventually

MIB = 2**20
#: Large samples are refused once they are here, so that memory is that of frames being received;
#: small ones are accepted, and wait for ranks.
BUSY = {"max_sample_tokens": 64, "buffer_capacity": 100_000}
#: Room for one of the frames below.
ONE_AT_A_TIME = {**BUSY, "receive_bytes": "10MiB"}
SIZE = 8 * MIB
ENDED = ("eof", "reset")


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


class Sender(WireClient):
    """A producer that pushes one large sample, a part at a time."""

    def __init__(
        self, server: ServeProcess, name: str, nbytes: int = SIZE, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(server.endpoint, tls=tls)
        self.send(m.HelloProducer(client_id=name))
        self.expect(m.WelcomeProducer)
        tokens = nbytes // 8
        push = m.Push(
            first_seq=0,
            floor=0,
            fields=[m.FieldHeader(name="input_ids", dtype=DType.INT64)],
            tokens=[tokens],
            loss_tokens=[tokens - 1],
            sample_ids=[name],
        )
        self._left = nbytes
        self._sending: threading.Thread | None = None
        self.send_bytes(codec.encode(push, nbytes))

    def send_payload(self, nbytes: int | None = None) -> None:
        """Send so much of the payload, or all that is left."""
        nbytes = self._left if nbytes is None else nbytes
        self._left -= nbytes
        while nbytes:
            part = min(nbytes, MIB)
            self.send_bytes(bytes(part))
            nbytes -= part

    def finish(self) -> None:
        """Send all that is left from a thread of its own, as it may take a while."""
        self._sending = threading.Thread(target=self.send_payload, daemon=True)
        self._sending.start()

    def outcome(self) -> list[Outcome]:
        """What became of the sample.

        All is sent first: an `ssl.SSLSocket` that one thread writes while another reads tells the
        reader of an end that there is not (Python before 3.13 locks none).
        """
        if self._sending is not None:
            self._sending.join()
        while not isinstance(message := self.receive()[0], m.Pushed):
            assert isinstance(message, m.Blocked), message
        return message.outcomes


def resident(server: ServeProcess) -> int:
    pages = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def await_receiving(server: ServeProcess, nbytes: int) -> None:
    """Wait until frames have so much memory."""
    server.await_scrape(
        lambda found: found["receiving_bytes"] == nbytes, f"{nbytes} bytes are received"
    )


def keep_up(server: ServeProcess, seconds: float, then: Callable[[], object]) -> None:
    """Do something again and again for a while."""
    until = monotonic() + seconds
    while monotonic() < until:
        then()
        server.get("/livez")


def test_forty_large_frames_at_once_have_bounded_memory_and_all_come_through(serve: Serve) -> None:
    server = serve(receive_bytes="128MiB", **BUSY)
    quiet, before = Producer(server.endpoint, "quiet"), resident(server)
    senders = [Sender(server, f"p{at}", 64 * MIB) for at in range(40)]
    may_finish = threading.Event()

    def send(sender: Sender) -> None:
        sender.send_payload(63 * MIB)
        may_finish.wait()
        sender.send_payload()

    threads = [threading.Thread(target=send, args=(it,), daemon=True) for it in senders]
    for thread in threads:
        thread.start()
    eventually(lambda: resident(server) - before > 120 * MIB, "as much as may has arrived")
    most = 0

    def push_and_look() -> None:
        nonlocal most
        most = max(most, resident(server))
        began = monotonic()
        assert quiet.push([3]).outcomes == ["accepted"]
        assert monotonic() - began < 1

    keep_up(server, 1.0, push_and_look)
    may_finish.set()
    for sender in senders:
        assert sender.outcome() == ["refused"]
        most = max(most, resident(server))
    assert most - before < 128 * MIB + 32 * MIB, f"{(most - before) / MIB:.0f} MiB more"
    await_receiving(server, 0)


def test_who_waits_hears_that_the_dispatcher_lives_and_what_it_waits_for(serve: Serve) -> None:
    server = serve(**ONE_AT_A_TIME, heartbeat_interval="50ms")
    holder, waiting = Sender(server, "holder"), Sender(server, "waiting")
    await_receiving(server, SIZE)
    blocked = m.Blocked(cap="receive-bytes", held=SIZE, capacity=10 * MIB)
    assert [waiting.expect(m.Blocked) for _ in range(3)] == [blocked] * 3
    holder.send_payload()
    assert holder.outcome() == ["refused"]


def test_a_client_that_waits_for_long_stays_on_its_connection(
    serve: Serve, threads: ThreadPoolExecutor
) -> None:
    server = serve(**ONE_AT_A_TIME, heartbeat_interval="400ms")
    holder = Sender(server, "holder")
    await_receiving(server, SIZE)
    with RolloutProducer(server.endpoint) as client:
        client.push({"input_ids": [1] * 64})  # a small one passes
        pushing = threads.submit(client.push, {"input_ids": [1] * MIB})
        keep_up(server, 3.0, lambda: holder.send_payload(1))
        assert not pushing.done()
        holder.send_payload()
        with pytest.raises(SampleRefused, match="the limit is 64"):
            pushing.result(20)
    assert server.scrape()["connections_total{role=producer}"] == 2


def test_a_frame_that_does_not_come_makes_way_for_those_that_wait(serve: Serve) -> None:
    server = serve(**ONE_AT_A_TIME, request_timeout="500ms")
    stalled = Sender(server, "stalled")
    stalled.send_payload(MIB)
    await_receiving(server, SIZE)
    waiting = Sender(server, "waiting")
    waiting.finish()
    error = stalled.expect_error("too-slow")
    assert error.retriable
    assert "bytes of a frame have come, the last of them too slowly over 0.5 s" in error.message
    assert waiting.outcome() == ["refused"]
    await_receiving(server, 0)


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
def test_a_request_that_finds_no_room_is_told_when_to_come_again(
    chunked: bool, serve: Serve
) -> None:
    server = serve(**ONE_AT_A_TIME)
    small = b'{"fields": {"input_ids": [5, 6, 7]}}'
    large = small.ljust(4 * MIB)
    holder = Sender(server, "holder")
    await_receiving(server, SIZE)

    def post(body: bytes) -> tuple[int, dict[str, str], str]:
        parts = [body[at : at + MIB] for at in range(0, len(body), MIB)]
        answer = server.request("POST", "/v1/samples", iter(parts) if chunked else body)
        return answer.status, answer.headers, answer.text

    status, headers, text = post(large)
    assert (status, headers["Retry-After"]) == (503, "1")
    assert "raise --set receive-bytes" in text
    assert post(small)[0] == 200
    holder.send_payload()
    assert holder.outcome() == ["refused"]
    assert post(large)[0] == 200
    await_receiving(server, 0)


def test_a_request_body_takes_room_until_it_is_here(serve: Serve) -> None:
    server = serve(**ONE_AT_A_TIME, max_body_bytes=f"{SIZE}B")
    with connect(server) as slow:
        slow.sendall(b"POST /v1/samples HTTP/1.1\r\nHost: x\r\n")
        slow.sendall(f"Content-Length: {SIZE}\r\n\r\n".encode())
        await_receiving(server, SIZE)
        waiting = Sender(server, "waiting")
        waiting.finish()
        server.get("/livez")
        await_receiving(server, SIZE)
    assert waiting.outcome() == ["refused"]
