"""How the tensors of a micro-batch are laid out: packed, padded or jagged.

Tokens of all samples, end to end and nothing between them, are *dense*, as received. A `Placement`
has the place of each of them in a tensor with padding; `lay_out` makes every layout of dense
tensors, and `dense` the opposite, so each can be made of each.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_planner.types import IntArray, round_up


class Collation(StrEnum):
    """How the tensors of a micro-batch are laid out."""

    PACKED = "packed"
    PADDED = "padded"
    JAGGED = "jagged"


class Side(StrEnum):
    """At which end of a sample its padding is."""

    RIGHT = "right"
    LEFT = "left"


def bounds(tokens: Sequence[int]) -> list[int]:
    """Where each sample starts, and where the last one ends: [n + 1]."""
    return [0, *accumulate(tokens)]


Tensors = dict[str, Tensor]

CPU = torch.device("cpu")
LABELS = "labels"
#: The label that losses of Hugging Face models, and torch's cross entropy, leave out.
IGNORED = -100
#: The tensors that a layout has of its own.
OF_LAYOUT = frozenset({"cu_seqlens", "cu_seqlens_unpadded", "attention_mask"})


class Placement(NamedTuple):
    """Where the tokens of each sample lie among the rows of a per-token tensor.

    Each sample has a segment of rows, which begins, or on the left side ends, with its tokens; the
    other rows are padding. A padded tensor [n, width, ...] counts as its n * width rows.

    tokens: of each sample, [n]. bounds: where each segment starts, and where the last one ends,
    [n + 1], or [n + 2] with a last segment that is nobody's.
    has_padding: whether it may have padding by its options; a packed one then has
    `cu_seqlens_unpadded`.
    """

    layout: Collation
    tokens: tuple[int, ...]
    bounds: tuple[int, ...]
    side: Side = Side.RIGHT
    has_padding: bool = False

    @property
    def rows(self) -> int:
        """Tokens and padding together."""
        return self.bounds[-1]

    @property
    def is_dense(self) -> bool:
        """Whether there is no padding at all."""
        return self.rows == sum(self.tokens)

    @property
    def longest(self) -> int:
        """Rows of the longest segment."""
        return max(end - start for start, end in pairwise(self.bounds))

    def is_of(self, tensor: Tensor) -> bool:
        """Whether a tensor has the shape of a per-token one."""
        match self.layout:
            case Collation.PACKED:
                return not tensor.is_nested and tensor.shape[:1] == (self.rows,)
            case Collation.PADDED:
                return tensor.shape[:2] == (len(self.tokens), self.longest)
            case Collation.JAGGED:
                return tensor.is_nested

    @property
    def starts(self) -> IntArray:
        """The row of each sample's first token, int64[n]."""
        n = len(self.tokens)
        found: IntArray = np.array(self.bounds[:n])
        if self.side is Side.LEFT:
            found = np.array(self.bounds[1 : n + 1]) - np.array(self.tokens)
        return found

    @property
    def rows_of_tokens(self) -> IntArray:
        """The row of each token, int64[tokens]."""
        sizes = np.array(self.tokens)
        ends = np.cumsum(sizes)
        found: IntArray = np.repeat(self.starts - ends + sizes, sizes) + np.arange(ends[-1])
        return found


def checked(multiple_of: int) -> int:
    """The same; raises ValueError below 1."""
    if multiple_of < 1:
        raise ValueError(f"multiple_of is {multiple_of}; it must be at least 1")
    return multiple_of


def packed(tokens: list[int], multiple: int = 1, length: int | None = None) -> Placement:
    """Segments end to end, each rounded up to the multiple; then one of padding, up to `length`.

    Example: tokens 3 and 2, multiple 4, length 12: segments of 4, 4 and 4 rows. `length` is not
    below what the segments need.
    """
    sizes = tokens if multiple == 1 else [round_up(size, multiple) for size in tokens]
    edges = bounds(sizes)
    if length is not None and length > edges[-1]:
        edges.append(length)
    asked = multiple > 1 or length is not None
    return Placement(Collation.PACKED, tuple(tokens), tuple(edges), has_padding=asked)


def padded(tokens: list[int], multiple: int = 1, side: Side = Side.RIGHT) -> Placement:
    """A row of a matrix for each sample, as wide as the longest rounded up to the multiple."""
    width = round_up(max(tokens), multiple)
    edges = range(0, width * (len(tokens) + 1), width)
    return Placement(Collation.PADDED, tuple(tokens), tuple(edges), side, has_padding=True)


def jagged(tokens: list[int]) -> Placement:
    """Nested tensors; they know no padding."""
    return Placement(Collation.JAGGED, tuple(tokens), tuple(bounds(tokens)))


def lay_out(
    per_token: Mapping[str, Tensor], placement: Placement, device: torch.device = CPU
) -> Tensors:
    """Dense tensors [tokens, ...] in another layout, and the tensors that it has of its own.

    device: where all of them are; there may be none that is per token.
    """
    match placement.layout:
        case Collation.PACKED:
            return _packed(per_token, placement, device)
        case Collation.PADDED:
            return _padded(per_token, placement, device)
        case Collation.JAGGED:
            return _jagged(per_token, placement, device)


def dense(values: Tensor, placement: Placement) -> Tensor:
    """The opposite for one tensor: its tokens end to end, [tokens, ...]."""
    if placement.layout is Collation.JAGGED:
        return values.values()
    flat = as_rows(values, placement)
    if placement.is_dense:
        return flat
    return flat.index_select(0, index(placement.rows_of_tokens, values))


def as_rows(values: Tensor, placement: Placement) -> Tensor:
    """A packed or padded tensor as [rows, ...]."""
    return values.flatten(0, 1) if placement.layout is Collation.PADDED else values


def index(rows: IntArray, like: Tensor) -> Tensor:
    """Rows as a tensor where another one is."""
    return torch.from_numpy(rows).to(like.device)


def _packed(per_token: Mapping[str, Tensor], placement: Placement, device: torch.device) -> Tensors:
    own = {"cu_seqlens": _edges(placement.bounds, device)}
    if not placement.has_padding:
        return {**per_token, **own}
    found = _spread(per_token, placement)
    if not placement.is_dense and "position_ids" in found:
        _count_on(found["position_ids"], placement)
    real = (*placement.tokens, 0)[: len(placement.bounds) - 1]
    own["cu_seqlens_unpadded"] = _edges(bounds(real), device)
    return found | own


def _edges(rows: Sequence[int], device: torch.device) -> Tensor:
    found = torch.from_numpy(np.array(rows, np.int32))
    return found if device is CPU else found.to(device)


def _padded(per_token: Mapping[str, Tensor], placement: Placement, device: torch.device) -> Tensors:
    mask = torch.ones(sum(placement.tokens), dtype=torch.bool, device=device)
    shape = (len(placement.tokens), placement.longest)
    found = _spread({"attention_mask": mask, **per_token}, placement, copy=True)
    return {name: rows.view(*shape, *rows.shape[1:]) for name, rows in found.items()}


def _spread(
    per_token: Mapping[str, Tensor], placement: Placement, *, copy: bool = False
) -> Tensors:
    """Rows of padding with the tokens in their places; the very tensors where there is none."""
    if placement.is_dense:
        return {name: values.clone() if copy else values for name, values in per_token.items()}
    rows = placement.rows_of_tokens
    return {
        name: _padding(name, values, placement.rows).index_copy_(0, index(rows, values), values)
        for name, values in per_token.items()
    }


def _padding(name: str, like: Tensor, rows: int) -> Tensor:
    """Rows of zeros; of labels, rows that no loss counts."""
    padding = like.new_zeros((rows, *like.shape[1:]))
    is_label = name == LABELS and like.dtype.is_signed and not like.is_floating_point()
    return padding.fill_(IGNORED) if is_label else padding


def _count_on(positions: Tensor, placement: Placement) -> None:
    """Positions of padding go on where its sample ends; those of the last segment start at 0.

    So every segment is one sequence, also for models that find sequences by positions alone.
    """
    edges = np.array(placement.bounds)
    tokens = np.array((*placement.tokens, 0)[: len(edges) - 1])
    ends, sizes = edges[:-1] + tokens, np.diff(edges) - tokens
    count = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    ahead = index(count + 1, positions).to(positions.dtype)
    ahead = ahead.reshape(-1, *[1] * (positions.dim() - 1))
    last = index(np.repeat(ends - 1, sizes), positions)
    positions[index(np.repeat(ends, sizes) + count, positions)] = positions[last] + ahead
    if len(tokens) > len(placement.tokens):
        positions[edges[-2] :] = ahead[-sizes[-1] :] - 1


def _jagged(per_token: Mapping[str, Tensor], placement: Placement, device: torch.device) -> Tensors:
    edges = torch.tensor(placement.bounds, device=device)
    shortest, longest = min(placement.tokens), max(placement.tokens)
    found = {
        name: torch.nested.nested_tensor_from_jagged(
            values, edges, min_seqlen=shortest, max_seqlen=longest
        )
        for name, values in per_token.items()
    }
    return {**found, "cu_seqlens": edges.int()}
