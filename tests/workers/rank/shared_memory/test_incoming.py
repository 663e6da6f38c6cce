"""A dispatcher that passes on what is no segment: bytes are asked for from then on."""

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from time import monotonic

import pytest

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.assemble import Shared, micro_batch
from rollout_dispatcher.protocol.versions import SHARED_MEMORY
from rollout_dispatcher.transport.shared_memory.segments import write_segment
from rollout_workers.rank.client import RankClient
from rollout_workers.rank.payload import arrays
from rollout_workers.rank.shared_memory.gatherer import MAPPED_BYTES
from tests.support.descriptors import a_lingering_socket, number_open_on
from tests.support.samples import span_of
from tests.support.server import eventually
from tests.workers.support.peers import Peer, ScriptedDispatcher, sample, step

IDS = list(range(MAPPED_BYTES // 8))
SAMPLE = sample(IDS)
NBYTES = len(span_of(SAMPLE))


def unsealed() -> int:
    descriptor = os.memfd_create("open")
    os.write(descriptor, span_of(SAMPLE))
    return descriptor


def pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def small() -> int:
    return write_segment([bytes(NBYTES // 2)])


def regular() -> int:
    return os.open(__file__, os.O_RDONLY)


@contextmanager
def opened(make: Callable[[], int]) -> Iterator[int]:
    descriptor = make()
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def give_shared(peer: Peer, *descriptors: int) -> None:
    """A released step of one sample, that is said to lie in a segment."""
    peer.send(step(0, 1))
    peer.expect(m.Prepared)
    peer.send(m.Release(step=0))
    frame = b"".join(micro_batch(0, 0, [SAMPLE], shared=Shared([NBYTES], [(0, 0)])))
    socket.send_fds(peer._sock, [frame], list(descriptors))


@contextmanager
def joined(
    dispatcher: ScriptedDispatcher, threads: ThreadPoolExecutor
) -> Iterator[tuple[RankClient, Peer]]:
    joining = threads.submit(RankClient, dispatcher.endpoint, dp_rank=0, dp_size=2)
    peer = dispatcher.accept()
    hello = peer.welcome_rank(capabilities=[SHARED_MEMORY])
    assert SHARED_MEMORY in hello.capabilities
    client = joining.result(10)
    try:
        yield client, peer
    finally:
        dispatcher.hang_up()
        client.close()


@pytest.mark.parametrize("make", [unsealed, pipe, small, regular])
def test_what_is_no_segment_is_asked_for_in_bytes(
    dispatcher: ScriptedDispatcher, threads: ThreadPoolExecutor, make: Callable[[], int]
) -> None:
    with joined(dispatcher, threads) as (client, peer), opened(make) as cheat:
        give_shared(peer, cheat)
        again = dispatcher.accept()
        hello = again.welcome_rank()
        assert SHARED_MEMORY not in hello.capabilities
        assert hello.received == [(0, 0)]
        again.send_bytes(b"".join(micro_batch(0, 0, [SAMPLE])))
        taken = client.next_step(10)
        assert taken is not None
        [received] = taken
        assert arrays(received.payload, received.blocks)["input_ids"].tolist() == IDS


def test_a_segment_is_closed_once_its_micro_batch_is_gathered(
    dispatcher: ScriptedDispatcher, threads: ThreadPoolExecutor
) -> None:
    with (
        joined(dispatcher, threads) as (client, peer),
        opened(lambda: write_segment([span_of(SAMPLE)])) as good,
    ):
        file = os.fstat(good)
        give_shared(peer, good)
        taken = client.next_step(10)
        assert taken is not None
        [received] = taken
        assert received.payload == span_of(SAMPLE)
        assert number_open_on(file) == 1 + 1  # a single sample is mapped
        taken.commit()
        del received, taken
        assert number_open_on(file) == 1


@pytest.mark.parametrize("count", [0, 3 * m.MAX_SEGMENTS])
def test_more_or_fewer_descriptors_than_are_spoken_of_harm_nobody(
    dispatcher: ScriptedDispatcher, threads: ThreadPoolExecutor, count: int
) -> None:
    with (
        joined(dispatcher, threads) as (client, peer),
        opened(lambda: write_segment([b"x"])) as some,
    ):
        file = os.fstat(some)
        with suppress(ConnectionError):
            give_shared(peer, *[some] * count)
        if not count:  # what it says is wrong
            with pytest.raises(ProtocolError, match="speaks of 1 file descriptors, and 0 came"):
                list(client.next_step(10) or ())  # the step is released before it is known
        else:  # what it sends is too much: perhaps there was no room for it
            assert SHARED_MEMORY not in dispatcher.accept().welcome_rank().capabilities
        eventually(lambda: number_open_on(file) == 1, "they are closed")


def test_a_rank_does_not_wait_for_what_it_was_given_to_be_closed(
    dispatcher: ScriptedDispatcher, threads: ThreadPoolExecutor
) -> None:
    with joined(dispatcher, threads) as (_, peer), a_lingering_socket(20) as slow:
        give_shared(peer, slow)
        os.close(slow)
        began = monotonic()
        assert SHARED_MEMORY not in dispatcher.accept().welcome_rank().capabilities
        assert monotonic() - began < 5
