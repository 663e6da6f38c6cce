"""What a hostile or broken peer sends: streams of frames, valid ones and ones gone wrong.

A stream is made of valid frames, of whatever messages; then some are cut, overwritten, repeated,
swapped, given sizes that are not theirs or JSON that is not what the message has.
"""

import json
from typing import Any

from hypothesis import strategies as st

from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.frame import MAGIC, PREFIX, encode_frame
from rollout_dispatcher.sample import DType, Field
from tests.support.client import make_push, make_span
from tests.support.references import STORE
from tests.support.schemas import rows, schemas
from tests.support.wire.messages import EXAMPLES, STRATEGIES

#: Numbers at which something may be allocated, overflow or be taken for a sign.
SIZES = st.sampled_from([0, 1, 7, 8, 9, 64, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 8, 2**32 - 1])
BIG_SIZES = SIZES | st.sampled_from([2**40, 2**53, 2**63, 2**64 - 1])

#: What objects may be called: as a good producer's, as one's own, as two at once, as nothing good.
KEYS = st.sampled_from(["good.1/0", "fuzz.1/0", "fuzz.1/1", "another.1/0", "../0", "/", "fuzz.1"])

#: JSON that has brought parsers down, or passes for what it is not.
NASTY_JSON = [
    b"", b"{", b"null", b"[]", b'""', b"0", b"NaN", b"1e999", b'{"a":1,"a":2}', b"\xff\xfe",
    b'"\xed\xa0\x80"', b"[" * 4000, b'{"a":' * 2000, b"9" * 5000, b"-" + b"9" * 400, b"\x00" * 64,
    b'{"version":2e0,"client_id":"x"}', b'{"version":99999999999999999999,"client_id":"x"}',
    b'{"client_id":"\\ud800"}', b'{"__proto__":{}}',
]  # fmt: skip

_values: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-(2**63), -1, 0, 1, 2**31, 2**53 - 1, 2**53, 2**64, 10**30]),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    st.lists(st.integers(-1, 2**53), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
_messages = st.sampled_from(sorted(STRATEGIES, key=lambda kind: kind.type_code)).flatmap(
    lambda kind: st.just(EXAMPLES[kind]) | STRATEGIES[kind]
)


@st.composite
def _pushes(draw: st.DrawFn) -> bytes:
    """A push whose payload is what its header says, or nearly."""
    tokens = draw(st.lists(st.integers(0, 70), max_size=4))
    push, payload = make_push("fuzz", draw(st.integers(0, 2**21)), tokens)
    if draw(st.booleans()):
        schema = draw(schemas(Field("input_ids", DType.INT64)))
        own = [draw(rows(schema)) for _ in tokens]
        by_field = tuple(zip(*own, strict=True)) or ((),) * len(schema.ragged)
        named = {name: list(each) for name, each in zip(schema.ragged, by_field, strict=True)}
        if named and not draw(st.integers(0, 4)):
            named.pop(draw(st.sampled_from(sorted(named))))
        push = push.model_copy(update={"fields": m.field_headers(schema), "rows": named or None})
        payload = bytes(sum(schema.sizes(tokens, by_field)))
    cut = draw(st.integers(0, 8)) if draw(st.booleans()) else 0
    payload = payload[: len(payload) - cut]
    return codec.encode(push, len(payload)) + payload


@st.composite
def _pushes_of_references(draw: st.DrawFn) -> bytes:
    """A push of which some samples lie in objects, that are as large as they have to be or not."""
    tokens = draw(st.lists(st.integers(1, 70), min_size=1, max_size=4))
    push, _ = make_push("fuzz", first := draw(st.integers(0, 2**20)), tokens)
    stored = st.builds(
        m.ObjectHeader,
        store=st.sampled_from([STORE, STORE, STORE, "file:///elsewhere"]),
        key=KEYS,
        nbytes=st.sampled_from([2**40, 2**40, 2**40, sum(push.sizes()), 1]),
    )
    places: list[tuple[int, int] | None] = [(0, 0)]
    places += [draw(st.sampled_from([None, (0, 0), (0, 8)])) for _ in tokens[1:]]
    if not draw(st.integers(0, 4)):
        places[-1] = draw(st.tuples(st.integers(0, 2), SIZES))
    objects = draw(st.lists(stored, min_size=1, max_size=1 + (not draw(st.integers(0, 4)))))
    placed = push.model_copy(update={"objects": objects, "places": places})
    spans = [make_span(first + at, size) for at, size in enumerate(tokens) if places[at] is None]
    payload = b"".join(spans)
    return codec.encode(placed, len(payload)) + payload


@st.composite
def _with_other_json(draw: st.DrawFn) -> bytes:
    """A frame whose header has a key too many, one too few, or another value."""
    message = draw(_messages)
    header: dict[str, Any] = json.loads(message.model_dump_json(exclude_none=True))
    key = draw(st.sampled_from([*header, "extra"]))
    if draw(st.booleans()) or key not in header:
        header[key] = draw(_values)
    else:
        del header[key]
    return encode_frame(message.type_code, json.dumps(header).encode(), draw(st.integers(0, 9)))


#: Whatever may be said.
FRAMES: st.SearchStrategy[bytes] = st.one_of(
    _messages.map(codec.encode),
    _pushes(),
    _pushes_of_references(),
    _with_other_json(),
    st.builds(encode_frame, st.integers(0, 255), st.sampled_from(NASTY_JSON)),
    st.builds(encode_frame, st.integers(0, 25), st.binary(max_size=64), SIZES),
    st.builds(
        PREFIX.pack,
        st.sampled_from([MAGIC, b"GE", b"\x16\x03"]),
        st.integers(0, 255),
        st.sampled_from([0, 0, 0, 1, 255]),
        SIZES,
        BIG_SIZES,
    ),
    st.binary(max_size=64),
)


#: The same, and more of what is said of payload stores, answers to what was asked among them.
FRAMES_ABOUT_STORES = st.one_of(
    _pushes_of_references(),
    _pushes_of_references(),
    st.builds(m.Freed, number=st.integers(0, 9), left=st.lists(KEYS, max_size=2)).map(codec.encode),
    st.builds(m.Swept, number=st.integers(0, 9), keys=st.lists(KEYS, max_size=2)).map(codec.encode),
    FRAMES,
)


@st.composite
def streams(
    draw: st.DrawFn, hellos: tuple[m.Message, ...], each: st.SearchStrategy[bytes] = FRAMES
) -> bytes:
    """All that a peer says on one connection, of frames; most begin with one of the hellos."""
    frames: list[bytes] = draw(st.lists(each, max_size=4))
    if draw(st.integers(0, 1)) and len(frames) > 1:
        places = st.integers(0, len(frames) - 1)
        frames[draw(places)] = frames[draw(places)]
    if draw(st.integers(0, 9)):
        frames.insert(0, codec.encode(hellos[draw(st.integers(0, len(hellos) - 1))]))
    stream = bytearray(b"".join(frames))
    if stream and not draw(st.integers(0, 2)):
        for at, value in draw(
            st.lists(st.tuples(st.integers(0, len(stream) - 1), st.integers(0, 255)), max_size=4)
        ):
            stream[at] = value
    if stream and not draw(st.integers(0, 3)):
        del stream[draw(st.integers(0, len(stream))) :]
    return bytes(stream)
