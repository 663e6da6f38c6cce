"""The session table: who may say what when; an illegal message changes nothing."""

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.errors import FrameTooLarge, ProtocolError, VersionMismatch
from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.frame import HANDSHAKE_LIMITS, PREFIX, FrameLimits, encode_frame
from rollout_dispatcher.protocol.session import ServerSession, State
from tests.support.client import make_push
from tests.support.messages import EXAMPLES

LIMITS = FrameLimits(header=1 << 20, payload=1 << 20)

#: What a peer says to come into a state.
WAY = {
    State.AWAIT_HELLO: (),
    State.PRODUCER: (EXAMPLES[m.HelloProducer],),
    State.RANK: (EXAMPLES[m.HelloRank],),
    State.CLOSED: (EXAMPLES[m.HelloRank], m.Bye()),
}
LEGAL: dict[State, dict[type[m.Message], State]] = {
    State.AWAIT_HELLO: {m.HelloProducer: State.PRODUCER, m.HelloRank: State.RANK},
    State.PRODUCER: {
        m.Push: State.PRODUCER,
        m.CloseGroup: State.PRODUCER,
        m.EndPhase: State.PRODUCER,
        m.EndStream: State.PRODUCER,
        m.Ping: State.PRODUCER,
        m.Bye: State.CLOSED,
    },
    State.RANK: {
        m.Demand: State.RANK,
        m.PolicyVersion: State.RANK,
        m.Prepared: State.RANK,
        m.Commit: State.RANK,
        m.HelloRank: State.RANK,
        m.CheckpointSaved: State.RANK,
        m.Ping: State.RANK,
        m.Bye: State.CLOSED,
    },
    State.CLOSED: {},
}


def hear(session: ServerSession, data: bytes) -> list[tuple[m.Message, Sequence[memoryview]]]:
    heard: list[tuple[m.Message, Sequence[memoryview]]] = []
    while data:
        target = session.get_buffer()
        taken = min(len(target), len(data))
        target[:taken] = data[:taken]
        data = data[taken:]
        heard += session.received(taken)
    return heard


def session_in(state: State) -> ServerSession:
    session = ServerSession(LIMITS)
    for message in WAY[state]:
        hear(session, codec.encode(message))
    assert session.state is state
    return session


@pytest.mark.parametrize(
    ("state", "kind"),
    list(product(State, EXAMPLES)),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_table_is_kept(state: State, kind: type[m.Message]) -> None:
    session = session_in(state)
    sent = EXAMPLES[kind]
    after = LEGAL[state].get(kind)
    if after is not None:
        ((heard, spans),) = hear(session, codec.encode(sent))
        assert (heard, b"".join(spans), session.state) == (sent, b"", after)
        return
    with pytest.raises(ProtocolError) as raised:
        hear(session, codec.encode(sent))
    assert str(raised.value) == f"{kind.__name__} is not legal in state {state}"
    assert session.state is state


def test_only_a_push_carries_a_payload() -> None:
    for kind in LEGAL[State.PRODUCER].keys() - {m.Push}:
        session = session_in(State.PRODUCER)
        with pytest.raises(ProtocolError, match=f"{kind.__name__} does not carry a payload"):
            hear(session, codec.encode(EXAMPLES[kind], 8) + bytes(8))
        assert session.state is State.PRODUCER


def test_a_push_comes_with_its_payload() -> None:
    push, payload = make_push("p", 0, [3, 5])
    ((heard, spans),) = hear(session_in(State.PRODUCER), codec.encode(push, len(payload)) + payload)
    assert (heard, b"".join(spans)) == (push, payload)
    assert [len(span) for span in spans] == push.spans(len(payload))


def test_samples_of_one_push_do_not_keep_each_other_in_memory() -> None:
    push, payload = make_push("p", 0, [4, 4])
    ((_, spans),) = hear(session_in(State.PRODUCER), codec.encode(push, len(payload)) + payload)
    first, second = spans
    assert first.obj is not second.obj
    assert (first.nbytes, second.nbytes) == (len(bytes(first.obj)), len(bytes(second.obj)))


def test_a_push_whose_header_and_payload_disagree_is_refused_before_its_payload_comes() -> None:
    push, payload = make_push("p", 0, [4, 4])
    with pytest.raises(ProtocolError, match=f"describes {len(payload)} payload bytes, .* carries"):
        hear(session_in(State.PRODUCER), codec.encode(push, len(payload) + 8))


def test_a_stranger_gets_room_for_a_hello_and_no_more() -> None:
    with pytest.raises(FrameTooLarge, match=f"limit of {HANDSHAKE_LIMITS.header} bytes"):
        hear(session_in(State.AWAIT_HELLO), encode_frame(1, b" " * 20_000))
    with pytest.raises(FrameTooLarge, match="payload of 8 bytes exceeds the limit of 0 bytes"):
        hear(session_in(State.AWAIT_HELLO), codec.encode(EXAMPLES[m.HelloProducer], 8))


def test_the_limits_widen_with_the_hello_even_in_the_same_read() -> None:
    push, payload = make_push("p", 0, [1000] * 6)
    assert len(payload) > HANDSHAKE_LIMITS.payload
    stream = codec.encode(EXAMPLES[m.HelloProducer]) + codec.encode(push, len(payload)) + payload
    heard = [message for message, _ in hear(ServerSession(LIMITS), stream)]
    assert heard == [EXAMPLES[m.HelloProducer], push]


def test_a_refused_hello_does_not_widen_the_limits() -> None:
    session = session_in(State.AWAIT_HELLO)
    with pytest.raises(VersionMismatch):
        hear(session, codec.encode(m.HelloProducer.model_construct(version=7, client_id="p")))
    assert session.state is State.AWAIT_HELLO


@given(st.sampled_from([*State][:3]), st.binary(max_size=300))
def test_random_bytes_raise_nothing_but_a_protocol_error(state: State, data: bytes) -> None:
    session = session_in(state)
    try:
        hear(session, data)
    except ProtocolError:
        assert session.state is state


@given(
    st.sampled_from([State.AWAIT_HELLO, State.PRODUCER, State.RANK]),
    st.lists(
        st.tuples(st.integers(0, 25), st.binary(max_size=40) | st.sampled_from([b"{}", b"[]"])),
        max_size=4,
    ),
)
def test_random_frames_raise_nothing_but_a_protocol_error(
    state: State, frames: list[tuple[int, bytes]]
) -> None:
    session = session_in(state)
    try:
        for code, header in frames:
            hear(session, encode_frame(code, header))
    except ProtocolError:
        return
    assert session.state in {state, State.CLOSED}


def never(nbytes: int) -> bool:
    return False


def test_a_push_waits_to_be_admitted_before_its_header_is_read() -> None:
    push, payload = make_push("p", 0, [3, 5])
    frame, session = codec.encode(push, len(payload)) + payload, session_in(State.PRODUCER)
    session.get_buffer()[: PREFIX.size] = frame[: PREFIX.size]
    assert list(session.received(PREFIX.size, never)) == []
    assert session.waits_for == len(payload)
    rest = frame[PREFIX.size :]
    session.get_buffer()[: len(rest)] = rest
    assert list(session.received(len(rest), never)) == []
    ((heard, spans),) = session.go_on(never)
    assert (heard, b"".join(spans), session.waits_for) == (push, payload, 0)


@pytest.mark.parametrize("state", [State.PRODUCER, State.RANK])
def test_what_has_no_payload_asks_for_no_room(state: State) -> None:
    for kind in LEGAL[state]:
        session, frame = session_in(state), codec.encode(EXAMPLES[kind])
        session.get_buffer()[: len(frame)] = frame
        assert [message for message, _ in session.received(len(frame), never)] == [EXAMPLES[kind]]


@given(sizes=st.lists(st.integers(1, 5000), max_size=9), admitted=st.lists(st.booleans()))
def test_pushes_are_heard_alike_whether_they_wait_or_not(
    sizes: list[int], admitted: list[bool]
) -> None:
    pushes = [make_push("p", 0, [3, 5]), make_push("p", 2, [900]), make_push("p", 3, [])]
    said: list[tuple[m.Message, bytes]] = [(m.Ping(), b"")]
    for push in pushes:
        said += [push, (m.CloseGroup(group_id="g"), b"")]
    stream = b"".join(codec.encode(it, len(payload)) + payload for it, payload in said)
    session, heard = session_in(State.PRODUCER), list[tuple[m.Message, bytes]]()

    def admit(nbytes: int) -> bool:
        return not admitted or admitted.pop()

    while stream:
        target = session.get_buffer()
        taken = min(sizes.pop() if sizes else len(stream), len(target), len(stream))
        target[:taken], stream = stream[:taken], stream[taken:]
        heard += [(it, b"".join(spans)) for it, spans in session.received(taken, admit)]
        while session.waits_for:
            heard += [(it, b"".join(spans)) for it, spans in session.go_on(admit)]
    assert heard == said
