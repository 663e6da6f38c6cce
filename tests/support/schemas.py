"""Strategies for schemas with fields of every kind, and for the rows that samples have of them."""

from hypothesis import strategies as st

from rollout_dispatcher.sample import DType, Field, Schema

NUMBERS = [dtype for dtype in DType if dtype is not DType.STR]

_shapes = st.lists(st.integers(1, 3), max_size=2).map(tuple)


def fields(names: st.SearchStrategy[str]) -> st.SearchStrategy[Field]:
    """A field per token, per sample, ragged, or of text."""
    dense = st.builds(Field, names, st.sampled_from(NUMBERS), st.booleans(), _shapes)
    ragged = st.builds(
        Field, names, st.sampled_from(NUMBERS), st.just(value=False), _shapes, st.just(value=True)
    )
    return dense | ragged | st.builds(Field.text, names)


def schemas(*first: Field) -> st.SearchStrategy[Schema]:
    """Some fields of any kind, behind these."""
    others = st.lists(
        fields(st.sampled_from("abcdef")),
        min_size=0 if first else 1,
        max_size=5,
        unique_by=lambda item: item.name,
    )
    return others.map(lambda found: Schema((*first, *found)))


def rows(schema: Schema) -> st.SearchStrategy[tuple[int, ...]]:
    """What one sample has of each ragged field."""
    return st.tuples(*[st.integers(0, 9)] * len(schema.ragged))
