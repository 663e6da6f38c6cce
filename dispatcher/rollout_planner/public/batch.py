"""Splitting a batch of tensors into chunks of nearly equal work, whatever it is made of.

Invariant: each row is in exactly one chunk, and concatenating the chunks and indexing with the
inverse restores the original rows. Values are known by what they can do, so that nothing here
imports torch: a jagged tensor is one that says `is_nested`, a TensorDict has a shape of a batch.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollout_planner.errors import UnequalPartitions
from rollout_planner.public.arguments import as_lengths, costs_of
from rollout_planner.public.partition import balanced_partition
from rollout_planner.types import CostModel, IntArray

_Offsets = dict[tuple[int, int], Any]


def balance_batch(
    mapping: Mapping[str, Any],
    chunks: int,
    *,
    lengths: Any = None,
    cost: CostModel | str | None = None,
    equal_size: bool = False,
    meta: Sequence[str] = (),
) -> tuple[list[Any], IntArray]:
    """Split the rows of `mapping` into `chunks` parts of nearly equal work.

    mapping: a dict of tensors (dense or jagged), arrays and lists with one row a sample, or a
    TensorDict; chunks are of its kind. Texts, numbers, tensors without dimensions and whatever
    `meta` names concern the batch as a whole and are in every chunk as they are; a dict inside is
    split as the one around it. Of a TensorDict `meta` can name no rows, as it holds as many of each
    value as its batch has, and so do its chunks. lengths: tokens of each row; without it the rows
    of `attention_mask` are summed, or those of jagged `input_ids` measured. cost: work of a length,
    by default quadratic. equal_size: as many rows in every chunk.

    Returns the chunks and `inverse`, int64[rows]: the concatenated chunks, indexed with it, are the
    original rows. Raises UnequalPartitions (a ValueError) if there are fewer rows than chunks, if
    equal sizes cannot be, if values differ in their number of rows, if `meta` names some of a
    TensorDict, or without any mapping.
    """
    if not hasattr(mapping, "items"):
        raise UnequalPartitions(
            f"the batch is no mapping of names to rows but {type(mapping).__name__}; "
            "balanced_partition splits a list of lengths"
        )
    tokens = _lengths(mapping, lengths)
    _check_rows(mapping, len(tokens), set(meta))
    parts = balanced_partition(costs_of(tokens, cost), chunks, equal_size=equal_size)
    order = np.array([row for part in parts for row in part], dtype=np.int64)
    inverse = np.empty(len(order), dtype=np.int64)
    inverse[order] = np.arange(len(order))
    return [_chunk(mapping, part, set(meta), {}) for part in parts], inverse


def _lengths(mapping: Mapping[str, Any], lengths: Any) -> IntArray:
    if lengths is not None:
        return as_lengths(lengths)
    if "attention_mask" in mapping and not _is_jagged(mapping["attention_mask"]):
        mask = mapping["attention_mask"]
        return as_lengths(mask.sum(-1) if hasattr(mask, "sum") else [sum(row) for row in mask])
    if "input_ids" in mapping and _is_jagged(mapping["input_ids"]):
        return as_lengths([len(row) for row in mapping["input_ids"].unbind()])
    raise UnequalPartitions(
        "without lengths an `attention_mask`, or jagged `input_ids`, is needed to know how long "
        "rows are"
    )


def _check_rows(mapping: Mapping[str, Any], rows: int, meta: set[str]) -> None:
    """Raise UnequalPartitions where a value has another number of rows."""
    for name, value in mapping.items():
        if name in meta:
            if _is_tensordict(mapping) and not _is_non_tensor(value):
                raise UnequalPartitions(
                    f"{name!r} is named in meta=, and each chunk of a TensorDict has as many rows "
                    "of all its values; wrap it in NonTensorData, take it out, or pass a dict"
                )
        elif isinstance(value, Mapping):
            _check_rows(value, rows, meta)
        elif _has_rows(value) and (held := _num_rows(value)) != rows:
            raise UnequalPartitions(
                f"{name!r} differs in its number of rows, {held}, from the {rows} lengths; "
                "name it in meta= if it is not about rows"
            )


def _has_rows(value: Any) -> bool:
    """Whether it is a tensor, an array or a list, and not of no dimension."""
    if isinstance(value, str | bytes) or not hasattr(value, "__getitem__"):
        return False
    if _is_jagged(value):  # first of all, as one without the jagged layout has no shape to ask for
        return True
    if hasattr(value, "shape"):
        return len(value.shape) > 0
    return hasattr(value, "__len__")


def _num_rows(value: Any) -> int:
    return int(value.size(0)) if _is_jagged(value) else len(value)


def _is_jagged(value: Any) -> bool:
    return bool(getattr(value, "is_nested", False))


def _is_tensordict(mapping: Any) -> bool:
    return isinstance(getattr(mapping, "batch_size", None), tuple)


def _is_non_tensor(value: Any) -> bool:
    """Whether a TensorDict has it once for all rows."""
    return isinstance(value, sys.modules["tensordict"].NonTensorData)


def _has_jagged(mapping: Mapping[str, Any]) -> bool:
    """Whether there is a jagged tensor in it, or in a mapping within."""
    return any(
        _has_jagged(value) if isinstance(value, Mapping) else _is_jagged(value)
        for value in mapping.values()
    )


def _chunk(mapping: Any, part: list[int], meta: set[str], offsets: _Offsets) -> Any:
    """These rows of every value, in a mapping of the same kind.

    offsets: those of jagged tensors here, by the identities of the offsets and lengths before.
    """
    is_tensordict = _is_tensordict(mapping)
    if is_tensordict and not _has_jagged(mapping):
        return mapping[part]
    as_they_are = set() if is_tensordict else meta
    found = {
        name: value if name in as_they_are else _rows(value, part, meta, offsets)
        for name, value in mapping.items()
    }
    if is_tensordict:  # indexing as a whole is not for jagged tensors
        sizes = [len(part), *mapping.batch_size[1:]]
        return type(mapping)(found, sizes, device=mapping.device, names=mapping.names)
    return found


def _rows(value: Any, part: list[int], meta: set[str], offsets: _Offsets) -> Any:
    if isinstance(value, Mapping):
        return _chunk(value, part, meta, offsets)
    if not _has_rows(value):
        return value
    if _is_jagged(value):
        return _jagged_rows(value, part, offsets)
    if isinstance(value, Sequence):
        return [value[i] for i in part]
    return value[part]


def _jagged_rows(value: Any, part: list[int], offsets: _Offsets) -> Any:
    """A jagged tensor of these rows; which dimension is ragged stays as it was.

    Those that had the same offsets have so again, without which torch adds or multiplies none.
    """
    # Who has such a tensor has loaded the library that makes one.
    nested = sys.modules["torch"].nested
    rows = value.unbind()
    if "jagged" not in str(value.layout):  # the other layout has no shape
        return nested.as_nested_tensor([rows[i] for i in part], layout=value.layout)
    ragged = next(at for at, size in enumerate(value.shape) if not isinstance(size, int))
    picked = [rows[i].transpose(0, ragged - 1) for i in part]
    found = nested.as_nested_tensor(picked, layout=value.layout)
    before = id(value.offsets()), id(value.lengths())  # lengths: of rows with holes between them
    known = offsets.setdefault(before, found.offsets())
    if known is not found.offsets():
        found = nested.nested_tensor_from_jagged(found.values(), known)
    return found if ragged == 1 else found.transpose(1, ragged)
