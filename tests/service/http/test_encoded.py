"""Tensors in base64: their very memory arrives; what does not fit is refused before it is read."""

import base64
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.sample import DType, Field, Sample, Schema
from rollout_dispatcher.service.http.tensors import ELEMENTS, Reading
from tests.support.bodies import parse_body
from tests.support.samples import span_of

IDS = {"dtype": "int64", "shape": [2], "base64": base64.b64encode(bytes(16)).decode()}


def parse(reading: Reading | None = None, per_sample: object = None, **fields: object) -> Sample:
    said: dict[str, object] = {"fields": {"input_ids": [1, 2]} | fields}
    if per_sample is not None:
        said["per_sample"] = per_sample
    ((sample,), _) = parse_body(json.dumps(said).encode(), reading or Reading())
    return sample


def encoded(dtype: str, shape: list[int], raw: bytes) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "base64": base64.b64encode(raw).decode()}


def memory_of(sample: Sample, name: str) -> bytes:
    at = sample.schema.names.index(name)
    return bytes(span_of(sample)[sample.schema.slices(sample.tokens)[at]])


@given(
    dtype=st.sampled_from([item for item in DType if item is not DType.STR]),
    shape=st.lists(st.integers(1, 3), max_size=3),
    data=st.data(),
)
def test_whatever_memory_is_sent_arrives(
    dtype: DType, shape: list[int], data: st.DataObject
) -> None:
    nbytes = int(np.prod(shape, dtype=int)) * dtype.itemsize
    largest = 1 if dtype is DType.BOOL else 255
    raw = bytes(data.draw(st.lists(st.integers(0, largest), min_size=nbytes, max_size=nbytes)))
    sample = parse(Reading(allow_non_finite=True), x=encoded(dtype, shape, raw))
    assert memory_of(sample, "x") == raw
    per_token = bool(shape) and shape[0] == 2
    expected = Field("x", dtype, per_token, tuple(shape[1:] if per_token else shape))
    assert sample.schema.by_name["x"] == expected


def test_large_tensors_arrive_piece_by_piece() -> None:
    values = np.random.default_rng(0).normal(size=(1000, 37)).astype(np.float32)
    sample = parse(x=encoded("float32", [1000, 37], values.tobytes()))
    assert memory_of(sample, "x") == values.tobytes()


def test_ids_and_masks_may_be_in_base64_too() -> None:
    ids = np.array([5, 6, 7], np.int64).tobytes()
    sample = parse(
        input_ids=encoded("int64", [3], ids), loss_mask=encoded("bool", [3], bytes([0, 1, 1]))
    )
    assert (sample.tokens, sample.loss_tokens) == (3, 2)
    assert memory_of(sample, "input_ids") == ids


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (encoded("float32", [2, 2], bytes(12)), r"12 bytes, and float32 of shape (2, 2) is 16"),
        (encoded("float32", [2], bytes(9)), "9 bytes"),
        (encoded("float64", [2**40, 2**40], bytes(8)), "8 bytes"),
        ({"dtype": "uint8", "shape": [3], "base64": "AAA"}, "no whole groups of four"),
        ({"dtype": "uint8", "shape": [3], "base64": "A-A_"}, "no base64"),
        ({"dtype": "uint8", "shape": [3], "base64": "AA A"}, "no base64"),
        ({"dtype": "uint8", "shape": [3], "base64": 7}, "no string"),
        ({"dtype": "uint8", "shape": 3, "base64": "AAAA"}, "no list of dimensions"),
        ({"dtype": "uint8", "shape": [3.0], "base64": "AAAA"}, "no dimension"),
        ({"dtype": "uint8", "shape": [-1], "base64": "AAAA"}, "no dimension"),
        ({"dtype": "uint8", "base64": "AAAA"}, "shape: it is missing"),
        ({"dtype": "quad", "shape": [3], "base64": "AAAA"}, "dtype: "),
        (
            {"dtype": "uint8", "shape": [3], "base64": "AAAA", "data": [1]},
            "data: there is no such key",
        ),
        (encoded("bool", [2], b"\1\2"), "bytes other than 0 and 1"),
        (encoded("float32", [2], np.array([1, np.nan], "f4").tobytes()), "--set allow-non-finite"),
        (encoded("float16", [1], np.array([np.inf], "f2").tobytes()), "--set allow-non-finite"),
        (encoded("bfloat16", [1], b"\x80\xff"), "--set allow-non-finite"),
        (encoded("uint8", [0], b""), "has shape (0,)"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(value: object, words: str) -> None:
    with pytest.raises(ProtocolError, match=r"fields\.x") as raised:
        parse(x=value)
    assert words in str(raised.value)


def test_padding_in_the_middle_is_refused() -> None:
    text = "A" * 32766 + "==" + "AAAA"
    value = {"dtype": "uint8", "shape": [24579], "base64": text}
    with pytest.raises(ProtocolError, match="padded before its end"):
        parse(x=value)


def test_a_slash_may_be_escaped_as_some_do() -> None:
    body = b'{"fields": {"input_ids": [1], "x": {"dtype": "uint8", "shape": [3], "base64": "%s"}}}'
    ((plain,), _) = parse_body(body % b"//8/", Reading())
    ((escaped,), _) = parse_body(body % b"\\/\\/8\\/", Reading())
    assert memory_of(escaped, "x") == memory_of(plain, "x") == b"\xff\xff\x3f"
    with pytest.raises(ProtocolError, match="no base64"):
        parse_body(body % b"AA\\n", Reading())


def test_the_runs_types_win_where_they_hold_the_values() -> None:
    run = Schema((Field("input_ids", DType.INT64), Field("x", DType.FLOAT32)))
    half = np.array([0x3FC0, 0xC000], "<u2").tobytes()  # 1.5 and -2 as bfloat16
    sample = parse(Reading(schema=run), x=encoded("bfloat16", [2], half))
    assert sample.schema is run
    assert memory_of(sample, "x") == np.array([1.5, -2], "<f4").tobytes()
    as_it_is = Schema((Field("input_ids", DType.INT64), Field("x", DType.BFLOAT16)))
    sample = parse(Reading(schema=as_it_is), x=encoded("bfloat16", [2], half))
    assert sample.schema is as_it_is
    assert memory_of(sample, "x") == half
    whole = Schema((Field("input_ids", DType.INT64), Field("x", DType.INT8)))
    with pytest.raises(ProtocolError, match=r"x\[1\] is 300, which int8"):
        parse(Reading(schema=whole), x=encoded("int16", [2], np.array([1, 300], "<i2").tobytes()))


def test_every_type_has_its_memory() -> None:
    assert {dtype: ELEMENTS[dtype].itemsize for dtype in DType} == {
        dtype: dtype.itemsize for dtype in DType
    }


# -- per sample -----------------------------------------------------------------------------------


def test_a_field_of_as_many_values_as_tokens_can_be_said_to_be_per_sample() -> None:
    sample = parse(per_sample=["box", "reward"], box=[3, 4], reward=1.0, logprobs=[0, 0])
    assert sample.schema.by_name["box"] == Field("box", DType.FLOAT32, False, (2,))
    assert sample.schema.by_name["logprobs"].per_token
    assert parse(box=[3, 4]).schema.by_name["box"].per_token


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (["input_ids"], "one value a token"),
        (["nowhere"], "not among the fields"),
        ([1, 2], "a name in quotes is expected"),
        ("box", "per_sample"),
        (["box", 1], "a name in quotes is expected"),
        (["x"] * 65, "at most 64 items"),
        (["x"] * 300, "more than 256 strings"),
    ],
)
def test_what_cannot_be_per_sample_is_refused(said: object, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        parse(per_sample=said, box=[3, 4])
