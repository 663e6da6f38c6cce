"""Assembly: what a producer pushed is, byte for byte, what a rank finds in its micro-batch."""

from itertools import accumulate, compress, pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.assemble import (
    filler,
    micro_batch,
    samples_of,
    step_header,
)
from rollout_dispatcher.protocol.frame import FrameLimits, FrameReader
from rollout_dispatcher.protocol.outbox import JOINED_BYTES, Buffer
from rollout_dispatcher.sample import (
    SIZE_UNKNOWN,
    DType,
    Field,
    Sample,
    Schema,
)
from rollout_dispatcher.spans import ALIGNMENT, aligned
from rollout_dispatcher.values import NUMPY_DTYPES
from tests.support.client import SCHEMA, make_push, make_span
from tests.support.samples import span_of
from tests.support.schemas import schemas
from tests.support.wire.frames import feed

LIMITS = FrameLimits(1 << 24, 1 << 24)
#: bfloat16 and text are not numpy's; to the dispatcher they are bytes like any.
NUMPY = NUMPY_DTYPES | {DType.BFLOAT16: np.dtype("uint16"), DType.STR: np.dtype("uint8")}
IDS = Field("input_ids", DType.INT64)
PIXELS = Field("pixels", DType.UINT8, per_token=False, shape=(3,), ragged=True)
ENV = Field.text("env")
RAGGED = Schema((ENV, IDS, PIXELS))

Values = dict[str, bytes]


def push_of(schema: Schema, values: list[Values], tokens: list[int]) -> tuple[m.Push, bytes]:
    """A push built from the raw bytes of every field, the way a producer does."""
    bare = make_push("p", 0, tokens)[0]
    rows = {
        item.name: [len(sample[item.name]) // item.unit for sample in values]
        for item in schema.fields
        if item.ragged
    }
    push = bare.model_copy(update={"fields": m.field_headers(schema), "rows": rows or None})
    parts = [sample[item.name] for sample in values for item in schema.fields]
    return push, b"".join(part.ljust(aligned(len(part)), b"\0") for part in parts)


def random_values(schema: Schema, tokens: int, seed: int) -> Values:
    chance = np.random.default_rng(seed)
    return {
        item.name: chance.bytes(item.nbytes(tokens, int(chance.integers(6))))
        for item in schema.fields
    }


def pushed(push: m.Push, payload: bytes, group_size: int | None = None) -> tuple[Sample, ...]:
    """The samples of a push whose payload came as it was sent."""
    view, stops = memoryview(payload), [0, *accumulate(push.spans(len(payload)))]
    return samples_of(push, [view[a:b] for a, b in pairwise(stops)], group_size)


def sent(buffers: list[Buffer]) -> tuple[m.Message, memoryview]:
    """What arrives when these buffers are written in order."""
    (frame,) = feed(FrameReader(LIMITS), b"".join(buffers))
    return codec.decode(frame), frame.payload


@given(schema=schemas(), tokens=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_a_micro_batch_is_numpys_concatenation_field_by_field(
    schema: Schema, tokens: list[int]
) -> None:
    values = [random_values(schema, size, seed) for seed, size in enumerate(tokens)]
    push, payload = push_of(schema, values, tokens)
    samples = pushed(push, payload)
    header, received = sent(micro_batch(3, 1, samples))
    assert isinstance(header, m.MicroBatch)
    offset = 0
    for item in schema.fields:
        dtype = NUMPY[item.dtype]
        arrays = [
            np.frombuffer(sample[item.name], dtype).reshape(-1, *item.shape) for sample in values
        ]
        expected = np.concatenate(arrays)
        if item.ragged:
            assert (header.rows or {})[item.name] == list(map(len, arrays))
        else:
            assert len(expected) == (sum(tokens) if item.per_token else len(tokens))
        assert offset % ALIGNMENT == 0
        assert bytes(received[offset : offset + expected.nbytes]) == expected.tobytes()
        offset = aligned(offset + expected.nbytes)
    assert offset == received.nbytes


@given(schema=schemas(), tokens=st.integers(1, 9))
def test_a_filler_is_the_first_real_token_without_loss(schema: Schema, tokens: int) -> None:
    values = random_values(schema, tokens, 0)
    push, payload = push_of(schema, [values], [tokens])
    (sample,) = pushed(push, payload)
    header, received = sent(filler(3, 1, sample))
    assert isinstance(header, m.MicroBatch)
    assert (header.is_filler, header.tokens, header.loss_tokens) == (True, [1], [0])
    none = (0,) * len(schema.ragged)
    for item, cut in zip(schema.fields, schema.slices(1, none), strict=True):
        assert bytes(received[cut]) == values[item.name][: item.nbytes(1)]
    assert received.nbytes == schema.nbytes(1, none)
    assert header.rows == ({name: [0] for name in schema.ragged} or None)


def test_the_header_of_a_micro_batch_describes_its_samples_in_order() -> None:
    push, payload = make_push(
        "p", 5, [2, 4], loss_tokens=[1, 0], group_ids=["g", None], policy_versions=[None, 7]
    )
    header, _ = sent(micro_batch(9, 2, pushed(push, payload), attempt=3))
    assert header == m.MicroBatch(
        step=9,
        index=2,
        attempt=3,
        tokens=[2, 4],
        loss_tokens=[1, 0],
        sample_ids=["p/5", "p/6"],
        group_ids=["g", None],
        policy_versions=[None, 7],
    )


def test_gathering_copies_no_field_of_some_size() -> None:
    (sample,) = pushed(*make_push("p", 0, [JOINED_BYTES]))
    views = [part for part in micro_batch(0, 0, [sample]) if isinstance(part, memoryview)]
    assert [view.nbytes for view in views] == [8 * JOINED_BYTES, JOINED_BYTES]
    assert all(view.obj is span_of(sample).obj for view in views)


def test_group_sizes_come_from_the_push_then_from_the_default() -> None:
    push, payload = make_push("p", 0, [1, 1], group_ids=["g", None])
    assert [s.group_size for s in pushed(push, payload)] == [SIZE_UNKNOWN, 1]
    assert [s.group_size for s in pushed(push, payload, 8)] == [8, 1]
    told = push.model_copy(update={"group_sizes": [4, 4]})
    assert [s.group_size for s in pushed(told, payload, 8)] == [4, 1]


def test_a_push_of_nothing_has_no_samples() -> None:
    push, payload = make_push("p", 0, [], group_ids=[], group_sizes=[], policy_versions=[])
    assert pushed(push, payload) == ()
    push, payload = make_push("p", 0, [], group_ids=[])
    assert pushed(push, payload) == ()


def referring(places: list[tuple[int, int] | None], *nbytes: int) -> m.Push:
    """A push of samples of two tokens (32 bytes), in objects of so many bytes."""
    push, _ = make_push("p", 0, [2] * len(places))
    objects = [
        m.ObjectHeader(store="file:///a", key=f"p.1/{at}", nbytes=size)
        for at, size in enumerate(nbytes)
    ]
    return push.model_copy(update={"places": places, "objects": objects})


def test_samples_of_a_push_lie_where_it_says() -> None:
    push = referring([(0, 0), None, (1, 8), (0, 32)], 64, 40)
    samples = pushed(push, make_span(1, 2))
    first, second = (
        StoredObject("file:///a", f"p.1/{at}", size) for at, size in ((0, 64), (1, 40))
    )
    assert samples[0].payload == Reference(first, 0, 32)
    assert bytes(span_of(samples[1])) == make_span(1, 2)
    assert samples[2].payload == Reference(second, 8, 32)
    assert samples[3].payload == Reference(first, 32, 32)


@pytest.mark.parametrize(
    ("places", "nbytes", "words"),
    [
        ([(0, 0), (0, 33)], [64], r"p/1 has 32 bytes and begins at byte 33 of .* which has 64"),
        ([(0, 2**52)], [64], "begins at byte 4503599627370496"),
        ([(0, 0)], [8], "has 32 bytes and begins at byte 0"),
        ([(1, 0)], [64, 64], "names an object that none of its samples lies in"),
    ],
)
def test_samples_that_cannot_lie_where_a_push_says_are_refused(
    places: list[tuple[int, int] | None], nbytes: list[int], words: str
) -> None:
    with pytest.raises(ProtocolError, match=words):
        pushed(referring(places, *nbytes), b"")


@given(schema=schemas(), here=st.lists(st.booleans(), min_size=1, max_size=5), data=st.data())
def test_a_micro_batch_has_the_payloads_that_are_here_and_says_where_others_are(
    schema: Schema, here: list[bool], data: st.DataObject
) -> None:
    tokens = data.draw(st.lists(st.integers(1, 9), min_size=len(here), max_size=len(here)))
    values = [random_values(schema, size, seed) for seed, size in enumerate(tokens)]
    samples = pushed(*push_of(schema, values, tokens))
    objects = [StoredObject("file:///a", f"p.1/{at}", 4096) for at in range(2)]
    mixed = [
        sample
        if is_here
        else sample._replace(payload=Reference(objects[at % 2], at, sample.nbytes))
        for at, (sample, is_here) in enumerate(zip(samples, here, strict=True))
    ]
    header, received = sent(micro_batch(3, 1, mixed))
    all_here, _ = sent(micro_batch(3, 1, samples))
    assert isinstance(header, m.MicroBatch)
    assert header.model_copy(update={"objects": None, "places": None}) == all_here
    rest = list(compress(samples, here))
    alone = sent(micro_batch(3, 1, rest))[1] if rest else b""
    assert received == alone
    found = header.objects or []
    places = [place and (found[place[0]], place[1]) for place in header.places or [None] * 9]
    for at, (place, is_here) in enumerate(zip(places, here, strict=False)):
        told = m.ObjectHeader(store="file:///a", key=f"p.1/{at % 2}", nbytes=4096)
        assert place == (None if is_here else (told, at))
    assert (header.places is None) == all(here)
    frame, _ = sent([step_header(3, "digest", 2, mixed)])
    assert isinstance(frame, m.StepHeader)
    assert frame.num_referenced == here.count(False)


def test_a_filler_of_a_sample_that_is_not_here_is_a_zero_token() -> None:
    values = random_values(RAGGED, 3, 0)
    (sample,) = pushed(*push_of(RAGGED, [values], [3]))
    away = sample._replace(payload=Reference(StoredObject("s:a", "k", 999), 0, sample.nbytes))
    header, received = sent(filler(3, 1, away))
    assert isinstance(header, m.MicroBatch)
    assert (header.is_filler, header.tokens, header.loss_tokens) == (True, [1], [0])
    assert (header.objects, header.places) == (None, None)
    assert header.rows == {"env": [0], "pixels": [0]}
    assert bytes(received) == bytes(RAGGED.nbytes(1, [0, 0]))


@given(
    tokens=st.lists(st.integers(0, 6), max_size=4), wrong=st.lists(st.integers(0, 6), max_size=4)
)
def test_a_header_that_lies_about_sizes_is_refused(tokens: list[int], wrong: list[int]) -> None:
    push, _ = make_push("p", 0, tokens)
    payload = b"".join(make_span(0, size) for size in wrong)
    expected = sum(SCHEMA.nbytes(size) for size in tokens)
    assume(len(payload) != expected)
    words = f"describes {expected} payload bytes, the frame carries {len(payload)}"
    with pytest.raises(ProtocolError, match=words):
        pushed(push, payload)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (None, "Push has rows of none, the ragged fields are env, pixels"),
        ({"env": [3]}, "Push has rows of env, the ragged fields are env, pixels"),
        (
            {"env": [3], "pixels": [1], "input_ids": [2]},
            "Push has rows of env, pixels, input_ids, the ragged fields are env, pixels",
        ),
        ({"env": [3], "pixels": [3]}, "describes 32 payload bytes, the frame carries 24"),
        (
            {"env": [3], "pixels": [2**31 - 1]},
            "6442450960 payload bytes, the frame carries 24; rows: env 3, pixels 2147483647",
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows: dict[str, list[int]] | None, words: str) -> None:
    values = {"env": b"abc", "input_ids": bytes(8), "pixels": bytes(6)}
    push, payload = push_of(Schema((ENV, IDS, PIXELS)), [values], [1])
    assert pushed(push, payload)[0].rows == (3, 2)
    with pytest.raises(ProtocolError, match=words):
        pushed(push.model_copy(update={"rows": rows}), payload[:24])


@pytest.mark.parametrize(
    ("field", "words"),
    [
        (Field("x", DType.INT8, ragged=True), "x is ragged, and has a row a token at once"),
        (Field("x", DType.STR), "x is text: one a sample, ragged and of no shape"),
        (Field("x", DType.INT8, False, (1 << 30,) * 2, ragged=True), "larger than any frame"),
        (Field("x", DType.STR, per_token=False, shape=(2,), ragged=True), "x is text"),
    ],
)
def test_fields_that_nobody_could_read_are_refused(field: Field, words: str) -> None:
    push, payload = make_push("p", 0, [1])
    fields = m.field_headers(Schema((field,)))
    with pytest.raises(ProtocolError, match=words):
        pushed(push.model_copy(update={"fields": fields}), payload)


def test_the_totals_of_a_step_are_over_all_its_samples() -> None:
    push, payload = make_push("p", 0, [2, 4, 6], loss_tokens=[0, 3, 6])
    header, _ = sent([step_header(4, "digest", 2, iter(pushed(push, payload)))])
    assert header == m.StepHeader(
        step=4,
        digest="digest",
        num_micro_batches=2,
        num_samples=3,
        tokens=12,
        loss_tokens=9,
        loss_samples=2,
        fields=m.field_headers(SCHEMA),
    )


def test_groups_are_told_only_where_they_are_given() -> None:
    push, payload = make_push("p", 0, [2, 4])
    samples = pushed(push, payload)
    header, _ = sent([step_header(4, "digest", 1, samples, group_loss_tokens=(2, 4))])
    assert isinstance(header, m.StepHeader)
    assert header.group_loss_tokens == [2, 4]
    batch, _ = sent(micro_batch(4, 0, samples, (1, 0)))
    assert isinstance(batch, m.MicroBatch)
    assert batch.group_numbers == [1, 0]
    assert (batch.group_ids, batch.policy_versions) == (None, None)
    assert b"group_" not in step_header(4, "digest", 1, samples)
    assert b"group_" not in micro_batch(4, 0, samples)[0]


def test_a_step_may_have_more_tokens_than_32_bits_count() -> None:
    longest = 2**31 - 1
    sample = Sample("s", longest, longest, SCHEMA, memoryview(b""))
    header, _ = sent([step_header(0, "digest", 1, [sample, sample])])
    assert isinstance(header, m.StepHeader)
    assert header.tokens == 2 * longest
