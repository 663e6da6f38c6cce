"""Schemas: where each field of a sample lies, and how two of them differ, in words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.sample import DType, Field, Sample, Schema
from rollout_dispatcher.spans import ALIGNMENT, aligned
from tests.support.schemas import rows, schemas

IDS = Field("input_ids", DType.INT64)
MASK = Field("loss_mask", DType.BOOL)
EMBEDDING = Field("embedding", DType.FLOAT16, per_token=True, shape=(3, 2))
REWARD = Field("reward", DType.FLOAT32, per_token=False)

PIXELS = Field("pixels", DType.UINT8, per_token=False, shape=(3,), ragged=True)
ENV = Field.text("env")


def test_a_worked_example() -> None:
    schema = Schema((IDS, MASK))
    assert schema.slices(5) == [slice(0, 40), slice(40, 45)]
    assert schema.nbytes(5) == 48
    assert schema.names == ("input_ids", "loss_mask")


def test_a_worked_example_of_a_micro_batch() -> None:
    assert Schema((IDS, MASK)).blocks([5, 2]) == ([slice(0, 56), slice(56, 63)], 64)
    assert Schema((REWARD, MASK)).blocks([5, 2, 2]) == ([slice(0, 12), slice(16, 25)], 32)


def test_a_worked_example_of_ragged_fields() -> None:
    schema = Schema((ENV, IDS, PIXELS))
    assert schema.ragged == ("env", "pixels")
    assert schema.slices(2, (5, 3)) == [slice(0, 5), slice(8, 24), slice(24, 33)]
    assert schema.nbytes(2, (5, 3)) == 40
    assert schema.nbytes(2, (0, 0)) == 16
    blocks = schema.blocks([2, 1], [[5, 0], [3, 1]])
    assert blocks == ([slice(0, 5), slice(8, 32), slice(32, 44)], 48)


@given(data=st.data(), schema=schemas(), tokens=st.integers(0, 2**31 - 1))
def test_fields_follow_each_other_aligned_and_fill_the_span(
    data: st.DataObject, schema: Schema, tokens: int
) -> None:
    own, stop = data.draw(rows(schema)), 0
    of_ragged = iter(own)
    for item, cut in zip(schema.fields, schema.slices(tokens, own), strict=True):
        assert cut.start == aligned(stop)
        assert cut.start % ALIGNMENT == 0
        assert cut.stop - cut.start == item.nbytes(tokens, next(of_ragged) if item.ragged else 0)
        stop = cut.stop
    assert schema.nbytes(tokens, own) == aligned(stop)
    assert schema.sizes([tokens] * 2, [[each] * 2 for each in own]) == [aligned(stop)] * 2


def test_a_field_has_its_bytes_by_token_or_by_sample() -> None:
    assert EMBEDDING.nbytes(5) == 5 * 3 * 2 * 2
    assert REWARD.nbytes(5) == REWARD.nbytes(1) == 4
    assert PIXELS.nbytes(5, 2) == PIXELS.nbytes(1, 2) == 6


def test_item_sizes_are_those_of_the_names() -> None:
    sizes = {dtype: dtype.itemsize for dtype in DType}
    assert sizes[DType.BOOL] == 1
    assert all(
        size * 8 == int("".join(char for char in dtype if char.isdigit()))
        for dtype, size in sizes.items()
        if dtype not in (DType.BOOL, DType.STR)
    )


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ((IDS,), "loss_mask is missing (bool[tokens])"),
        (
            (IDS, REWARD, EMBEDDING),
            (
                "loss_mask is missing (bool[tokens]); reward is unexpected (float32 per sample); "
                "embedding is unexpected (float16[tokens, 3, 2])"
            ),
        ),
        ((IDS, Field("loss_mask", DType.INT8)), "loss_mask is int8[tokens], not bool[tokens]"),
        (
            (IDS, Field("loss_mask", DType.BOOL, shape=(2,))),
            "loss_mask is bool[tokens, 2], not bool[tokens]",
        ),
        (
            (IDS, Field("loss_mask", DType.BOOL, per_token=False)),
            "loss_mask is bool per sample, not bool[tokens]",
        ),
        (
            (IDS, MASK, PIXELS, ENV),
            (
                "pixels is unexpected (uint8[rows, 3] per sample); "
                "env is unexpected (str per sample)"
            ),
        ),
        ((MASK, IDS), "its fields come in the order loss_mask, input_ids"),
    ],
)
def test_a_difference_is_told_in_words(other: tuple[Field, ...], words: str) -> None:
    assert Schema((IDS, MASK)).difference(Schema(other)) == words


def test_of_many_differences_a_few_are_told() -> None:
    many = Schema((IDS, *(Field(f"f{number}", DType.INT64) for number in range(20))))
    words = Schema((IDS,)).difference(many)
    assert words.count("unexpected") == 8
    assert words.endswith("; and 12 more")


def test_a_sample_knows_its_bytes_and_does_not_print_them() -> None:
    schema = Schema((IDS,))
    sample = Sample("s", 3, 3, schema, memoryview(bytes(schema.nbytes(3))))
    assert sample.nbytes == 24
    assert "payload" not in repr(sample)
