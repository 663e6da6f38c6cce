"""A scripted dispatcher: a peer that a test speaks through, over a real socket.

It speaks `rollout_dispatcher.protocol` and blocks with a deadline, so that a test reads as a
conversation.
"""

import socket
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any, ParamSpec, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollout_dispatcher.protocol import assemble, codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.frame import FrameLimits, FrameReader
from rollout_dispatcher.protocol.outbox import Buffer
from rollout_dispatcher.sample import DType, Field, Outcome, Sample, Schema
from rollout_dispatcher.spans import join
from rollout_workers import MicroBatchStream, RankClient, RolloutProducer
from tests.support.wire.frames import feed

LIMITS = FrameLimits(1 << 20, 1 << 30)
PATIENCE_S = 10.0


class Closes(Protocol):
    """A client that is made in the caller's thread, and closed in it."""

    def close(self) -> None: ...


P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=m.Message)
C = TypeVar("C", bound=Closes)

SCHEMA = Schema(
    (
        Field("input_ids", DType.INT64),
        Field("loss_mask", DType.BOOL),
        Field("reward", DType.FLOAT32, per_token=False),
    )
)
#: Of samples without a mask.
UNMASKED = Schema((Field("input_ids", DType.INT64),))


def rank_welcome(**facts: Any) -> m.WelcomeRank:
    """To a run of packed micro-batches, in its first generation unless the facts say otherwise."""
    usual = {
        "run_id": "run", "generation": 1, "committed": -1, "max_open_steps": 2,
        "layout": "packed", "heartbeat_interval_s": 5.0,
    }  # fmt: skip
    return m.WelcomeRank.model_validate(usual | facts)


def producer_welcome(**facts: Any) -> m.WelcomeProducer:
    """To the same run."""
    usual = {
        "run_id": "run", "credits": 8, "max_payload_bytes": 1 << 20, "heartbeat_interval_s": 5.0,
    }  # fmt: skip
    return m.WelcomeProducer.model_validate(usual | facts)


def arrived(frame: Buffer | Iterable[Buffer]) -> tuple[m.Message, memoryview]:
    """The message that arrives with these bytes, and its payload."""
    data = frame if isinstance(frame, bytes) else b"".join(frame)  # type: ignore[arg-type]
    (found,) = feed(FrameReader(LIMITS), data)
    return codec.decode(found), found.payload


class Peer:
    """The dispatcher's end of one connection. Pings are answered unless `mute`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = FrameReader(LIMITS)
        self._arrived: list[tuple[m.Message, memoryview]] = []
        self.mute = False
        self.payload = memoryview(b"")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def expect(self, kind: type[M], within: float = PATIENCE_S) -> M:
        """The next message, which must be of this kind; its payload is `self.payload`."""
        message, self.payload = self._next(monotonic() + within)
        assert isinstance(message, kind), f"expected {kind.__name__}, got {message!r}"
        return message

    def expect_slowly(self, kind: type[M], nbytes: int, seconds: float) -> M:
        """`expect`, where so many bytes are read over so many seconds, and nothing is said."""
        piece = 64 * 1024
        for _ in range(nbytes // piece):
            target = self._reader.get_buffer()[:piece]
            frames = self._reader.received(self._sock.recv_into(target))
            self._arrived += [(codec.decode(frame), frame.payload) for frame in frames]
            sleep(seconds * piece / nbytes)
        return self.expect(kind)

    def wait_for(self, kind: type[M], within: float = PATIENCE_S) -> M:
        """The next message that is no Demand, which must be of this kind.

        Whether a loop that asks for a step was hungry in between depends on who was faster.
        """
        while True:
            message, _ = self._next(monotonic() + within)
            if isinstance(message, kind):
                return message
            assert isinstance(message, m.Demand), f"expected {kind.__name__}, got {message!r}"

    def wait_for_commit(self) -> int:
        """The step of the next Commit, whatever the rank has to say before it."""
        return self._skip_to(m.Commit).step

    def _skip_to(self, kind: type[M], *others: type[m.Message]) -> M:
        while True:
            message, _ = self._next(monotonic() + PATIENCE_S)
            if isinstance(message, kind):
                return message
            assert isinstance(message, (m.Demand, m.Prepared, *others)), f"unexpected {message!r}"

    def hears_nothing(self, for_s: float = 0.15) -> bool:
        """Whether no message but pings comes for a while."""
        try:
            message, _ = self._next(monotonic() + for_s)
        except TimeoutError:
            return True
        raise AssertionError(f"unexpected {message!r}")

    def expect_end(self) -> None:
        """The client closes the connection; what it still says is ignored."""
        try:
            while True:
                self._next(monotonic() + PATIENCE_S)
        except (EOFError, ConnectionError):
            return

    def send(self, message: m.Message, payload: bytes = b"") -> None:
        self._sock.sendall(codec.encode(message, len(payload)) + payload)

    def give(self, number: int, *batches: list[int], count: int | None = None) -> None:
        """Announce and release a step, and deliver these micro-batches of it.

        count: of all that it has, if there are others.
        """
        self.send(step(number, count or len(batches)))
        self._skip_to(m.Prepared, m.Commit)
        self.send(m.Release(step=number))
        for index, ids in enumerate(batches):
            self.send_bytes(micro_batch(number, index, sample(ids)))

    def send_bytes(self, data: bytes) -> None:
        self._sock.sendall(data)

    def acknowledge_bye(self) -> None:
        """Answer the client's goodbye and hang up."""
        self.expect(m.Bye)
        self.send(m.Bye())
        self.close()

    def close(self) -> None:
        self._sock.close()

    # -- both roles say hello

    def welcome(self, **options: Any) -> m.Message:
        """Whoever it is."""
        self._arrived.insert(0, self._next(monotonic() + PATIENCE_S))
        is_rank = isinstance(self._arrived[0][0], m.HelloRank)
        return self.welcome_rank(**options) if is_rank else self.welcome_producer(**options)

    def welcome_rank(self, **facts: Any) -> m.HelloRank:
        hello = self.expect(m.HelloRank)
        self.send(rank_welcome(**facts))
        return hello

    def welcome_producer(self, **facts: Any) -> m.HelloProducer:
        hello = self.expect(m.HelloProducer)
        self.send(producer_welcome(**facts))
        return hello

    def answer(self, push: m.Push, *outcomes: str, **errors: str) -> None:
        """Answer a push; every sample is accepted unless said otherwise."""
        words = list(map(Outcome, outcomes)) or [Outcome.ACCEPTED] * len(push.tokens)
        self.send(m.Pushed(first_seq=push.first_seq, outcomes=words, errors=errors))

    def _next(self, deadline: float) -> tuple[m.Message, memoryview]:
        while True:
            while self._arrived:
                message, payload = self._arrived.pop(0)
                if not isinstance(message, m.Ping):
                    return message, payload
                if not self.mute:
                    self.send(m.Pong())
            left = deadline - monotonic()
            if left <= 0:
                raise TimeoutError("the client said nothing")
            self._sock.settimeout(left)
            nbytes = self._sock.recv_into(self._reader.get_buffer())
            if not nbytes:
                raise EOFError("the client hung up")
            self._arrived += [(codec.decode(f), f.payload) for f in self._reader.received(nbytes)]


class ScriptedDispatcher:
    """Listens where clients under test connect to, and ends with them."""

    def __init__(self, path: Path) -> None:
        self.endpoint = f"unix:{path}"
        self._clients: list[Closes] = []
        self._threads = ThreadPoolExecutor()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._peers: list[Peer] = []

    def accept(self, within: float = PATIENCE_S) -> Peer:
        """The next connection."""
        self._listener.settimeout(within)
        self._peers.append(Peer(self._listener.accept()[0]))
        return self._peers[-1]

    def meanwhile(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call it in a thread, while the test answers."""
        return self._threads.submit(call, *args, **kwargs)

    def join(self, make: Callable[[str], C], **welcome: Any) -> tuple[C, Peer]:
        """A client that is welcomed, and its peer. make: of the endpoint."""
        making = self.meanwhile(make, self.endpoint)
        peer = self.accept()
        peer.welcome(**welcome)
        self._clients.append(client := making.result(PATIENCE_S))
        return client, peer

    def rank(self, **welcome: Any) -> tuple[RankClient, Peer]:
        """DP rank 0 of two."""
        return self.join(partial(RankClient, dp_rank=0, dp_size=2), **welcome)

    def producer(self, **welcome: Any) -> tuple[RolloutProducer, Peer]:
        return self.join(RolloutProducer, **welcome)

    def stream(
        self, welcome: dict[str, Any] | None = None, **options: Any
    ) -> tuple[MicroBatchStream, Peer]:
        """The only DP rank's, unless options say otherwise."""
        where = {"dp_rank": 0, "dp_size": 1} | options
        return self.join(partial(MicroBatchStream, **where), **(welcome or {}))

    def hang_up(self) -> None:
        """Close every connection; nobody is listening any more."""
        self._listener.close()
        for peer in self._peers:
            peer.close()

    def end(self) -> None:
        """Hang up, and close the clients, who have nobody to wait for."""
        self.hang_up()
        for client in self._clients:
            client.close()
        self._threads.shutdown()


def sample(ids: list[int], mask: list[int] | None = None, name: str = "s") -> Sample:
    """A sample of SCHEMA whose reward is the sum of its ids."""
    loss = np.ones(len(ids), bool) if mask is None else np.array(mask, bool)
    values: list[NDArray[np.generic]] = [np.array(ids, np.int64), loss]
    values.append(np.array([sum(ids)], np.float32))
    span = join(item.tobytes() for item in values)
    return Sample(name, len(ids), int(loss[1:].sum()), SCHEMA, memoryview(span), policy_version=1)


def unmasked(ids: list[int]) -> Sample:
    """A sample of `input_ids` alone, as a producer that gives no mask sends it."""
    span = memoryview(np.array(ids, np.int64).tobytes())
    return Sample("s", len(ids), len(ids) - 1, UNMASKED, span)


def step(number: int, count: int = 1, digest: str = "d", **totals: int) -> m.StepHeader:
    """A step's header of `count` micro-batches."""
    facts = {"num_samples": 1, "tokens": 1, "loss_tokens": 1, "loss_samples": 1} | totals
    fields = m.field_headers(SCHEMA)
    return m.StepHeader.model_validate(
        {"step": number, "digest": digest, "num_micro_batches": count, "fields": fields, **facts}
    )


def micro_batch(number: int, index: int, *samples: Sample, attempt: int = 0) -> bytes:
    """The frame of a micro-batch, as the dispatcher gathers it."""
    given = samples or (sample([1, 2, 3]),)
    return b"".join(assemble.micro_batch(number, index, given, attempt=attempt))


def filler(number: int, index: int, of: Sample) -> bytes:
    """The frame of a filler."""
    return b"".join(assemble.filler(number, index, of))
