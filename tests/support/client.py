"""Clients of the sample plane for tests: real sockets, real messages, no torch, no threads.

Every wait has a deadline, so a test that waits in vain fails and says for what. `WireClient` speaks
messages and bytes; `Producer` and `Rank` know their role; `Trainer` is all ranks of a process
group in lockstep, one step after the other.

    with ServeProcess(tmp_path, dp_size=2, global_batch_size=4, micro_batch_size=2) as server:
        producer = Producer(server.endpoint, "p")
        producer.push([5, 3, 8, 2])
        trainer = Trainer(server.endpoint, dp_size=2)
        step = trainer.train()
"""

import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Self, TypeVar

import numpy as np

from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.protocol.frame import FrameLimits, FrameReader
from rollout_dispatcher.sample import DType, Field, Schema
from rollout_dispatcher.spans import join

PATIENCE_S = 15.0
LIMITS = FrameLimits(header=1 << 26, payload=1 << 30)

#: What these producers push, unless told otherwise.
SCHEMA = Schema(
    (
        Field("input_ids", DType.INT64),
        Field("loss_mask", DType.BOOL),
        Field("reward", DType.FLOAT32, per_token=False),
    )
)

M = TypeVar("M", bound=m.Message)


class WireClient:
    """One connection; it hangs up when it is closed, left as a context, or forgotten."""

    def __init__(
        self,
        endpoint: str,
        *,
        receive_buffer: int | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        family = socket.AF_UNIX if endpoint.startswith("unix:") else socket.AF_INET
        self._sock = socket.socket(family, socket.SOCK_STREAM)
        self._sock.settimeout(PATIENCE_S)
        at = Endpoint.parse(endpoint)
        if receive_buffer is not None:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._sock.connect(at.path or (at.host, at.port))
        if family == socket.AF_INET:  # small words one after the other, as a rank's are
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self._sock = tls.wrap_socket(self._sock, server_hostname=at.host)
        self._reader = FrameReader(LIMITS)
        self._arrived: list[tuple[m.Message, memoryview]] = []
        self._pause = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def send(self, message: m.Message, payload: bytes = b"") -> None:
        """Send one message."""
        self.send_bytes(codec.encode(message, len(payload)) + payload)

    def send_bytes(self, data: bytes) -> None:
        """Send whatever these bytes are."""
        self._sock.sendall(data)

    def receive(self, within: float = PATIENCE_S) -> tuple[m.Message, memoryview]:
        """The next message and its payload. Raises EOFError at the end, TimeoutError in vain."""
        deadline = monotonic() + within
        while not self._arrived:
            sleep(self._pause)
            self._sock.settimeout(max(0.001, deadline - monotonic()))
            nbytes = self._sock.recv_into(self._reader.get_buffer())
            if not nbytes:
                raise EOFError("the dispatcher closed the connection")
            self._arrived += [(codec.decode(f), f.payload) for f in self._reader.received(nbytes)]
        return self._arrived.pop(0)

    def expect(self, kind: type[M], within: float = PATIENCE_S) -> M:
        """The next message, which has to be of this kind."""
        message, _ = self.receive(within)
        assert isinstance(message, kind), f"expected {kind.__name__}, got {message!r}"
        return message

    def expect_error(self, code: str) -> m.Error:
        """Skip to the Error frame that ends this connection; check its code and the end."""
        while True:
            message, _ = self.receive()
            if isinstance(message, m.Error):
                break
        assert message.code == code, message
        self.expect_end()
        return message

    def expect_end(self) -> None:
        """Nothing comes but the end of the connection."""
        try:
            message, _ = self.receive()
        except (EOFError, ConnectionError):
            return
        raise AssertionError(f"expected the end of the connection, got {message!r}")

    def ping(self) -> None:
        """Return once the dispatcher has handled everything said so far; for a quiet line."""
        self.send(m.Ping())
        self.expect(m.Pong)

    def bye(self) -> None:
        """Say goodbye and wait until the dispatcher has answered it and hung up."""
        self.send(m.Bye())
        answered = False
        try:
            while True:
                answered |= isinstance(self.receive()[0], m.Bye)
        except (EOFError, ConnectionError):
            self.close()
        assert answered, "the dispatcher hung up without answering the goodbye"

    def close(self) -> None:
        """Hang up without a word."""
        self._sock.close()


class Producer(WireClient):
    """A rollout producer that numbers its samples and makes payloads to recognise them by."""

    def __init__(
        self,
        endpoint: str,
        client_id: str,
        *,
        first_seq: int = 0,
        opens_stores: bool = False,
        incarnation: str | None = None,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(endpoint, tls=tls)
        self.client_id, self.next_seq = client_id, first_seq
        hello = m.HelloProducer(
            client_id=client_id, token=token, opens_stores=opens_stores, incarnation=incarnation,
        )  # fmt: skip
        self.send(hello)
        self.welcome = self.expect(m.WelcomeProducer)

    def send_push(self, tokens: Sequence[int], *, seq: int | None = None, **columns: object) -> int:
        """Send samples of these lengths; returns the push's first sequence number.

        seq: repeat this number instead of going on. columns: further columns of `m.Push`.
        """
        first = self.next_seq if seq is None else seq
        self.next_seq = max(self.next_seq, first + len(tokens))
        self.send(*make_push(self.client_id, first, tokens, **columns))
        return first

    def end_stream(self, *, force: bool = False) -> None:
        """End the stream and hear that it was heard."""
        self.send(m.EndStream(force=force))
        self.ping()

    def push(self, tokens: Sequence[int], *, seq: int | None = None, **columns: object) -> m.Pushed:
        """Send samples and wait for the outcome of each, however long the buffer is full."""
        first = self.send_push(tokens, seq=seq, **columns)
        while not isinstance(message := self.receive()[0], m.Pushed):
            assert isinstance(message, m.Blocked), message
        assert message.first_seq == first
        return message.model_copy(update={"outcomes": message.of_each(len(tokens))})


def make_push(
    client_id: str, first_seq: int, tokens: Sequence[int], **columns: object
) -> tuple[m.Push, bytes]:
    """A push and its payload; sample ids are `client_id/seq`, every token has a loss."""
    ids = [f"{client_id}/{first_seq + at}" for at in range(len(tokens))]
    facts: dict[str, object] = {
        "first_seq": first_seq,
        "floor": 0,
        "fields": m.field_headers(SCHEMA),
        "tokens": list(tokens),
        "loss_tokens": [max(0, count - 1) for count in tokens],
        "sample_ids": ids,
    }
    payload = b"".join(make_span(first_seq + at, size) for at, size in enumerate(tokens))
    return m.Push.model_validate(facts | columns), payload


def make_span(seq: int, tokens: int) -> bytes:
    """The span of a sample under SCHEMA: token k of sample `seq` has the id 1000 * seq + k."""
    values = (
        1000 * seq + np.arange(tokens, dtype=np.int64),
        np.ones(tokens, np.bool_),
        np.array(seq, np.float32),
    )
    parts = [np.asarray(value).tobytes() for value in values]
    return join(parts)


@dataclass(slots=True)
class HeldStep:
    """What a rank has received of one step; a micro-batch is its header and its payload."""

    header: m.StepHeader
    micro_batches: list[tuple[m.MicroBatch, bytes]] = field(default_factory=list)
    released: bool = False

    @property
    def whole(self) -> bool:
        """Whether every micro-batch is here."""
        return len(self.micro_batches) == self.header.num_micro_batches

    @property
    def sample_ids(self) -> list[str]:
        """Ids of this rank's samples, without fillers."""
        heads = [head for head, _ in self.micro_batches if not head.is_filler]
        return [name for head in heads for name in head.sample_ids]


class Rank(WireClient):
    """A DP rank that does exactly what the test says, one word at a time.

    Of payload stores it takes everything to be there, and to be gone when it is told to release it.
    hello: further fields of `m.HelloRank`, for a reconnect.
    """

    def __init__(
        self,
        endpoint: str,
        dp_rank: int,
        dp_size: int,
        *,
        generation: int | None = None,
        client_id: str | None = None,
        receive_buffer: int | None = None,
        tls: ssl.SSLContext | None = None,
        **hello: object,
    ) -> None:
        super().__init__(endpoint, receive_buffer=receive_buffer, tls=tls)
        self.dp_rank, self._dp_size, self._endpoint = dp_rank, dp_size, endpoint
        self.client_id = client_id or f"rank-{dp_rank}-{id(self):x}"
        facts = {
            "client_id": self.client_id,
            "dp_rank": dp_rank,
            "dp_size": dp_size,
            "generation": generation,
        }
        self.steps: dict[int, HeldStep] = {}
        self.taken = self.committed = -1
        self.ended: str | None = None
        self.send(m.HelloRank.model_validate(facts | hello))
        self.welcome = self.expect(m.WelcomeRank)
        self.generation = self.welcome.generation

    def demand(self, *, taken: int, hungry: bool = True) -> None:
        """Say which step the training loop has begun, and whether it waits for the next."""
        self.taken = taken
        self.send(m.Demand(taken=taken, hungry=hungry))

    def hold(self, step: int, *, pause: float = 0.0) -> HeldStep:
        """Wait until this rank holds the whole step, released or not.

        pause: seconds to wait before every read, for a rank that is slow.
        """
        self._pause = pause
        self.pump(lambda: step in self.steps and self.steps[step].whole, f"all of step {step}")
        return self.steps[step]

    def prepare(self, step: int) -> None:
        """Say that the step's header is held."""
        self.send(m.Prepared(step=step, digest=self.steps[step].header.digest))

    def await_release(self, step: int) -> HeldStep:
        """Wait until the dispatcher lets this step into training."""
        self.pump(lambda: self.steps[step].released, f"the release of step {step}")
        return self.steps[step]

    def commit(self, step: int) -> None:
        """Say that every step up to this one is applied."""
        self.committed = step
        self.send(m.Commit(step=step))

    def await_end(self) -> str:
        """Wait for the end of the stream; returns its reason."""
        self.pump(lambda: self.ended is not None, "the end of the stream")
        return self.ended or ""

    def reconnect(self) -> "Rank":
        """The same process on a new connection: it says what it holds, and goes on from there."""
        self.close()
        held = {step: part for step, part in self.steps.items() if step > self.committed}
        again = Rank(
            self._endpoint,
            self.dp_rank,
            self._dp_size,
            generation=self.generation,
            client_id=self.client_id,
            taken=self.taken,
            committed=self.committed,
            received=[(step, len(part.micro_batches)) for step, part in held.items()],
        )
        again.steps, again.taken, again.committed = held, self.taken, self.committed
        return again

    def pump(self, done: Callable[[], bool], what: str) -> None:
        """Take messages until `done`; a message that makes no sense fails the test."""
        deadline = monotonic() + PATIENCE_S
        while not done():
            left = deadline - monotonic()
            assert left > 0, f"DP rank {self.dp_rank} waits for {what} in vain"
            self._take(*self.receive(left))

    def settle(self, **progress: int) -> None:
        """Take everything that the dispatcher had to say before it answers a Ping."""
        ponged: list[m.Message] = []
        self.send(m.Ping(**progress))
        deadline = monotonic() + PATIENCE_S
        while not ponged:
            message, payload = self.receive(deadline - monotonic())
            if isinstance(message, m.Pong):
                ponged.append(message)
            else:
                self._take(message, payload)

    def _take(self, message: m.Message, payload: memoryview) -> None:
        match message:
            case m.StepHeader():
                known = self.steps.setdefault(message.step, HeldStep(message))
                assert known.header == message, "a step came again and differs"
            case m.MicroBatch():
                held = self.steps[message.step]
                assert message.index == len(held.micro_batches), "a micro-batch out of turn"
                held.micro_batches.append((message, bytes(payload)))
            case m.Release():
                self.steps[message.step].released = True
            case m.End():
                self.ended = message.reason
            case m.Advice():
                pass  # for the trainer's log
            case m.Free():
                self.send(m.Freed(number=message.number))
            case m.Sweep():
                self.send(m.Swept(number=message.number))
            case _:
                raise AssertionError(f"DP rank {self.dp_rank} got {message!r}")


class Trainer:
    """All DP ranks of a new process group, in lockstep."""

    def __init__(self, endpoint: str, dp_size: int, *, opens_stores: bool = False) -> None:
        first = Rank(endpoint, 0, dp_size, opens_stores=opens_stores)
        self.generation = first.generation
        others = (
            Rank(endpoint, dp_rank, dp_size, generation=self.generation, opens_stores=opens_stores)
            for dp_rank in range(1, dp_size)
        )
        self.ranks = [first, *others]
        self.committed = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.close()

    def train(self) -> list[HeldStep]:
        """Wait for a step, check that all ranks agree on it, commit it; one part a rank.

        Nothing once the stream has ended: `while trainer.train(): ...`.
        """
        parts = self.take()
        if parts:
            self.commit(parts[0].header.step)
        return parts

    def take(self) -> list[HeldStep]:
        """Wait for the next step on every rank, as far as its release; nothing at the end."""
        first = self.ranks[0]
        for rank in self.ranks:
            rank.demand(taken=self.committed)
        first.pump(lambda: first.ended is not None or self._next() is not None, "the next step")
        step = self._next()
        if step is None:
            return []
        held = [rank.hold(step) for rank in self.ranks]
        assert all(part.header == held[0].header for part in held), "ranks disagree"
        for rank in self.ranks:
            rank.prepare(step)
        return [rank.await_release(step) for rank in self.ranks]

    def commit(self, step: int) -> None:
        """Apply a step on every rank."""
        for rank in self.ranks:
            rank.demand(taken=step, hungry=False)
            rank.commit(step)
        self.committed = step

    def bye(self) -> None:
        """Leave in order."""
        for rank in self.ranks:
            rank.bye()

    def _next(self) -> int | None:
        return next((step for step in self.ranks[0].steps if step > self.committed), None)
