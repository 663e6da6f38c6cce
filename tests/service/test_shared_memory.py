"""Producers on this host: pushes as shared memory, what is held of them, and peers that cheat.

Real processes and Unix sockets. What DP ranks make of it: tests/workers/test_shared_memory.py.
"""

import fcntl
import gc
import os
import signal
import socket
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.service.connections.peer import DESCRIPTORS_AHEAD
from rollout_dispatcher.transport.descriptors.closing import MOST_THREADS
from rollout_dispatcher.transport.shared_memory.segments import DESCRIPTORS_EACH, write_segment
from rollout_workers import Outcome, RolloutProducer, RolloutSample
from rollout_workers.producer.layout import ArrayLike
from tests.support import shared_memory
from tests.support.client import Producer, Rank, Trainer, WireClient, make_push
from tests.support.descriptors import (
    a_lingering_socket,
    an_endless_close,
    kernel_refuses_descriptors,
    send_away,
)
from tests.support.server import ServeProcess, eventually
from tests.support.shared_memory import SEGMENT
from tests.support.source import PYTHONPATH

pytestmark = pytest.mark.e2e

BATCH, TOKENS = 8, 5000
#: Four samples, 360 kB: large enough for shared memory.
LARGE = [10_000] * 4

serving = partial(
    shared_memory.serving, dispatch_batch_size=BATCH, micro_batch_size=2, buffer_capacity=4096
)


class SharingProducer(WireClient):
    """A producer that says what the test says, with whatever descriptors."""

    def __init__(self, endpoint: str, capabilities: Sequence[str] = ("shared-memory",)) -> None:
        super().__init__(endpoint)
        self.send(m.HelloProducer(client_id=f"wire-{id(self):x}", capabilities=[*capabilities]))
        self.welcome = self.expect(m.WelcomeProducer)

    def send_with(self, data: bytes, descriptors: Sequence[int]) -> None:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))
        sent = self._sock.sendmsg([data], [rights])
        self._sock.sendall(data[sent:])
        for descriptor in descriptors:
            os.close(descriptor)

    def push(self, descriptor: int, nbytes: int, first_seq: int = 0) -> None:
        self.send_with(large_push(nbytes, first_seq), [descriptor])

    def is_refused(self, code: str) -> str:
        """Returns the message, and hangs up."""
        message = self.expect_error(code).message
        self.close()
        return message


def large_push(nbytes: int, first_seq: int = 0, name: str = "wire") -> bytes:
    push, _ = make_push(name, first_seq, LARGE)
    return codec.encode(push.model_copy(update={"segment": nbytes}))


PAYLOAD = make_push("wire", 0, LARGE)[1]


def shared(server: ServeProcess) -> tuple[float, float]:
    """Segments that are held, and their bytes."""
    now = server.scrape()
    return now["shared_memory_segments"], now["shared_memory_bytes"]


def descriptors_of(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def has_segments(pid: int) -> bool:
    """Whether a process has one open or mapped; what earlier tests left in cycles is none."""
    gc.collect()
    opened = [one.readlink() for one in Path(f"/proc/{pid}/fd").iterdir() if one.is_symlink()]
    return SEGMENT in str(opened) + Path(f"/proc/{pid}/maps").read_text()


def samples(count: int) -> list[dict[str, ArrayLike]]:
    return [{"input_ids": np.arange(at, at + TOKENS)} for at in range(count)]


def of_groups(groups: Sequence[str]) -> list[RolloutSample]:
    """A sample a name, of the group of that name."""
    those = zip(samples(len(groups)), groups, strict=True)
    return [RolloutSample(fields, group_id=group) for fields, group in those]


# -- chosen by itself ------------------------------------------------------------------------


def test_large_pushes_over_a_unix_socket_are_shared_and_freed_with_their_last_sample(
    tmp_path: Path,
) -> None:
    with serving(tmp_path) as server:
        local, by_tcp = server.endpoints
        with RolloutProducer(by_tcp) as producer:
            producer.push_many(samples(BATCH))
        with RolloutProducer(local) as producer:
            producer.push_many(samples(1))
            assert shared(server) == (0, 0)  # small, or by TCP
            producer.push_many(samples(BATCH - 1))
        nbytes = (BATCH - 1) * TOKENS * 8
        assert shared(server) == (1, nbytes)
        assert server.scrape()["shared_memory_descriptors"] == DESCRIPTORS_EACH
        assert server.scrape()["buffer_bytes"] == nbytes + (BATCH + 1) * TOKENS * 8
        assert not has_segments(os.getpid())
        trainer = Trainer(local, dp_size=1)
        trainer.train()
        trainer.train()
        eventually(lambda: shared(server) == (0, 0), "nothing is held any more")
        assert not has_segments(server.pid)


def test_where_it_is_off_bytes_are_sent(tmp_path: Path) -> None:
    with serving(tmp_path, shared_memory="off") as server:
        with RolloutProducer(server.endpoint) as producer:
            assert producer.push_many(samples(BATCH)) == [Outcome.ACCEPTED] * BATCH
        assert shared(server) == (0, 0)
        assert server.status()["balanced"]


def test_what_was_shared_is_what_ranks_get_after_a_crash_too(tmp_path: Path) -> None:
    options = {"journal_dir": tmp_path / "journal"}
    with serving(tmp_path, **options) as server:
        producer = SharingProducer(server.endpoint)
        producer.push(write_segment([PAYLOAD]), len(PAYLOAD))
        assert producer.expect(m.Pushed).outcomes == [Outcome.ACCEPTED]
        server.send_signal(signal.SIGKILL)
    with serving(tmp_path, dispatch_batch_size=4, **options) as server:
        assert shared(server) == (0, 0)
        assert trained(server.endpoint) == [(at, 10_000) for at in range(4)]


def trained(endpoint: str) -> list[tuple[int, int]]:
    """First token and number of tokens of each sample of the next step, by the tokens."""
    rank = Rank(endpoint, 0, 1)
    rank.demand(taken=-1)
    step = rank.hold(0)
    found = []
    for head, payload in step.micro_batches:
        ids = np.frombuffer(payload, np.int64, sum(head.tokens))
        starts = np.cumsum([0, *head.tokens])
        for start, count in zip(starts, head.tokens, strict=False):
            values = ids[start : start + count]
            assert (np.diff(values) == 1).all()
            found.append((int(values[0]) // 1000, count))
    rank.close()
    return sorted(found)


# -- what it takes ---------------------------------------------------------------------------


def test_beyond_a_quarter_of_the_descriptors_pushes_are_copied(tmp_path: Path) -> None:
    with serving(tmp_path, open_files=256) as server:
        most = 256 // 4 // DESCRIPTORS_EACH
        with RolloutProducer(server.endpoint) as producer:
            for _ in range(most + 5):
                producer.push_many(samples(BATCH))
        now = server.scrape()
        assert now["shared_memory_segments"] == most
        assert now["shared_memory_copied_bytes_total"] == 5 * BATCH * TOKENS * 8
        assert descriptors_of(server.pid) < 256 // 2


def test_a_held_push_that_is_let_go_frees_its_segment_and_comes_again(tmp_path: Path) -> None:
    """Two pushes wait at the cap, and there is memory for one."""
    nbytes = BATCH * TOKENS * 8
    options = {"buffer_capacity": BATCH, "held_bytes": f"{nbytes}B"}
    with serving(tmp_path, **options) as server:
        script = PUSHER.format(endpoint=server.endpoint, tokens=TOKENS, count=BATCH, times=3)
        with pushing(script) as pusher:
            server.await_scrape(lambda now: now["pushes_held"] == 2, "two pushes wait")
            eventually(lambda: shared(server) == (2, 2 * nbytes), "one payload was let go")
            trainer = Trainer(server.endpoint, dp_size=1)
            for _ in range(3):
                trainer.train()
            assert pusher.wait(20) == 0
        eventually(lambda: shared(server) == (0, 0), "nothing is held any more")


#: Pushes so many times at once, from a process of its own, and stays until it is told to go.
PUSHER = """
import asyncio, sys
import numpy as np
from rollout_workers import AsyncRolloutProducer
async def main():
    samples = [{{"input_ids": np.arange({tokens})}} for _ in range({count})]
    async with AsyncRolloutProducer("{endpoint}") as producer:
        await asyncio.gather(*(producer.push_many(samples) for _ in range({times})))
        print("pushed", flush=True)
asyncio.run(main())
"""


@contextmanager
def pushing(script: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_stragglers_do_not_keep_their_segments(tmp_path: Path) -> None:
    """Of each push most is trained on, and some are members of groups that lack others."""
    with serving(tmp_path, dispatch_batch_size=12) as server:
        trainer = Trainer(server.endpoint, dp_size=1)
        with RolloutProducer(server.endpoint, group_size=2) as producer:
            for turn in range(4):
                members = [f"{turn}-{at % 8}" for at in range(14)]  # two of the groups have one
                producer.push_many(of_groups(members))
                trainer.train()
        waiting = 4 * 2 * TOKENS * 8
        server.await_scrape(
            lambda now: now["shared_memory_bytes"] == 0 and now["buffer_bytes"] == waiting,
            "what waits was copied, and the segments are gone",
        )
        assert server.scrape()["shared_memory_copied_bytes_total"] == waiting
        with RolloutProducer(server.endpoint, group_size=2) as producer:
            producer.push_many(of_groups([f"{turn}-{at}" for turn in range(4) for at in (6, 7)]))
            producer.end_stream()
        held = [step for _ in range(2) for step in trainer.train()]
        lengths = [len(payload) for step in held for _, payload in step.micro_batches]
        assert sum(lengths) == 2 * waiting


# -- nothing is left, whoever is killed ------------------------------------------------------


def test_a_producer_that_is_killed_leaves_what_it_has_pushed_and_nothing_else(
    tmp_path: Path,
) -> None:
    with serving(tmp_path) as server:
        script = PUSHER.format(endpoint=server.endpoint, tokens=TOKENS, count=BATCH, times=1)
        with pushing(script + "import signal; signal.pause()") as pusher:
            assert pusher.stdout is not None
            assert pusher.stdout.readline() == "pushed\n"
            assert not has_segments(pusher.pid)
            pusher.kill()
            pusher.wait()
        assert shared(server)[0] == 1
        trainer = Trainer(server.endpoint, dp_size=1)
        (step,) = trainer.train()
        assert len(step.sample_ids) == BATCH
        eventually(lambda: shared(server) == (0, 0), "nothing is held any more")


def test_a_dispatcher_that_is_killed_leaves_nothing_and_pushes_go_to_its_successor(
    tmp_path: Path,
) -> None:
    with serving(tmp_path) as server, RolloutProducer(server.endpoint) as producer:
        producer.push_many(samples(BATCH))
        assert has_segments(server.pid)
        server.send_signal(signal.SIGKILL)
        server.wait()
        assert not has_segments(os.getpid())
        with serving(tmp_path) as successor:
            producer.push_many(samples(BATCH))
            assert shared(successor)[0] == 1


# -- peers that cheat ------------------------------------------------------------------------


def memfd(nbytes: int, seals: int) -> int:
    descriptor = os.memfd_create("cheat", os.MFD_ALLOW_SEALING)
    os.pwrite(descriptor, bytes(nbytes), 0)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


SEALED = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def a_pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def holes() -> int:
    descriptor = os.memfd_create("cheat", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, len(PAYLOAD))
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALED)
    return descriptor


CHEATS: dict[str, tuple[Callable[[], int], str]] = {
    "unsealed": (lambda: memfd(len(PAYLOAD), 0), "not sealed"),
    "may shrink": (lambda: memfd(len(PAYLOAD), SEALED & ~fcntl.F_SEAL_SHRINK), "not sealed"),
    "may be written": (lambda: memfd(len(PAYLOAD), SEALED & ~fcntl.F_SEAL_WRITE), "not sealed"),
    "too small": (lambda: memfd(len(PAYLOAD) - 1, SEALED), "bytes, and"),
    "too large": (lambda: memfd(len(PAYLOAD) + 1, SEALED), "bytes, and"),
    "holes": (holes, "holes"),
    "pipe": (a_pipe, "no shared memory"),
    "file": (lambda: os.open(__file__, os.O_RDONLY), "no shared memory"),
    "socket": (lambda: socket.socket().detach(), "no shared memory"),
}


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """One dispatcher for all who cheat; an honest producer pushes between them."""
    with serving(tmp_path_factory.mktemp("victim")) as server:
        yield server


@contextmanager
def harms_nobody(server: ServeProcess) -> Iterator[None]:
    """What is cheated within costs the others nothing, and leaves nothing open."""
    with Producer(server.endpoint, f"honest-{os.urandom(4).hex()}") as honest:
        honest.push([3])
        before, held = descriptors_of(server.pid), shared(server)
        yield
        honest.push([4])
    eventually(lambda: descriptors_of(server.pid) < before, "the cheater's are closed")
    assert shared(server) == held
    assert server.status()["balanced"]


@pytest.mark.parametrize(("make", "why"), CHEATS.values(), ids=CHEATS)
def test_what_is_no_sealed_segment_of_that_size_is_refused(
    victim: ServeProcess, make: Callable[[], int], why: str
) -> None:
    with harms_nobody(victim):
        cheater = SharingProducer(victim.endpoint)
        cheater.push(make(), len(PAYLOAD))
        assert why in cheater.is_refused("segment-refused")


def test_a_segment_that_was_not_agreed_on_is_refused(victim: ServeProcess) -> None:
    with harms_nobody(victim):
        cheater = SharingProducer(victim.endpoint, capabilities=())
        assert "shared-memory" not in cheater.welcome.capabilities
        segment = write_segment([PAYLOAD])
        if send_away(cheater._sock, segment, large_push(len(PAYLOAD))):
            cheater.is_refused("protocol")
        cheater.close()
        with WireClient(victim.endpoint) as stranger:
            if send_away(stranger._sock, os.memfd_create("cheat"), b"R"):
                stranger.expect_error("protocol")


def test_over_tcp_it_is_not_offered_and_not_taken(victim: ServeProcess) -> None:
    with harms_nobody(victim):
        cheater = SharingProducer(victim.endpoints[1])
        assert "shared-memory" not in cheater.welcome.capabilities
        cheater.send_bytes(large_push(len(PAYLOAD)))
        assert "not agreed" in cheater.is_refused("protocol")


def test_a_push_without_its_descriptor_is_refused(victim: ServeProcess) -> None:
    with harms_nobody(victim):
        cheater = SharingProducer(victim.endpoint)
        cheater.send_bytes(large_push(len(PAYLOAD)))
        assert "and 0 came" in cheater.is_refused("protocol")


def test_a_segment_of_another_size_than_its_samples_is_refused(victim: ServeProcess) -> None:
    with harms_nobody(victim):
        cheater = SharingProducer(victim.endpoint)
        cheater.push(write_segment([PAYLOAD, PAYLOAD]), 2 * len(PAYLOAD))
        assert "the segment has" in cheater.is_refused("protocol")


def test_a_segment_is_no_larger_than_a_frame_may_be(tmp_path: Path) -> None:
    with serving(tmp_path, max_frame_bytes=f"{len(PAYLOAD) - 1}B") as server:
        cheater = SharingProducer(server.endpoint)
        cheater.push(write_segment([PAYLOAD]), len(PAYLOAD))
        cheater.is_refused("frame-too-large")


def test_a_flood_of_descriptors_ends_with_the_connection(victim: ServeProcess) -> None:
    with harms_nobody(victim):
        cheater = SharingProducer(victim.endpoint)
        ping = codec.encode(m.Ping())
        for _ in range(DESCRIPTORS_AHEAD):
            cheater.send_with(ping, [os.memfd_create("cheat")])
            cheater.expect(m.Pong)
        cheater.send_with(ping, [os.memfd_create("cheat")])
        cheater.is_refused("protocol")
        at_once = SharingProducer(victim.endpoint)
        at_once.send_with(ping, [os.memfd_create("cheat") for _ in range(250)])
        at_once.is_refused("segment-refused")
        silent = SharingProducer(victim.endpoint)
        silent.send_with(ping[:3], [os.memfd_create("cheat") for _ in range(DESCRIPTORS_AHEAD)])
        silent.close()


#: How long the last close of what a peer sends takes, and what others wait for in the meantime.
LINGERS_S, ANSWERED_S = 20, 5.0


@contextmanager
def others_are_answered(server: ServeProcess) -> Iterator[None]:
    """Meanwhile, and at once."""
    with Producer(server.endpoints[1], f"honest-{os.urandom(4).hex()}") as honest:
        yield
        began = monotonic()
        honest.push([4])
        assert monotonic() - began < ANSWERED_S


def test_nobody_waits_for_what_a_stranger_sends_to_be_closed(victim: ServeProcess) -> None:
    with others_are_answered(victim), a_lingering_socket(LINGERS_S) as slow:
        stranger = WireClient(victim.endpoint)
        if send_away(stranger._sock, slow, b"R"):  # a kernel that does not refuse it
            stranger.expect_error("protocol")
        stranger.close()


def test_nobody_waits_for_what_is_no_segment_to_be_closed(victim: ServeProcess) -> None:
    with others_are_answered(victim), a_lingering_socket(LINGERS_S) as slow:
        cheater = SharingProducer(victim.endpoint)
        cheater.push(slow, len(PAYLOAD))
        cheater.is_refused("segment-refused")


def test_nobody_waits_for_what_came_without_a_push_to_be_closed(victim: ServeProcess) -> None:
    ping = codec.encode(m.Ping())
    with others_are_answered(victim), a_lingering_socket(LINGERS_S) as slow:
        cheater = SharingProducer(victim.endpoint)
        cheater.send_with(ping, [slow])
        cheater.expect(m.Pong)
        cheater.close()
    with others_are_answered(victim), a_lingering_socket(LINGERS_S) as slow:
        cheater = SharingProducer(victim.endpoint)
        cheater.send_with(ping, [os.memfd_create("cheat") for _ in range(249)] + [slow])
        cheater.is_refused("segment-refused")


@pytest.mark.skipif(
    not kernel_refuses_descriptors(), reason="the kernel refuses no descriptors before Linux 6.16"
)
def test_others_on_the_same_socket_are_answered_while_as_many_wait_to_be_closed_as_may(
    victim: ServeProcess,
) -> None:
    ping = codec.encode(m.Ping())
    with ExitStack() as stack:
        honest = stack.enter_context(Producer(victim.endpoint, "honest-before"))
        slow = [stack.enter_context(an_endless_close(LINGERS_S)) for _ in range(MOST_THREADS)]
        many = [[os.memfd_create("cheat") for _ in range(250)] for _ in range(2)]
        there = victim.status()["producers_connected"]
        for some in [slow, *many]:  # one after the other: the slow ones have to be closed first
            with SharingProducer(victim.endpoint) as cheater:
                cheater.send_with(ping, some)
            if some is slow:
                victim.await_status(producers_connected=there)
        eventually(lambda: "wait to be closed" in victim.log(), "no more may wait")
        began = monotonic()
        honest.push([4])
        with Producer(victim.endpoint, "honest-after") as another:
            another.push([4])
        assert "shared-memory" not in SharingProducer(victim.endpoint).welcome.capabilities
        assert monotonic() - began < ANSWERED_S


def takes_segments(server: ServeProcess) -> bool:
    """Not as long as what others sent waits to be closed."""
    with SharingProducer(server.endpoint) as one:
        return "shared-memory" in one.welcome.capabilities


def test_who_cuts_a_segment_after_it_was_taken_cannot(victim: ServeProcess) -> None:
    eventually(lambda: takes_segments(victim), "shared memory is offered", 2 * LINGERS_S)
    cheater = SharingProducer(victim.endpoint)
    descriptor = write_segment([PAYLOAD])
    cheater.push(os.dup(descriptor), len(PAYLOAD))
    cheater.expect(m.Pushed)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)
    assert victim.status()["balanced"]
