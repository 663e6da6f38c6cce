"""Balancing a mapping of tensors into chunks, for trainers that have no dispatcher.

Invariant: each row is in exactly one chunk, and concatenating the chunks and indexing with the
inverse restores the original rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollout_dispatcher.balance.cost.models import Quadratic
from rollout_dispatcher.balance.split.karmarkar_karp import UnequalPartitions, karmarkar_karp
from rollout_dispatcher.plan import CostModel, IntArray


def balance_batch(
    mapping: Mapping[str, Any],
    chunks: int,
    *,
    lengths: Any = None,
    cost: CostModel | None = None,
) -> tuple[list[dict[str, Any]], IntArray]:
    """Split the rows of `mapping` into `chunks` parts of nearly equal work; sizes may differ.

    mapping: tensors, arrays or lists with one row a sample. lengths: tokens of each row; without
    it the rows of `attention_mask` are summed. cost: work of a length, by default quadratic.
    Returns the chunks and `inverse`, int64[rows]: the concatenated chunks, indexed with it, are
    the original rows. Raises UnequalPartitions if there are fewer rows than chunks or if values
    differ in their number of rows.
    """
    counts = {name: len(value) for name, value in mapping.items()}
    if len(set(counts.values())) > 1:
        raise UnequalPartitions(f"values differ in their number of rows: {counts}")
    tokens = _lengths(mapping, lengths)
    if counts and len(tokens) != next(iter(counts.values())):
        raise UnequalPartitions(f"{len(tokens)} lengths for rows {counts}")
    if len(tokens) < chunks:
        raise UnequalPartitions(f"{len(tokens)} rows cannot fill {chunks} chunks; use fewer chunks")
    work = (cost or Quadratic())(tokens) + 1.0  # so that rows of length 0 count as rows
    parts = karmarkar_karp(work, chunks, equal_size=False)
    order = np.concatenate([np.array(part, dtype=np.int64) for part in parts])
    inverse = np.empty(len(order), dtype=np.int64)
    inverse[order] = np.arange(len(order))
    return [
        {name: _rows(value, part) for name, value in mapping.items()} for part in parts
    ], inverse


def _lengths(mapping: Mapping[str, Any], lengths: Any) -> IntArray:
    if lengths is None:
        if "attention_mask" not in mapping:
            raise UnequalPartitions(
                "without lengths an `attention_mask` is needed to know how long rows are"
            )
        lengths = mapping["attention_mask"].sum(-1)
    plain = lengths.tolist() if hasattr(lengths, "tolist") else lengths
    return np.asarray(plain, dtype=np.int64)


def _rows(value: Any, part: list[int]) -> Any:
    """Rows of a tensor, an array or a sequence."""
    if isinstance(value, Sequence):
        return [value[i] for i in part]
    return value[part]
