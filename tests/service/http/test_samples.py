"""Samples as JSON become the spans that the sample plane carries, or an error that says why."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import SIZE_UNKNOWN, DType, Field, Sample, Schema
from rollout_dispatcher.service.http.samples import read_samples
from rollout_dispatcher.service.http.tensors import Reading
from tests.support.bodies import finish, parse_body
from tests.support.samples import span_of


def parse(group_size: int | None = None, **fields: object) -> Sample:
    ((sample,), _) = parse_body(json.dumps({"fields": fields}).encode(), Reading(group_size))
    return sample


def field_of(sample: Sample, name: str) -> Field:
    return next(item for item in sample.schema.fields if item.name == name)


def values_of(sample: Sample, name: str) -> list[object]:
    at = sample.schema.names.index(name)
    field = sample.schema.fields[at]
    raw = span_of(sample)[sample.schema.slices(sample.tokens, sample.rows)[at]]
    found: list[object] = np.frombuffer(raw, "u1" if field.is_text else str(field.dtype)).tolist()
    return found


def test_a_sample_is_its_fields_in_the_order_of_their_names() -> None:
    sample = parse(reward=0.5, input_ids=[5, 6, 7], loss_mask=[False, True, True], hidden=[[1, 2]])
    assert sample.schema.fields == (
        Field("hidden", DType.FLOAT32, per_token=False, shape=(1, 2)),
        Field("input_ids", DType.INT64),
        Field("loss_mask", DType.BOOL),
        Field("reward", DType.FLOAT32, per_token=False),
    )
    assert (sample.tokens, sample.loss_tokens) == (3, 2)
    assert sample.nbytes == sample.schema.nbytes(3)
    assert values_of(sample, "input_ids") == [5, 6, 7]
    assert values_of(sample, "loss_mask") == [False, True, True]
    assert values_of(sample, "reward") == [0.5]


def test_every_token_that_has_one_before_it_may_count_for_the_loss() -> None:
    assert parse(input_ids=[5, 6, 7]).loss_tokens == 2
    assert parse(input_ids=[5]).loss_tokens == 0
    assert parse(input_ids=[5, 6], loss_mask=[True, True]).loss_tokens == 1
    assert parse(input_ids=[5], loss_mask=[True]).loss_tokens == 0


def test_a_shifted_mask_is_moved_to_the_tokens_that_it_judges() -> None:
    given = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
    text = json.dumps({"fields": given, "loss_mask_shifted": True}).encode()
    (sample,), _, left_out = finish(read_samples(text, Reading()))
    assert values_of(sample, "loss_mask") == [True, False, True]
    assert (sample.loss_tokens, left_out) == (1, 1)


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        ([1, 2], DType.FLOAT32, ()),
        ([1.5, 2], DType.FLOAT32, ()),
        ([True, False], DType.BOOL, ()),
        ([[1, 2, 3], [4, 5, 6]], DType.FLOAT32, (3,)),
        ({"dtype": "float64", "data": [1, 2]}, DType.FLOAT64, ()),
        ({"dtype": "uint8", "data": [255, 0]}, DType.UINT8, ()),
        ({"dtype": "float16", "data": [[1.5], [2]]}, DType.FLOAT16, (1,)),
        ({"dtype": "bool", "data": [0, 1]}, DType.BOOL, ()),
        ({"dtype": "int8", "data": [1.0, -128.0]}, DType.INT8, ()),
    ],
)
def test_numbers_are_float32_booleans_bool_unless_a_type_is_given(
    value: object, dtype: DType, shape: tuple[int, ...]
) -> None:
    assert field_of(parse(input_ids=[1, 2], x=value), "x") == Field("x", dtype, True, shape)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"x": [[1], [2, 3]]}, "fields.x is no tensor"),
        ({"x": None}, "fields.x.* no tensor of numbers"),
        ({"x": [10**30, 1]}, "fields.x.* no tensor of numbers"),
        ({"x": [2**24 + 1, 1]}, r"fields.x\[0\] is 16777217, which float32"),
        ({"x": [1.0, 1e300]}, r"fields.x\[1\] is 1e\+300, which float32"),
        (
            {"x": {"dtype": "uint8", "data": [256, 0]}},
            r"which uint8 \(as it says itself\)",
        ),
        ({"x": {"dtype": "int32", "data": [1.5, 0]}}, r"fields.x\[0\] is 1.5, which int32"),
        ({"x": {"dtype": "bool", "data": [2, 0]}}, r"fields.x\[0\] is 2, which bool"),
        ({"x": {"dtype": "float16", "data": [70000, 0]}}, r"fields.x\[0\] is 70000, which float16"),
        ({"x": {"dtype": "int32", "data": ["12", "7"]}}, "fields.x.* no tensor of numbers"),
        ({"x": {"dtype": "bfloat16", "data": [1, 2]}}, "fields.x.* send float32"),
        ({"x": [[], []]}, r"fields.x has shape \(2, 0\)"),
        ({"x": [[[[[[[[[[1]]]]]]]]], [[[[[[[[[1]]]]]]]]]]}, "fields.x.* at most 8 items"),
        *(({"input_ids": ids}, "input_ids") for ids in (None, [1.5], [[1]], [True], 7, "12")),
        ({"input_ids": {"dtype": "float32"}}, "data"),
        ({"input_ids": [1, -2, -3]}, r"fields.input_ids\[1\] is -2, and token ids"),
        (
            {"input_ids": {"dtype": "int32", "data": [1, -2]}},
            r"input_ids\[1\] is -2, and token ids",
        ),
        # Other numbers would weigh tokens, and not be in the step's totals.
        *(({"loss_mask": it}, "must be zeros and ones") for it in ([0.5, 1.0], [1, 2], [0, -1])),
        *(
            ({"loss_mask": mask}, "loss_mask has shape")
            for mask in ([True], [[True, True]], True, [True, True, True])
        ),
        ({"cu_seqlens": [1, 2]}, "a field may not be called 'cu_seqlens'"),
        ({"loss_weights": [1, 2]}, "a field may not be called 'loss_weights'"),
        # It would be a tensor that nobody asks for, and the sample would have no version or group.
        *(
            ({name: 3}, f"{name} is no field.*beside them")
            for name in ("policy_version", "group_id", "sample_id")
        ),
    ],
    ids=repr,
)
def test_what_is_no_field_is_refused_by_its_name(fields: dict[str, object], words: str) -> None:
    with pytest.raises((ProtocolError, ValidationError), match=words):
        parse(None, **{"input_ids": [1, 2]} | fields)


def test_ids_groups_and_versions_are_taken_over() -> None:
    facts = {"sample_id": "s", "group_id": "g", "group_size": 4, "policy_version": 9}
    facts |= {"staleness_exempt": True}
    ((sample,), named) = parse_body(
        json.dumps({"fields": {"input_ids": [1]}} | facts).encode(), Reading()
    )
    assert (sample.sample_id, sample.group_id, sample.group_size) == ("s", "g", 4)
    assert (sample.policy_version, sample.staleness_exempt, named) == (9, True, True)


def test_samples_without_an_id_get_one_each() -> None:
    samples, named = parse_body(
        json.dumps([{"fields": {"input_ids": [1]}}] * 2).encode(), Reading()
    )
    assert not named
    assert len({sample.sample_id for sample in samples}) == 2


@pytest.mark.parametrize(("default", "size"), [(None, SIZE_UNKNOWN), (8, 8)])
def test_a_group_that_does_not_say_its_size_gets_the_default(
    default: int | None, size: int
) -> None:
    body = json.dumps({"fields": {"input_ids": [1]}, "group_id": "g"}).encode()
    assert parse_body(body, Reading(default))[0][0].group_size == size
    assert parse(default, input_ids=[1]).group_size == 1


def test_lines_may_end_as_they_do_on_windows_and_be_empty() -> None:
    line = json.dumps({"fields": {"input_ids": [1]}}).encode()
    samples, _ = parse_body(b"\r\n".join([line, b"", line, b""]), Reading())
    assert len(samples) == 2


@pytest.mark.parametrize(
    ("name", "value", "dtype"),
    [
        ("position_ids", [0, 1], DType.INT64),
        ("labels", [-100, 7], DType.INT64),
        ("response_mask", [0, 1], DType.BOOL),
        ("loss_mask", [0.0, 1.0], DType.BOOL),
        ("reward", 1, DType.FLOAT32),
        ("logprobs", [-1, 0], DType.FLOAT32),
    ],
)
def test_a_name_decides_on_the_type_and_no_value_does(
    name: str, value: object, dtype: DType
) -> None:
    assert field_of(parse(input_ids=[1, 2], **{name: value}), name).dtype == dtype  # type: ignore[arg-type]


RUN = Schema(
    (
        Field("advantage", DType.FLOAT64),
        Field("box", DType.INT32, per_token=False, shape=(2,)),
        Field("input_ids", DType.INT32),
        Field("loss_mask", DType.INT64),
    )
)


def of_the_run(**fields: object) -> Sample:
    ((sample,), _) = parse_body(json.dumps({"fields": fields}).encode(), Reading(schema=RUN))
    return sample


def test_a_field_has_the_type_that_the_runs_samples_have() -> None:
    typed = {"dtype": "uint8", "data": [1, 2]}
    sample = of_the_run(input_ids=[5, 6], loss_mask=[False, True], advantage=[0.1, 1], box=typed)
    assert sample.schema is RUN
    assert values_of(sample, "loss_mask") == [0, 1]
    assert values_of(sample, "advantage") == [0.1, 1.0]
    assert values_of(sample, "box") == [1, 2], "of two values, though there are two tokens"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input_ids": [1, 2**31]}, r"input_ids\[1\] is 2147483648, which int32"),
        ({"input_ids": [1], "box": [0.5, 1]}, r"box\[0\] is 0.5, which int32 \(as the run's"),
    ],
)
def test_a_value_that_the_runs_type_does_not_hold_is_refused(
    fields: dict[str, object], words: str
) -> None:
    with pytest.raises(ProtocolError, match=words):
        of_the_run(**fields)


IMAGES = Schema(
    (
        Field.text("env"),
        Field("grid", DType.INT64, per_token=False, shape=(3,), ragged=True),
        Field("input_ids", DType.INT64),
    )
)


def of_images(**fields: object) -> Sample:
    body = json.dumps({"fields": {"input_ids": [1, 2]} | fields}).encode()
    ((sample,), _) = parse_body(body, Reading(schema=IMAGES))
    return sample


@pytest.mark.parametrize("grid", [[], [[1, 2, 3]], [[1, 2, 3], [4, 5, 6]], [[7, 8, 9]] * 5])
@pytest.mark.parametrize("env", ["", "ab", "math/gsm8k", "größe"])
def test_declared_ragged_fields_have_rows_of_their_own(grid: list[list[int]], env: str) -> None:
    sample = of_images(grid=grid, env=env)
    assert sample.schema is IMAGES
    assert sample.rows == (len(env.encode()), len(grid))
    assert values_of(sample, "grid") == [value for row in grid for value in row]
    assert bytes(values_of(sample, "env")).decode() == env  # type: ignore[arg-type]
    assert sample.nbytes == IMAGES.nbytes(2, sample.rows)


def test_a_text_may_have_any_fields_name() -> None:
    sample = parse(input_ids=[1, 2], base64='a \\ " text')
    assert field_of(sample, "base64") == Field.text("base64")
    assert bytes(values_of(sample, "base64")) == b'a \\ " text'  # type: ignore[arg-type]


def test_undeclared_a_string_is_text_and_a_tensor_is_ragged_if_it_says_so() -> None:
    crops = {"dtype": "uint8", "ragged": True, "data": [[1, 2], [3, 4]]}
    sample = parse(input_ids=[1, 2], env="ab", crops=crops, name={"dtype": "str", "data": "x"})
    assert field_of(sample, "env") == Field.text("env")
    assert field_of(sample, "name") == Field.text("name")
    assert field_of(sample, "crops") == Field("crops", DType.UINT8, False, (2,), ragged=True)
    assert dict(zip(sample.schema.ragged, sample.rows, strict=True)) == {
        "crops": 2, "env": 2, "name": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"grid": [], "env": [1, 2]}, "fields.env is no string, and has to be"),
        ({"grid": "abc", "env": "x"}, r"fields.grid is a string, .* as int64\[rows, 3\]"),
        ({"grid": 3, "env": "x"}, "fields.grid is ragged, and one number has no rows"),
        ({"grid": [[0.5, 1, 1]], "env": "x"}, r"grid\[0, 0\] is 0.5, which int64"),
        ({"env": {"dtype": "str", "data": [1]}}, "fields.env is no string"),
        ({"x": {"dtype": "int8", "data": "abc"}}, "fields.x is no tensor of numbers"),
        ({"x": {"dtype": "str", "data": 5}}, "fields.x is no string"),
        ({"x_cu_rows": [1, 2]}, "may not be called"),
        ({"input_ids": {"dtype": "int64", "ragged": True, "data": [1]}}, "input_ids is a list of"),
        ({"input_ids": "ab"}, r"input_ids is a string, .* as int64\[tokens\]"),
        ({"loss_mask": "\u0001\u0001"}, "loss_mask is a list of numbers, one a token"),
    ],
)
def test_what_is_no_ragged_field_is_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        of_images(**fields)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_refused_unless_allowed(text: str) -> None:
    body = b'{"fields": {"input_ids": [1, 2], "logprobs": [-0.5, %s]}}' % text.encode()
    with pytest.raises(ProtocolError, match=r"fields.logprobs holds .*--set allow-non-finite=on"):
        parse_body(body, Reading())
    ((sample,), _) = parse_body(body, Reading(allow_non_finite=True))
    assert not np.isfinite(values_of(sample, "logprobs")[1])  # type: ignore[call-overload]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=12,
)


@given(fields=st.dictionaries(st.text(max_size=4) | st.just("input_ids"), json_values, max_size=4))
def test_whatever_is_accepted_can_be_told_to_a_rank(fields: dict[str, object]) -> None:
    body = json.dumps({"fields": {"input_ids": [1, 2]} | fields}).encode()
    try:
        samples, _ = parse_body(body, Reading())
    except (ProtocolError, ValidationError):
        return
    for sample in samples:
        assert sample.nbytes == sample.schema.nbytes(sample.tokens, sample.rows)
        m.field_headers(sample.schema)
        m.MicroBatch(
            step=0,
            index=0,
            tokens=[sample.tokens],
            loss_tokens=[sample.loss_tokens],
            sample_ids=[sample.sample_id],
        )


@pytest.mark.parametrize("size", [4, "at-close"])
def test_a_size_without_a_group_is_refused(size: object) -> None:
    body = json.dumps({"fields": {"input_ids": [1]}, "group_size": size}).encode()
    with pytest.raises(ProtocolError, match=f"group_size is {size}, and no group_id says"):
        parse_body(body, Reading())
