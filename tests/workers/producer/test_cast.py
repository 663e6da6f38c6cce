"""Values become the types that the run's samples have where they stay what they are."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from rollout_dispatcher.errors import ProtocolError, SampleRefused
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import DType, Field, Schema
from rollout_dispatcher.service.http.tensors import Reading
from rollout_workers.producer.encode import EncodedSample, Encoder, RolloutSample
from rollout_workers.producer.layout import to_array
from rollout_workers.producer.pushes import payload
from tests.support.bodies import parse_body
from tests.support.samples import span_of

IDS = Field("input_ids", DType.INT64)


def encoder(*fields: Field) -> Encoder:
    made = Encoder(allow_non_finite=True)
    schema = Schema(tuple(sorted((IDS, *fields), key=lambda item: item.name)))
    made.on_schema(m.SchemaKnown(fields=m.field_headers(schema), set_by="declared by --fields"))
    return made


def encode(made: Encoder, **fields: Any) -> EncodedSample:
    return made.encode([RolloutSample({"input_ids": np.arange(2), **fields})])[0]


def cast(dtype: DType, value: Any, *, per_token: bool = True) -> tuple[str, list[Any]]:
    sample = encode(encoder(Field("x", dtype, per_token)), x=value)
    array = sample.arrays[sample.schema.names.index("x")]
    return array.dtype.name, array.tolist()


@pytest.mark.parametrize(
    ("dtype", "value", "held"),
    [
        (DType.FLOAT32, [1, 0], [1.0, 0.0]),
        (DType.FLOAT32, np.array([1, 2**24]), [1.0, 2.0**24]),
        (DType.FLOAT32, np.array([0.1, 1.0]), [float(np.float32(0.1)), 1.0]),
        (DType.FLOAT32, [True, False], [1.0, 0.0]),
        (DType.FLOAT64, [0.1, 1], [0.1, 1.0]),
        (DType.BOOL, [0, 1], [False, True]),
        (DType.BOOL, np.array([0.0, 1.0], np.float32), [False, True]),
        (DType.INT32, np.array([-(2**31), 2**31 - 1]), [-(2**31), 2**31 - 1]),
        (DType.UINT8, [0, 255], [0, 255]),
        (DType.FLOAT16, np.array([0.5, np.nan], np.float32)[:2], None),
        (DType.FLOAT16, [0.1, 1], [float(np.float16(0.1)), 1.0]),
        (DType.FLOAT64, [16777217, 0], [16777217.0, 0.0]),
    ],
)
def test_what_stays_the_same_number_is_cast(dtype: DType, value: Any, held: Any) -> None:
    name, found = cast(dtype, value)
    assert name == dtype
    assert held is None or found == held


@pytest.mark.parametrize(
    ("dtype", "value", "words"),
    [
        (DType.FLOAT32, [1, 2**24 + 1], r"x\[1\] is 16777217, which does not fit"),
        (DType.FLOAT32, np.array([0.0, 1e300]), r"x\[1\] is 1e\+300"),
        (DType.FLOAT64, np.array([0, 2**63 - 1]), r"x\[1\] is 9223372036854775807"),
        (DType.BOOL, [1, 2], r"x\[1\] is 2"),
        (DType.INT32, [0, 2**31], r"x\[1\] is 2147483648"),
        (DType.UINT8, [0, -1], r"x\[1\] is -1"),
        (DType.INT64, [1.0, 2.0], r"x\[0\] is 1.0.*floats never become integers"),
        (DType.FLOAT16, np.array([0.5, 0.1], np.float32), r"x\[1\] is 0.1"),
    ],
)
def test_what_does_not_is_refused_by_field_value_and_index(
    dtype: DType, value: Any, words: str
) -> None:
    with pytest.raises(SampleRefused, match=words) as caught:
        cast(dtype, value)
    assert f"as {dtype} (declared by --fields)" in str(caught.value)


def test_a_field_is_per_sample_where_the_runs_samples_have_it_so() -> None:
    grid = Field("grid", DType.INT64, per_token=False, shape=(3,))
    sample = encode(encoder(grid), grid=[1, 2, 3])
    assert grid in sample.schema.fields


def test_being_told_while_another_thread_encodes_is_not_forgotten() -> None:
    made, known = Encoder(), Schema((IDS, Field("x", DType.FLOAT64)))

    class Slow(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            made.on_schema(m.SchemaKnown(fields=m.field_headers(known), set_by="the first step"))
            return super().__getitem__(name)

    fields = {"input_ids": [1, 2], "x": np.zeros(2, np.float32)}
    assert made.encode([RolloutSample(Slow(fields))])[0].schema != known
    assert made.encode([RolloutSample(fields)])[0].schema == known


@pytest.mark.parametrize("value", [np.array([0.0, 1.0]), np.array([0, 1], np.int16), np.int8(1)])
@pytest.mark.parametrize("name", ["x", "x_ids", "x_mask"])
def test_arrays_keep_their_type(name: str, value: Any) -> None:
    assert to_array(name, value)[1] == value.dtype.name


NUMBERS = [1, 0.5, [1, 0], [0, 1.0], [True, 1], True, [True, False]]


@pytest.mark.parametrize("name", ["reward", "labels", "x_ids", "x_mask", "logprobs"])
@pytest.mark.parametrize("value", NUMBERS, ids=str)
def test_numbers_without_a_type_have_the_same_as_over_http(name: str, value: Any) -> None:
    """One rule: a run that is fed from both sides has one schema."""
    body = json.dumps({"fields": {"input_ids": [5, 6], name: value}}).encode()
    try:
        ((over_http,), _) = parse_body(body, Reading())
    except ProtocolError:
        with pytest.raises(SampleRefused, match="does not fit: Python's numbers are"):
            Encoder().encode([RolloutSample({"input_ids": [5, 6], name: value})])
        return
    if name.endswith(("_ids", "labels")) and value == [0, 1.0]:
        return  # over HTTP 1.0 is 1, as most writers of JSON have but one kind of number
    sample = Encoder().encode([RolloutSample({"input_ids": [5, 6], name: value})])[0]
    assert sample.schema == over_http.schema
    assert b"".join(payload([sample])) == span_of(over_http)


@pytest.mark.parametrize(
    ("value", "shown"), [([0.5, 1e300], "1e.300"), ([0, 2**24 + 1], "16777217")]
)
def test_a_number_that_its_fields_type_does_not_hold_is_refused_and_told_what_to_do(
    value: Any, shown: str
) -> None:
    with pytest.raises(
        SampleRefused, match=rf"x\[1\] is {shown}, .* are float32 in x; arrays .* keep"
    ):
        to_array("x", value)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(DType.BFLOAT16, [0.5, 1.0]), (DType.FLOAT32, torch.ones(2, dtype=torch.bfloat16))],
)
def test_numpy_has_no_bfloat16_so_nothing_is_cast_from_or_to_it(dtype: DType, value: Any) -> None:
    with pytest.raises(SampleRefused, match=f"x is .*; the run's samples have it as {dtype}"):
        cast(dtype, value)
