"""Values become the types that the run's samples have where they stay what they are."""

from typing import Any

import numpy as np
import pytest

from rollout_dispatcher.errors import SampleRefused
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import DType, Field, Schema
from rollout_workers.producer.encode import EncodedSample, Encoder, RolloutSample
from rollout_workers.producer.to_array import to_array

IDS = Field("input_ids", DType.INT64)


def encoder(*fields: Field) -> Encoder:
    made = Encoder()
    schema = Schema(tuple(sorted((IDS, *fields), key=lambda item: item.name)))
    made.heed(m.SchemaKnown(fields=m.field_headers(schema), set_by="declared by --fields"))
    return made


def encode(made: Encoder, **fields: Any) -> EncodedSample:
    return made.encode(RolloutSample({"input_ids": np.arange(2), **fields}))


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


def test_a_number_a_sample_is_cast_too() -> None:
    name, value = cast(DType.FLOAT32, 1, per_token=False)
    assert (name, str(value)) == ("float32", "1.0")
    with pytest.raises(SampleRefused, match=r"^x is 0.5, which does not fit"):
        cast(DType.INT64, 0.5, per_token=False)


def test_a_field_is_per_sample_where_the_runs_samples_have_it_so() -> None:
    grid = Field("grid", DType.INT64, per_token=False, shape=(3,))
    sample = encode(encoder(grid), grid=[1, 2, 3])
    assert grid in sample.schema.fields


def test_fields_that_the_run_does_not_have_leave_the_others_cast() -> None:
    """The dispatcher refuses the sample, and says which field is too many: that one alone."""
    sample = encode(encoder(Field("x", DType.FLOAT32)), x=[1, 0], more=[1, 2])
    assert Field("x", DType.FLOAT32) in sample.schema.fields
    assert Field("more", DType.INT64) in sample.schema.fields


def test_another_run_may_decide_otherwise() -> None:
    made = encoder(Field("x", DType.FLOAT32))
    made.heed(None)
    assert Field("x", DType.INT64) in encode(made, x=[1, 0]).schema.fields


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ([1, 0], DType.INT64),
        ([1, 2.0], DType.FLOAT32),
        ([0.0, 1.0], DType.FLOAT32),
        ([True, False], DType.BOOL),
        ([True, 2], DType.INT64),
        (np.array([0.0, 1.0]), DType.FLOAT64),
        (np.array([0, 1], np.int16), DType.INT16),
    ],
)
def test_no_value_decides_on_a_type(value: Any, dtype: DType) -> None:
    assert to_array("x", value)[1] is dtype


def test_bfloat16_is_cast_both_ways() -> None:
    torch = pytest.importorskip("torch")
    assert cast(DType.FLOAT32, torch.tensor([0.5, -3.0], dtype=torch.bfloat16))[1] == [0.5, -3.0]
    made = encoder(Field("x", DType.BFLOAT16))
    array = encode(made, x=[0.5, -3]).arrays[1]
    assert torch.from_numpy(array).view(torch.bfloat16).tolist() == [0.5, -3.0]
    with pytest.raises(SampleRefused, match=r"x\[0\] is 0.1"):
        encode(made, x=np.array([0.1, 1], np.float32))
