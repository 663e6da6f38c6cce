"""What DP ranks are sent of segments: a descriptor a step, to those who keep it; nothing stays."""

import os
import resource
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from threading import Event, Thread
from time import monotonic

import numpy as np
import pytest

from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.service.delivery.frames import KEPT
from rollout_workers import RolloutProducer
from rollout_workers.rank.client import RankClient
from rollout_workers.rank.payload import arrays
from tests.support import shared_memory
from tests.support.client import PATIENCE_S, Rank
from tests.support.server import ServeProcess, eventually

pytestmark = pytest.mark.e2e

#: Samples of a step and of a micro-batch; 72 kB each, so that a push of four is a segment.
BATCH, MICRO_BATCH, TOKENS = 8, 2, 9000
BOTH = ("shared-memory", "kept-segments")


class SharingRank(Rank):
    """Takes descriptors, and keeps them all until it is closed."""

    def __init__(self, endpoint: str, capabilities: Sequence[str]) -> None:
        self.descriptors: list[int] = []
        super().__init__(endpoint, 0, 1, capabilities=[*capabilities])

    def receive(self, within: float = PATIENCE_S) -> tuple[m.Message, memoryview]:
        """The next message, as of any client; descriptors are put with the others."""
        deadline = monotonic() + within
        while not self._arrived:
            self._sock.settimeout(max(0.001, deadline - monotonic()))
            target = self._reader.get_buffer()
            data, came, _, _ = socket.recv_fds(self._sock, len(target), 2 * m.MAX_SEGMENTS)
            assert data, "the dispatcher closed the connection"
            target[: len(data)] = data
            self.descriptors += came
            frames = self._reader.received(len(data))
            self._arrived += [(codec.decode(frame), frame.payload) for frame in frames]
        return self._arrived.pop(0)

    def train(self, number: int) -> list[m.MicroBatch]:
        """Train a step; the headers of its micro-batches."""
        self.demand(taken=number - 1)
        step = self.hold(number)
        self.prepare(number)
        self.await_release(number)
        self.demand(taken=number, hungry=False)
        self.commit(number)
        return [header for header, _ in step.micro_batches]

    def close(self) -> None:
        """Hang up, with nothing left open."""
        super().close()
        while self.descriptors:
            os.close(self.descriptors.pop())


@contextmanager
def serving(folder: Path, **options: object) -> Iterator[ServeProcess]:
    """Two steps are there, of two segments each."""
    sizes = {"dispatch_batch_size": BATCH, "micro_batch_size": MICRO_BATCH, "buffer_capacity": 64}
    with shared_memory.serving(folder, **sizes, **options) as server:
        push(server, 4, 4)
        yield server


def push(server: ServeProcess, count: int, each: int) -> None:
    """So many pushes, each of so many samples: their tokens are 0, 1, ... each time."""
    with RolloutProducer(server.endpoint) as producer:
        for _ in range(count):
            producer.push_many([{"input_ids": np.arange(TOKENS)} for _ in range(each)])


def spans(rank: SharingRank, headers: Sequence[m.MicroBatch]) -> list[bytes]:
    """What lies where the micro-batches of a step say that their samples do."""
    kept: list[int] = []
    found, came = [], list(rank.descriptors)
    for header in headers:
        kept += [came.pop(0) for _ in header.segments or ()]
        for place in header.segment_places or ():
            assert place is not None
            index, offset = place
            found.append(os.pread(kept[index], TOKENS * 8, offset))
        if not header.keep_segments:
            kept.clear()
    return found


def test_who_keeps_segments_is_sent_each_of_them_once_a_step(tmp_path: Path) -> None:
    with serving(tmp_path) as server, SharingRank(server.endpoint, BOTH) as rank:
        for number in (0, 1):
            headers = rank.train(number)
            assert len(rank.descriptors) == sum(len(it.segments or ()) for it in headers) == 2
            assert [it.keep_segments for it in headers] == [True, True, True, False]
            assert spans(rank, headers) == [np.arange(TOKENS).tobytes()] * BATCH
            while rank.descriptors:
                os.close(rank.descriptors.pop())
        nothing = {"shared_memory_segments": 0, "shared_memory_bytes": 0}
        eventually(lambda: nothing.items() <= server.scrape().items(), "nothing is held any more")


def test_who_does_not_is_sent_those_of_each_micro_batch(tmp_path: Path) -> None:
    with serving(tmp_path) as server, SharingRank(server.endpoint, BOTH[:1]) as rank:
        headers = rank.train(0)
        assert not any(it.keep_segments for it in headers)
        assert all(it.segments for it in headers)
        assert spans(rank, headers) == [np.arange(TOKENS).tobytes()] * BATCH


def test_on_a_new_connection_they_are_sent_again(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        first = SharingRank(server.endpoint, BOTH)
        first.demand(taken=-1)
        first.pump(lambda: 0 in first.steps and bool(first.steps[0].micro_batches), "some of it")
        first.close()
        with SharingRank(server.endpoint, BOTH) as rank:
            assert len(spans(rank, rank.train(0))) == BATCH


def test_of_many_segments_a_few_are_kept_at_a_time(tmp_path: Path) -> None:
    sizes = {"dispatch_batch_size": 2 * KEPT + 4, "micro_batch_size": 2, "buffer_capacity": 4096}
    with (
        shared_memory.serving(tmp_path, **sizes) as server,
        SharingRank(server.endpoint, BOTH) as rank,
    ):
        with RolloutProducer(server.endpoint) as producer:
            for _ in range(2 * KEPT + 4):  # a segment each
                producer.push({"input_ids": np.arange(4 * TOKENS + 1)})
        headers = rank.train(0)
        assert sum(len(it.segments or ()) for it in headers) == 2 * KEPT + 4
        kept = 0
        for header in headers:
            kept += len(header.segments or ())
            assert kept <= KEPT + 2
            kept = kept if header.keep_segments else 0
        assert kept == 0


def test_a_rank_knows_which_it_has_where_the_dispatcher_runs_out_of_descriptors(
    tmp_path: Path,
) -> None:
    steps = 16
    sizes = {"dispatch_batch_size": 64, "micro_batch_size": 4, "buffer_capacity": 64 * steps}
    with shared_memory.serving(tmp_path, **sizes) as server:
        with RolloutProducer(server.endpoint) as producer:
            for at in range(0, 64 * steps, 8):
                ids = [np.arange(TOKENS) + 1000 * number for number in range(at, at + 8)]
                producer.push_many([{"input_ids": of} for of in ids])
        with (
            RankClient(server.endpoint, dp_rank=0, dp_size=1, prefetch_steps=2) as client,
            now_and_then_without_descriptors(server.pid),
        ):
            firsts = []
            for _ in range(steps):
                step = client.next_step(PATIENCE_S)
                assert step is not None
                for received in step:
                    values = arrays(received.payload, received.blocks)["input_ids"]
                    rows = values.reshape(-1, TOKENS).astype(np.int64)
                    assert (np.diff(rows) == 1).all()
                    firsts += rows[:, 0].tolist()
                step.commit()
            assert sorted(firsts) == [1000 * number for number in range(64 * steps)]


@contextmanager
def now_and_then_without_descriptors(pid: int) -> Iterator[None]:
    """For some milliseconds at a time a process may open no more files."""
    limits, draw, over = resource.prlimit(pid, resource.RLIMIT_NOFILE), Random(1), Event()

    def squeeze() -> None:
        while not over.wait(draw.uniform(0, 0.004)):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
            over.wait(draw.uniform(0, 0.004))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)

    thread = Thread(target=squeeze)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
