"""How the tensors of a micro-batch are laid out: packed, padded or jagged."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor


class Collation(StrEnum):
    """How the tensors of a micro-batch are laid out."""

    PACKED = "packed"
    PADDED = "padded"
    JAGGED = "jagged"


def bounds(tokens: Sequence[int]) -> list[int]:
    """Where each sample starts, and where the last one ends: [n + 1]."""
    return [0, *accumulate(tokens)]


Tensors = dict[str, Tensor]


def _packed(per_token: Tensors, per_sample: Tensors, tokens: list[int]) -> Tensors:
    starts = torch.from_numpy(np.array(bounds(tokens), np.int32))
    return {**per_token, "cu_seqlens": starts, **per_sample}


def _padded(per_token: Tensors, per_sample: Tensors, tokens: list[int]) -> Tensors:
    lengths, longest = torch.tensor(tokens), max(tokens)
    mask = torch.arange(longest) < lengths[:, None]
    found = {}
    for name, values in per_token.items():
        found[name] = values.new_zeros((len(tokens), longest, *values.shape[1:]))
        found[name][mask] = values
    return {
        "attention_mask": mask,
        **found,
        **{name: values.clone() for name, values in per_sample.items()},
    }


def _jagged(per_token: Tensors, per_sample: Tensors, tokens: list[int]) -> Tensors:
    offsets = torch.tensor(bounds(tokens))
    found = {
        name: torch.nested.nested_tensor_from_jagged(
            values, offsets, min_seqlen=min(tokens), max_seqlen=max(tokens)
        )
        for name, values in per_token.items()
    }
    return {**found, "cu_seqlens": offsets.int(), **per_sample}


LAYOUTS: dict[Collation, Callable[[Tensors, Tensors, list[int]], Tensors]] = {
    Collation.PACKED: _packed,
    Collation.PADDED: _padded,
    Collation.JAGGED: _jagged,
}
