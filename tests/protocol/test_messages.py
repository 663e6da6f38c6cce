"""Messages: what is sent is what is received, and a header that is wrong says where."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.frame import Frame, FrameLimits, FrameReader
from tests.support.wire.frames import feed
from tests.support.wire.messages import EXAMPLES, STRATEGIES

LIMITS = FrameLimits(1 << 20, 1 << 20)

PUSH = {
    "first_seq": 0,
    "floor": 0,
    "fields": [{"name": "input_ids", "dtype": "int64"}],
    "tokens": [2, 3],
    "loss_tokens": [2, 3],
    "sample_ids": ["a", "b"],
}
FIELD = {"name": "x", "dtype": "int64"}
RANK = {"client_id": "r", "dp_rank": 0, "dp_size": 2}


def decode(kind: type[m.Message], header: object) -> m.Message:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return codec.decode(Frame(kind.type_code, memoryview(text)))


def test_every_message_has_an_example_and_a_strategy() -> None:
    assert set(m.MESSAGES.values()) == set(EXAMPLES) == set(STRATEGIES)
    assert all(m.MESSAGES[kind.type_code] is kind for kind in EXAMPLES)


@pytest.mark.parametrize("kind", STRATEGIES, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_what_is_sent_is_received(kind: type[m.Message], data: st.DataObject) -> None:
    sent = data.draw(STRATEGIES[kind])
    (frame,) = feed(FrameReader(LIMITS), codec.encode(sent))
    assert codec.decode(frame) == sent


@pytest.mark.parametrize(
    "message",
    [
        m.WelcomeProducer(run_id="run", credits=1, max_payload_bytes=1, heartbeat_interval_s=1.0),
        EXAMPLES[m.WelcomeRank].model_copy(update={"payload_stores": []}),
        EXAMPLES[m.StepHeader].model_copy(update={"attempt": 0, "num_referenced": 0}),
        EXAMPLES[m.MicroBatch].model_copy(update={"attempt": 0}),
        EXAMPLES[m.Prepared].model_copy(update={"attempt": 0}),
    ],
    ids=lambda message: type(message).__name__,
)
def test_keys_of_references_are_left_out_where_there_are_none(message: m.Message) -> None:
    (frame,) = feed(FrameReader(LIMITS), codec.encode(message))
    sent = json.loads(bytes(frame.header))
    assert not {"payload_stores", "attempt", "num_referenced"} & sent.keys()
    assert codec.decode(frame) == message


HELLOS = m.HelloProducer, m.HelloRank


@pytest.mark.parametrize("kind", HELLOS, ids=lambda kind: kind.__name__)
def test_a_hello_may_have_keys_that_are_not_known_yet(kind: type[m.Message]) -> None:
    header = EXAMPLES[kind].model_dump(mode="json", exclude_none=True) | {"colour": "red"}
    assert decode(kind, header) == EXAMPLES[kind]


@pytest.mark.parametrize(
    "kind", [kind for kind in EXAMPLES if kind not in HELLOS], ids=lambda kind: kind.__name__
)
def test_an_unknown_key_is_refused_by_name(kind: type[m.Message]) -> None:
    header = EXAMPLES[kind].model_dump(mode="json", exclude_none=True) | {"colour": "red"}
    with pytest.raises(ProtocolError, match=f"{kind.__name__}: colour: .*not permitted"):
        decode(kind, header)


@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("header", [b"", b"{", b"null", b"[]", b"7", b"\xff{}", b"[" * 9999])
def test_a_header_that_is_no_object_is_refused(kind: type[m.Message], header: bytes) -> None:
    with pytest.raises(ProtocolError, match=kind.__name__):
        decode(kind, header)


@pytest.mark.parametrize(
    ("kind", "header", "words"),
    [
        (m.Push, PUSH | {"tokens": [2, -3]}, "tokens.1: .*greater than or equal to 0"),
        (m.Push, PUSH | {"tokens": [2, 3.5]}, "tokens.1: .*integer"),
        (m.Push, PUSH | {"tokens": [2, True]}, "tokens.1: .*integer"),
        (m.Push, PUSH | {"first_seq": 2**53}, "first_seq: "),
        (m.Push, PUSH | {"loss_tokens": [1]}, "loss_tokens has 1 entries for 2 samples"),
        (m.Push, PUSH | {"sample_ids": ["a", ""]}, "sample_ids.1: .*at least 1 character"),
        (m.Push, PUSH | {"sample_ids": ["a", "b" * 129]}, "sample_ids.1: .*at most 128"),
        (m.Push, PUSH | {"group_sizes": [-1, 1]}, "group_sizes.0: .*greater than"),
        (m.Push, PUSH | {"policy_versions": [1, -1]}, "policy_versions.1"),
        (m.Push, PUSH | {"tokens": [1] * 1025}, "tokens: .*at most 1024 items"),
        (m.Push, PUSH | {"rows": {"env": [3]}}, "rows of env has 1 entries for 2 samples"),
        (m.Push, PUSH | {"rows": {"env": [3, -1]}}, "greater than or equal to 0"),
        (m.Push, PUSH | {"rows": {"env": [3, 2**31]}}, "less than 2147483648"),
        (m.Push, PUSH | {"fields": []}, "fields: .*at least 1 item"),
        (m.Push, PUSH | {"fields": [FIELD, FIELD]}, "a field is named twice"),
        (m.Push, PUSH | {"fields": [FIELD | {"dtype": "object"}]}, "fields.0.dtype: .*'bool'"),
        (m.Push, PUSH | {"fields": [FIELD | {"shape": [0]}]}, "fields.0.shape.0: .*greater"),
        (m.Push, PUSH | {"fields": [FIELD | {"shape": [1] * 9}]}, "fields.0.shape: .*at most 8"),
        (m.Push, PUSH | {"fields": [FIELD | {"name": f"{at}"} for at in range(65)]}, "at most 64"),
        (m.HelloRank, RANK | {"dp_rank": -1}, "dp_rank: .*greater than or equal to 0"),
        (m.HelloRank, RANK | {"generation": 0}, "generation: "),
        (m.HelloRank, RANK | {"received": [[0]]}, "received.0.1: "),
        (m.HelloRank, RANK | {"received": [[0, True]]}, "received.0.1: .*integer"),
        (m.HelloRank, {"client_id": "r", "dp_size": 2}, "dp_rank: Field required"),
        (m.HelloProducer, {"client_id": ""}, "client_id: "),
        (m.HelloProducer, {"client_id": "p", "token": "x" * 2000}, "token: .*at most 1024"),
        *(
            (m.HelloProducer, {"client_id": "p.1", "incarnation": name}, "not the client_id")
            for name in ("p.1", "p.1.", "p.1.2/3", "p.1.2.3", "q.2", "p.1x2", "xp.1.2", ".")
        ),
        (m.HelloProducer, {"client_id": "p", "version": "3"}, "version: .*integer"),
        (m.Pushed, {"first_seq": 0, "outcomes": ["lost"]}, "outcomes.0: .*'duplicate'"),
        (m.Demand, {"taken": -1, "hungry": 1}, "hungry: .*boolean"),
        (m.Commit, {"step": -1}, "step: "),
        (m.Prepared, {"step": 0}, "digest: Field required"),
        (m.StepTimes, {"step": 0, "busy_s": []}, "busy_s: .*at least 1 item"),
        (m.StepTimes, {"step": 0, "busy_s": [-0.5]}, "busy_s.0: .*greater than or equal to 0"),
        (m.StepTimes, {"step": 0, "busy_s": [1.0, 1e10]}, "busy_s.1: .*less than or equal"),
        (m.StepTimes, {"step": 0, "busy_s": [float("nan")]}, "busy_s.0: .*finite"),
        (m.StepTimes, {"step": 0, "busy_s": [1.0] * 65537}, "busy_s: .*at most 65536"),
        (
            m.StepTimes,
            {"step": 0, "busy_s": [1.0], "collective_s": [0.5, 0.5]},
            "collective_s has 2 entries for 1 micro-batches",
        ),
        (m.StepTimes, {"step": 0, "busy_s": [1.0], "why": "y" * 201}, "why: .*at most 200"),
        (m.StepTimes, {"step": 0, "busy_s": [1.0], "cost_key": ""}, "cost_key: .*at least 1"),
        (m.Commit, {"step": 0, "times": []}, "times: .*at least 1 item"),
        (m.Commit, {"step": 0, "times": [{"busy_s": [1.0]}] * 9}, "times: .*at most 8 items"),
        (m.Commit, {"step": 0, "times": [{"busy_s": [1.0], "step": 0}]}, "times.0.step: .*Extra"),
        (
            m.Commit,
            {"step": 0, "times": [{"busy_s": [1.0] * 32768}, {"busy_s": [1.0] * 32769}]},
            "times of more than 65536 micro-batches",
        ),
    ],
)
def test_a_wrong_header_is_refused_and_says_where(
    kind: type[m.Message], header: dict[str, object], words: str
) -> None:
    with pytest.raises(ProtocolError, match=f"^{kind.__name__}: .*{words}"):
        decode(kind, header)


@pytest.mark.parametrize("code", [0, 98, 99, 255])
def test_an_unknown_message_type_is_refused_by_number(code: int) -> None:
    with pytest.raises(ProtocolError, match=f"unknown message type {code}"):
        codec.decode(Frame(code, memoryview(b"{}")))


@given(
    kind=st.sampled_from(list(EXAMPLES)),
    header=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
        max_leaves=8,
    ),
    data=st.data(),
)
def test_random_json_in_any_place_is_a_message_or_a_protocol_error(
    kind: type[m.Message], header: object, data: st.DataObject
) -> None:
    known = EXAMPLES[kind].model_dump(mode="json", exclude_none=True)
    if known:
        header = known | {data.draw(st.sampled_from(sorted(known))): header}
    try:
        decode(kind, header)
    except ProtocolError:
        return


def test_the_schemas_of_equal_fields_are_one_object() -> None:
    first, second = decode(m.Push, PUSH), decode(m.Push, PUSH)
    assert isinstance(first, m.Push)
    assert isinstance(second, m.Push)
    assert first.schema_ is second.schema_
    assert m.field_headers(first.schema_) == first.fields
