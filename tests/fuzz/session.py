"""The sans-IO session under any bytes, cut anywhere: what must be true of it."""

from collections.abc import Iterator, Sequence
from contextlib import suppress

from hypothesis import strategies as st

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.assemble import samples_of
from rollout_dispatcher.protocol.frame import (
    HANDSHAKE_LIMITS,
    STAGING_BYTES,
    FrameLimits,
    FrameReader,
)
from rollout_dispatcher.protocol.session import ServerSession, State
from tests.fuzz.inputs import streams

LIMITS = FrameLimits(header=1 << 20, payload=1 << 20)
HELLOS = m.HelloProducer(client_id="fuzz"), m.HelloRank(client_id="fuzz", dp_rank=0, dp_size=2)

#: Who may say what, written down again.
PRODUCERS: set[type[m.Message]] = {m.Push, m.CloseGroup, m.EndPhase, m.EndStream, m.Ping, m.Bye}
RANKS: set[type[m.Message]] = {
    m.HelloRank,
    m.Demand,
    m.PolicyVersion,
    m.Prepared,
    m.Commit,
    m.CheckpointSaved,
    m.Ping,
    m.Bye,
}
LEGAL: dict[State, set[type[m.Message]]] = {
    State.AWAIT_HELLO: {m.HelloProducer, m.HelloRank},
    State.PRODUCER: PRODUCERS,
    State.RANK: RANKS,
    State.CLOSED: set(),
}

inputs = st.tuples(
    streams(HELLOS), st.lists(st.integers(1, 200), max_size=6), st.sampled_from([1, 9, 1 << 20])
)

Heard = list[tuple[m.Message, tuple[bytes, ...]]]


def check_session(stream: bytes, cuts: list[int], rest: int) -> None:
    """The session hears the same however the stream is cut, or fails for the same reason.

    Whether its frames have to wait for room makes no difference either.
    """
    whole = _hear(stream, [], len(stream) or 1)
    assert _hear(stream, cuts, rest) == whole, "the cuts make a difference"
    assert _hear(stream, cuts, rest, wait=True) == whole, "waiting makes a difference"
    pushes = [(message, spans) for message, spans in whole[0] if isinstance(message, m.Push)]
    for (message, spans), payload in zip(pushes, _payloads(stream), strict=False):
        assert b"".join(spans) == payload, "a push is not cut where its frame ends"
        _check_push(message, spans)


def _payloads(stream: bytes) -> Iterator[bytes]:
    """What the frames of pushes carry, whoever may send them."""
    reader = FrameReader(LIMITS)
    with suppress(ProtocolError):
        for byte in (stream[at : at + 1] for at in range(len(stream))):
            for frame in reader.feed(byte):
                if frame.type == m.Push.type_code:
                    yield bytes(frame.payload)


def _check_push(push: m.Push, spans: tuple[bytes, ...]) -> None:
    samples = samples_of(push, map(memoryview, spans))
    assert len(samples) == len(push.tokens)
    for sample in samples:
        assert sample.nbytes == sample.schema.nbytes(sample.tokens)


def _hear(
    stream: bytes, cuts: list[int], rest: int, *, wait: bool = False
) -> tuple[Heard, type[ProtocolError] | None]:
    session = ServerSession(LIMITS)
    heard: Heard = []
    at, sizes = 0, iter(cuts)
    try:
        while at < len(stream):
            part = stream[at : at + next(sizes, rest)]
            at += len(part)
            _feed(session, part, heard, wait=wait)
    except ProtocolError as error:
        return heard, type(error)
    return heard, None


def _feed(session: ServerSession, part: bytes, heard: Heard, *, wait: bool) -> None:
    while part:
        before = session.state
        target = session.get_buffer()
        limits = HANDSHAKE_LIMITS if before is State.AWAIT_HELLO else LIMITS
        most = max(STAGING_BYTES, limits.header + limits.payload)
        assert len(target) <= most, f"memory for {len(target)} bytes"
        taken = min(len(target), len(part))
        target[:taken] = part[:taken]
        part = part[taken:]
        for message, payload in _received(session, taken, wait=wait):
            assert type(message) in LEGAL[before], f"{message!r} in {before}"
            heard.append((message, tuple(map(bytes, payload))))
            before = session.state


def _received(
    session: ServerSession, nbytes: int, *, wait: bool
) -> Iterator[tuple[m.Message, Sequence[memoryview]]]:
    """What the session hears; if it has to `wait`, every frame that asks for room is refused it."""
    yield from session.received(nbytes, lambda _: not wait)
    while session.waits_for:
        yield from session.go_on(lambda _: False)
