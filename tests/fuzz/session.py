"""The sans-IO session of each side under any bytes, cut anywhere: what must be true of it."""

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
from rollout_dispatcher.protocol.sessions import Session, SessionState, Side
from tests.fuzz.inputs import streams
from tests.support.wire.frames import feed
from tests.support.wire.legal import may_hear
from tests.support.wire.messages import EXAMPLES

LIMITS = FrameLimits(header=1 << 20, payload=1 << 20)
HELLOS = m.HelloProducer(client_id="fuzz"), m.HelloRank(client_id="fuzz", dp_rank=0, dp_size=2)

WELCOMES: dict[type[m.Message], m.Message] = {
    m.HelloProducer: EXAMPLES[m.WelcomeProducer],
    m.HelloRank: EXAMPLES[m.WelcomeRank],
}

_cuts = st.lists(st.integers(1, 200), max_size=6), st.sampled_from([1, 9, 1 << 20])
inputs = st.tuples(streams(HELLOS), *_cuts)
#: What a client hears from what it takes for a dispatcher.
client_inputs = st.tuples(
    streams(tuple(WELCOMES.values())), *_cuts, st.sampled_from([Side.PRODUCER, Side.RANK])
)

Heard = list[tuple[m.Message, tuple[bytes, ...]]]


def check_session(stream: bytes, cuts: list[int], rest: int, side: Side = Side.DISPATCHER) -> None:
    """The session hears the same however the stream is cut, or fails for the same reason.

    Whether its frames have to wait for room makes no difference either.
    """
    whole = _hear(side, stream, [], len(stream) or 1)
    assert _hear(side, stream, cuts, rest) == whole, "the cuts make a difference"
    assert _hear(side, stream, cuts, rest, wait=True) == whole, "waiting makes a difference"
    pushes = [(message, spans) for message, spans in whole[0] if isinstance(message, m.Push)]
    for (message, spans), payload in zip(pushes, _payloads(stream), strict=False):
        assert b"".join(spans) == payload, "a push is not cut where its frame ends"
        _check_push(message, spans)


def _payloads(stream: bytes) -> Iterator[bytes]:
    """What the frames of pushes carry, whoever may send them."""
    reader = FrameReader(LIMITS)
    with suppress(ProtocolError):
        for byte in (stream[at : at + 1] for at in range(len(stream))):
            for frame in feed(reader, byte):
                if frame.type == m.Push.type_code:
                    yield bytes(frame.payload)


def _check_push(push: m.Push, spans: tuple[bytes, ...]) -> None:
    try:
        samples = samples_of(push, map(memoryview, spans))
    except ProtocolError:
        assert push.places, "only objects that cannot be as they are described are refused here"
        return
    assert len(samples) == len(push.tokens)
    for sample in samples:
        assert sample.nbytes == sample.schema.nbytes(sample.tokens, sample.rows)


def welcome(session: Session, message: m.Message) -> None:
    """Say what the dispatcher says at once, so that the conversation goes on."""
    if type(message) in WELCOMES:
        session.send(WELCOMES[type(message)])


def _hear(
    side: Side, stream: bytes, cuts: list[int], rest: int, *, wait: bool = False
) -> tuple[Heard, type[ProtocolError] | None]:
    session = Session(side, LIMITS)
    if side is not Side.DISPATCHER:
        session.send(HELLOS[side is Side.RANK])
    heard: Heard = []
    at, sizes = 0, iter(cuts)
    try:
        while at < len(stream):
            part = stream[at : at + next(sizes, rest)]
            at += len(part)
            _feed(session, side, part, heard, wait=wait)
    except ProtocolError as error:
        return heard, type(error)
    return heard, None


def _feed(session: Session, side: Side, part: bytes, heard: Heard, *, wait: bool) -> None:
    while part:
        before = session.state
        target = session.get_buffer()
        limits = (
            LIMITS if before in {SessionState.PRODUCER, SessionState.RANK} else HANDSHAKE_LIMITS
        )
        most = max(STAGING_BYTES, limits.header + limits.payload)
        assert len(target) <= most, f"memory for {len(target)} bytes"
        taken = min(len(target), len(part))
        target[:taken] = part[:taken]
        part = part[taken:]
        for message, payload in _received(session, taken, wait=wait):
            assert type(message) in may_hear(side, before), f"{message!r} in {before}"
            heard.append((message, tuple(map(bytes, payload))))
            welcome(session, message)
            before = session.state


def _received(
    session: Session, nbytes: int, *, wait: bool
) -> Iterator[tuple[m.Message, Sequence[memoryview]]]:
    """What the session hears; if it has to `wait`, every frame that asks for room is refused it."""
    yield from session.received(nbytes, lambda _: not wait)
    while session.waits_for:
        yield from session.go_on(lambda _: False)
