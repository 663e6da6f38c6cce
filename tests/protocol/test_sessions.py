"""The session table: who may say what when; an illegal message changes nothing."""

from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.errors import (
    FrameTooLarge,
    IllegalTransition,
    ProtocolError,
    VersionMismatch,
)
from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.frame import HANDSHAKE_LIMITS, PREFIX, FrameLimits, encode_frame
from rollout_dispatcher.protocol.sessions import SENDS, Session, SessionState, Side
from tests.support.client import make_push
from tests.support.wire.legal import may_hear, may_say
from tests.support.wire.messages import EXAMPLES

LIMITS = FrameLimits(header=1 << 20, payload=1 << 20)
S = SessionState
Kind = type[m.Message]

#: Messages on the way into a state, in order, whoever says them.
WAY: dict[SessionState, tuple[Kind, ...]] = {
    S.AWAIT_HELLO: (),
    S.PRODUCER_GREETS: (m.HelloProducer,),
    S.PRODUCER: (m.HelloProducer, m.WelcomeProducer),
    S.PRODUCER_LEAVES: (m.HelloProducer, m.WelcomeProducer, m.Bye),
    S.RANK_GREETS: (m.HelloRank,),
    S.RANK: (m.HelloRank, m.WelcomeRank),
    S.RANK_RESUMES: (m.HelloRank, m.WelcomeRank, m.HelloRank),
    S.RANK_LEAVES: (m.HelloRank, m.WelcomeRank, m.Bye),
    S.CLOSED: (m.Error,),
}
STATES_OF = {
    Side.DISPATCHER: set(S),
    Side.PRODUCER: {state for state in S if "rank" not in state},
    Side.RANK: {state for state in S if "producer" not in state},
}


def hear(session: Session, data: bytes) -> list[tuple[m.Message, Sequence[memoryview]]]:
    heard: list[tuple[m.Message, Sequence[memoryview]]] = []
    while data:
        target = session.get_buffer()
        taken = min(len(target), len(data))
        target[:taken] = data[:taken]
        data = data[taken:]
        heard += session.received(taken)
    return heard


def session_in(state: SessionState, side: Side = Side.DISPATCHER) -> Session:
    session = Session(side, LIMITS)
    for kind in WAY[state]:
        if (session.state, kind) in SENDS[side]:
            session.send(EXAMPLES[kind])
        else:
            hear(session, codec.encode(EXAMPLES[kind]))
    assert session.state is state
    return session


sides_and_states = pytest.mark.parametrize(
    ("side", "state"), [(side, state) for side in Side for state in S if state in STATES_OF[side]]
)


@sides_and_states
@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)
def test_the_table_of_what_is_heard_is_kept(side: Side, state: SessionState, kind: Kind) -> None:
    session = session_in(state, side)
    sent = EXAMPLES[kind]
    after = may_hear(side, state).get(kind)
    if after is not None:
        ((heard, spans),) = hear(session, codec.encode(sent))
        assert (heard, b"".join(spans), session.state) == (sent, b"", after)
        return
    with pytest.raises(ProtocolError) as raised:
        hear(session, codec.encode(sent))
    assert str(raised.value) == f"{kind.__name__} is not legal in state {state}"
    assert session.state is state


@sides_and_states
@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)
def test_the_table_of_what_is_said_is_kept(side: Side, state: SessionState, kind: Kind) -> None:
    sent = EXAMPLES[kind]
    after = may_say(side, state).get(kind)
    if after is not None:
        first, second = session_in(state, side), session_in(state, side)
        frame = first.send(sent)
        second.sent(frame)
        assert (frame, first.state, second.state) == (codec.encode(sent), after, after)
        return
    session = session_in(state, side)
    with pytest.raises(IllegalTransition, match=f"from {state} on saying {kind.__name__}$"):
        session.send(sent)
    with pytest.raises(IllegalTransition):
        session.sent(codec.encode(sent))
    assert session.state is state


@pytest.mark.parametrize("role", [Side.PRODUCER, Side.RANK])
@given(data=st.data())
def test_what_one_side_may_say_the_other_may_hear_however_long_it_is_on_its_way(
    role: Side, data: st.DataObject
) -> None:
    sessions = {role: Session(role, LIMITS), Side.DISPATCHER: Session(Side.DISPATCHER, LIMITS)}
    on_their_way: dict[Side, deque[bytes]] = {side: deque() for side in sessions}
    for _ in range(data.draw(st.integers(0, 30))):
        moves: list[tuple[Side, Kind | None]] = [
            (side, kind) for side in sessions for kind in may_say(side, sessions[side].state)
        ]
        moves += [(side, None) for side, frames in on_their_way.items() if frames]
        if not moves:
            break
        side, kind = data.draw(st.sampled_from(moves))
        other = next(found for found in sessions if found is not side)
        if kind is not None:
            on_their_way[other].append(sessions[side].send(EXAMPLES[kind]))
        elif sessions[side].state is S.CLOSED:  # nobody reads on
            on_their_way[side].clear()
        else:
            hear(sessions[side], on_their_way[side].popleft())
    for side, frames in on_their_way.items():
        while frames and sessions[side].state is not S.CLOSED:
            hear(sessions[side], frames.popleft())
    states = {session.state for session in sessions.values()}
    assert len(states) == 1, "all is heard, and the two do not agree where they stand"


@pytest.mark.parametrize("kind", [m.HelloProducer, m.HelloRank], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("version", "older"), [(4, "the dispatcher"), (2, "the client")])
def test_another_version_is_told_before_anything_else_that_is_wrong(
    kind: Kind, version: int, older: str
) -> None:
    session = session_in(S.AWAIT_HELLO)
    header = f'{{"version": {version}, "client_id": 5, "invented_later": true}}'
    with pytest.raises(VersionMismatch) as raised:
        hear(session, encode_frame(kind.type_code, header.encode()))
    assert str(raised.value) == (
        f"the client speaks protocol version {version}, the dispatcher version 3; install a newer "
        f"release of rollout-dispatcher where {older} runs, or the same one on both sides"
    )
    assert session.state is S.AWAIT_HELLO


def test_of_what_a_producer_says_only_a_push_carries_a_payload() -> None:
    for kind in may_hear(Side.DISPATCHER, S.PRODUCER).keys() - {m.Push}:
        session = session_in(S.PRODUCER)
        with pytest.raises(ProtocolError, match=f"{kind.__name__} does not carry a payload"):
            hear(session, codec.encode(EXAMPLES[kind], 8) + bytes(8))
        assert session.state is S.PRODUCER


def test_a_push_whose_payload_comes_after_an_error_was_said_is_the_peers_fault() -> None:
    push, payload = make_push("p", 0, [3, 5])
    frame, session = codec.encode(push, len(payload)) + payload, session_in(S.PRODUCER)
    assert hear(session, frame[:-8]) == []
    session.send(EXAMPLES[m.Error])
    with pytest.raises(ProtocolError, match="Push is not legal in state closed"):
        hear(session, frame[-8:])


def test_samples_of_one_push_do_not_keep_each_other_in_memory() -> None:
    push, payload = make_push("p", 0, [4, 4])
    ((_, spans),) = hear(session_in(S.PRODUCER), codec.encode(push, len(payload)) + payload)
    first, second = spans
    assert first.obj is not second.obj
    assert (first.nbytes, second.nbytes) == (len(bytes(first.obj)), len(bytes(second.obj)))


def test_a_push_whose_header_and_payload_disagree_is_refused_before_its_payload_comes() -> None:
    push, payload = make_push("p", 0, [4, 4])
    with pytest.raises(ProtocolError, match=f"describes {len(payload)} payload bytes, .* carries"):
        hear(session_in(S.PRODUCER), codec.encode(push, len(payload) + 8))


def test_a_stranger_gets_room_for_a_hello_and_no_more() -> None:
    with pytest.raises(FrameTooLarge, match=f"limit of {HANDSHAKE_LIMITS.header} bytes"):
        hear(session_in(S.AWAIT_HELLO), encode_frame(1, b" " * 20_000))
    with pytest.raises(FrameTooLarge, match="payload of 8 bytes exceeds the limit of 0 bytes"):
        hear(session_in(S.AWAIT_HELLO), codec.encode(EXAMPLES[m.HelloProducer], 8))


def test_the_limits_widen_with_the_hello() -> None:
    push, payload = make_push("p", 0, [1000] * 6)
    assert len(payload) > HANDSHAKE_LIMITS.payload
    ((heard, _),) = hear(session_in(S.PRODUCER), codec.encode(push, len(payload)) + payload)
    assert heard == push


def test_a_micro_batch_comes_in_one_piece_of_the_memory_that_is_given() -> None:
    given: list[int] = []

    def memory(nbytes: int) -> memoryview:
        given.append(nbytes)
        return memoryview(bytearray(nbytes))

    session = Session(Side.RANK, LIMITS, memory)
    session.send(EXAMPLES[m.HelloRank])
    batch = EXAMPLES[m.MicroBatch]
    stream = codec.encode(EXAMPLES[m.WelcomeRank]) + codec.encode(batch, 40) + bytes(range(40))
    _, (heard, (payload,)) = hear(session, stream)
    assert (heard, bytes(payload), given) == (batch, bytes(range(40)), [40])


def test_a_rank_that_says_hello_again_or_leaves_while_a_micro_batch_comes_stays_so() -> None:
    frame = codec.encode(EXAMPLES[m.MicroBatch], 8) + bytes(8)
    for said, state in ((m.HelloRank, S.RANK_RESUMES), (m.Bye, S.RANK_LEAVES)):
        session = session_in(S.RANK, Side.RANK)
        assert hear(session, frame[:-4]) == []
        session.send(EXAMPLES[said])
        assert len(hear(session, frame[-4:])) == 1
        assert session.state is state


def never(nbytes: int) -> bool:
    return False


def test_a_push_waits_to_be_admitted_before_its_header_is_read() -> None:
    push, payload = make_push("p", 0, [3, 5])
    frame, session = codec.encode(push, len(payload)) + payload, session_in(S.PRODUCER)
    session.get_buffer()[: PREFIX.size] = frame[: PREFIX.size]
    assert list(session.received(PREFIX.size, never)) == []
    assert session.waits_for == len(payload)
    rest = frame[PREFIX.size :]
    session.get_buffer()[: len(rest)] = rest
    assert list(session.received(len(rest), never)) == []
    ((heard, spans),) = session.go_on(never)
    assert (heard, b"".join(spans), session.waits_for) == (push, payload, 0)


@pytest.mark.parametrize("state", [S.PRODUCER, S.RANK])
def test_what_has_no_payload_asks_for_no_room(state: S) -> None:
    for kind in may_hear(Side.DISPATCHER, state):
        session, frame = session_in(state), codec.encode(EXAMPLES[kind])
        session.get_buffer()[: len(frame)] = frame
        assert [message for message, _ in session.received(len(frame), never)] == [EXAMPLES[kind]]
