"""A dispatcher that passes on what is no segment: bytes are asked for from then on."""

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.assemble import Shared, micro_batch
from rollout_dispatcher.protocol.versions import SHARED_MEMORY
from rollout_dispatcher.transport.shared_memory.segments import write_segment
from rollout_workers.rank.client import RankClient
from rollout_workers.rank.payload import arrays
from rollout_workers.rank.shared_memory.gatherer import MAPPED_BYTES
from tests.support.descriptors import number_open_on
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


def test_segments_are_kept_for_the_next_micro_batch_and_closed_after_the_last(
    dispatcher: ScriptedDispatcher, threads: ThreadPoolExecutor
) -> None:
    first, second = sample(list(range(9000))), sample(list(range(100, 9100)))
    spans = [span_of(first), span_of(second)]
    after = len(spans[0])
    with (
        joined(dispatcher, threads) as (client, peer),
        opened(lambda: write_segment(spans)) as both,
    ):
        file = os.fstat(both)
        peer.send(step(0, 3))
        peer.expect(m.Prepared)
        peer.send(m.Release(step=0))
        shared = Shared([sum(map(len, spans))], [(0, 0)], keep=True)
        frame = b"".join(micro_batch(0, 0, [first], shared=shared))
        socket.send_fds(peer._sock, [frame], [both])
        shared = Shared([], [(0, after), (0, 0)], keep=True)
        peer.send_bytes(b"".join(micro_batch(0, 1, [second, first], shared=shared)))
        taken = client.next_step(10)
        assert taken is not None
        received = [taken.micro_batch(at) for at in range(2)]
        ids = [arrays(it.payload, it.blocks)["input_ids"].tolist() for it in received]
        assert ids == [list(range(9000)), [*range(100, 9100), *range(9000)]]
        assert number_open_on(file) == 1 + 1  # for the third
        peer.send_bytes(b"".join(micro_batch(0, 2, [SAMPLE])))  # says nothing of them
        taken.micro_batch(2)
        assert number_open_on(file) == 1


def test_what_is_kept_ends_with_the_connection(
    dispatcher: ScriptedDispatcher, threads: ThreadPoolExecutor
) -> None:
    with (
        joined(dispatcher, threads) as (client, peer),
        opened(lambda: write_segment([span_of(SAMPLE)])) as good,
    ):
        file = os.fstat(good)
        peer.send(step(0, 2))
        peer.expect(m.Prepared)
        peer.send(m.Release(step=0))
        frame = b"".join(
            micro_batch(0, 0, [SAMPLE] * 2, shared=Shared([NBYTES], [(0, 0)] * 2, keep=True))
        )
        socket.send_fds(peer._sock, [frame], [good])
        taken = client.next_step(10)
        assert taken is not None
        taken.micro_batch(0)
        assert number_open_on(file) == 1 + 1
        peer.close()
        again = dispatcher.accept()
        again.welcome_rank(capabilities=[SHARED_MEMORY])
        eventually(lambda: number_open_on(file) == 1, "the segment is closed")
        again.send_bytes(  # counts from 0 again, of which there is none
            b"".join(micro_batch(0, 1, [SAMPLE], shared=Shared([], [(0, 0)])))
        )
        with pytest.raises(ProtocolError, match="of segment 0, which has 0"):
            taken.micro_batch(1)
