"""Arrays are sent from where they are; once a push has returned or raised, they are the caller's.

What arrives has to be what was pushed, even if the caller changed his arrays the moment he got them
back, while the dispatcher had read nothing, or half of it, or was lost and had to be told again.
"""

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_dispatcher.protocol import messages as m
from rollout_workers import AsyncRolloutProducer, Credentials, RankClient, RolloutProducer
from rollout_workers.rank.payload import arrays
from tests.support.certificates import Authority
from tests.support.server import ServeProcess
from tests.workers.support.peers import Peer, ScriptedDispatcher

#: Far more bytes of each field than sockets take, so that most of them wait in the producer.
TOKENS = 1 << 20
WELCOME = {"max_payload_bytes": 1 << 30}


def fields() -> dict[str, Any]:
    return {"input_ids": np.arange(TOKENS), "logprobs": np.arange(TOKENS, dtype=np.float32)}


def change(pushed: dict[str, Any]) -> None:
    for array in pushed.values():
        array[:] = -1


def span(pushed: dict[str, Any]) -> bytes:
    return b"".join(pushed[name].tobytes() for name in sorted(pushed))


Joined = tuple[RolloutProducer, Peer]


@pytest.fixture
def producer(dispatcher: ScriptedDispatcher) -> Joined:
    return dispatcher.producer(**WELCOME)


def test_after_a_timeout_what_is_on_its_way_stays_as_it_was(producer: Joined) -> None:
    made, peer = producer
    pushed = fields()
    with pytest.raises(TimeoutError, match="may still be accepted"):
        made.push(pushed, timeout=0.2)
    change(pushed)
    push = peer.expect(m.Push)
    assert bytes(peer.payload) == span(fields())
    peer.answer(push)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, which Python keeps."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_after_an_interrupt_what_is_on_its_way_stays_as_it_was(producer: Joined) -> None:
    made, peer = producer
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        """Once the push is on its way, and its thread busy: the caller has to wait for it."""
        made._thread.call(lambda: threading.Event().wait(0.3))
        signal.pthread_kill(main, signal.SIGINT)

    pushed = fields()
    threading.Timer(0.1, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        made.push(pushed)
    change(pushed)
    push = peer.expect(m.Push)
    assert bytes(peer.payload) == span(fields())
    peer.answer(push)


async def test_after_a_cancellation_what_is_on_its_way_stays_as_it_was(
    dispatcher: ScriptedDispatcher,
) -> None:
    made = AsyncRolloutProducer(dispatcher.endpoint)
    accepting = dispatcher.meanwhile(dispatcher.accept)
    starting = asyncio.create_task(made.start())
    peer = await asyncio.wrap_future(accepting)
    await asyncio.wrap_future(dispatcher.meanwhile(lambda: peer.welcome_producer(**WELCOME)))
    await starting
    for turns in range(5):  # of the event loop before it is cancelled
        pushed = fields()
        pushing = asyncio.create_task(made.push(pushed))
        for _ in range(turns):
            await asyncio.sleep(0)
        pushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pushing
        change(pushed)
        if turns:  # otherwise it never began
            push = await asyncio.wrap_future(dispatcher.meanwhile(peer.expect, m.Push))
            assert bytes(peer.payload) == span(fields())
            peer.answer(push)
    peer.close()
    await made.close()


@contextmanager
def stopped(server: ServeProcess) -> Iterator[None]:
    server.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.send_signal(signal.SIGCONT)


@pytest.mark.e2e
@pytest.mark.parametrize("way", ["tcp", "unix", "tls", "journal"])
def test_a_dispatcher_that_was_stopped_trains_on_what_was_pushed(way: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "dp_size": 1, "global_batch_size": 1, "window": 1, "micro_batch_tokens": TOKENS,
    }  # fmt: skip
    trusted = Credentials()
    if way == "unix":
        options["listen"] = f"unix:{tmp_path}/sample.sock"
    elif way == "tls":
        authority = Authority(tmp_path)
        options |= authority.issue("127.0.0.1").options()
        trusted = Credentials(tls_ca=authority.ca)
    elif way == "journal":
        options["journal_dir"] = tmp_path / "journal"
    with (
        ServeProcess(tmp_path, **options) as server,
        RolloutProducer(server.endpoint, credentials=trusted) as made,
    ):
        pushed = fields()
        with stopped(server):
            with pytest.raises(TimeoutError):
                made.push(pushed, timeout=0.3)
            change(pushed)
        rank = RankClient(server.endpoint, dp_rank=0, dp_size=1, credentials=trusted)
        step = rank.next_step(20)
        assert step is not None
        (micro_batch,) = step
        found = arrays(micro_batch.payload, micro_batch.blocks)
        assert all(np.array_equal(found[name], array) for name, array in fields().items())
        rank.close()
