"""Blocks: micro-batches that several DP ranks train together, each on a slice of every sample.

A sample is padded to 2 * k pieces of one length for a block of k ranks, of which each rank has two;
`rollout_dispatcher.protocol.slices` says which.

Invariant: each row of the padded samples is on one rank of the block, and all ranks have as many.
A row predicts the next token of its sample, which may be on another rank: so what the loss needs of
that token comes with the row, in `next_NAME` beside NAME.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_gather, all_reduce

from rollout_dispatcher.errors import ConfigError, ProtocolError
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.slices import Slicing
from rollout_workers.micro_batch.layouts import LABELS, Placement, Tensors, bounds, packed
from rollout_workers.process_group import Place, initialised

if TYPE_CHECKING:
    from rollout_planner.types import IntArray
    from rollout_workers.micro_batch.micro_batch import MicroBatch


class ContextBlock(NamedTuple):
    """The ranks that train a micro-batch together: their number, this one's place, their group."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    slicing: Slicing = Slicing.ZIGZAG

    def rows_of(self, bounds: Sequence[int], rank: int) -> "IntArray":
        """The rows of the padded samples, which begin and end there, that a rank has."""
        found, pieces = list["IntArray"](), self.slicing.pieces_of(rank, self.size)
        for start, end in pairwise(bounds):
            piece = (end - start) // (2 * self.size)
            found += [start + at * piece + np.arange(piece) for at in pieces]
        return np.concatenate(found)

    def order(self, bounds: Sequence[int]) -> "IntArray":
        """The same of all ranks, one after the other."""
        return np.concatenate([self.rows_of(bounds, rank) for rank in range(self.size)])


ALONE = ContextBlock()


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks that a rank may be in. groups: by their number of ranks."""

    groups: Mapping[int, dist.ProcessGroup]
    slicing: Slicing

    def block(self, size: int, rank: int) -> ContextBlock:
        """That of a micro-batch."""
        return ContextBlock(size, rank, self.groups[size], self.slicing) if size > 1 else ALONE


def make_blocks(
    place: Place, dp_ranks: Sequence[int] | None, max_split: int, slicing: Slicing
) -> Blocks:
    """Process groups of this rank with its neighbours: of 2, of 4, and so on; a collective.

    A rank beyond the last whole block of a size is in none of it. dp_ranks: global ranks of the DP
    ranks; None: as they are. Raises ConfigError where there is nothing to make them of.
    """
    if max_split < 1 or max_split & (max_split - 1):
        raise ConfigError(f"max_split is {max_split}; DP ranks share a sample by 2, 4, 8 ...")
    ranks = list(range(place.dp_size) if dp_ranks is None else dp_ranks)
    if not initialised():
        raise ConfigError(
            f"max_split={max_split} has DP ranks train samples together, and there is no process "
            "group: call torch.distributed.init_process_group() before the stream is made"
        )
    if dp_ranks is None and Place(dist.get_rank(), dist.get_world_size()) != place:
        raise ConfigError(
            f"max_split={max_split} makes groups of the DP ranks, and this is DP rank "
            f"{place.dp_rank} of {place.dp_size}, but rank {dist.get_rank()} of "
            f"{dist.get_world_size()} in the default process group; pass process_group= with the "
            "DP ranks in their order, or mesh="
        )
    if ranks != sorted(ranks):
        raise ConfigError(
            f"max_split={max_split} needs DP ranks in the order of their global ranks, and these "
            f"are {ranks}; order the mesh so"
        )
    groups, size = {}, 2
    while size <= max_split:
        first = place.dp_rank - place.dp_rank % size
        if first + size <= place.dp_size:
            own = ranks[first : first + size]
            groups[size] = dist.new_group(own, use_local_synchronization=True)
        size *= 2
    return Blocks(groups, slicing)


# -- for collating ---------------------------------------------------------------------------------


def widened(
    per_token: Tensors, header: m.MicroBatch, block: ContextBlock, multiple: int
) -> Tensors:
    """The same with rows of zeros for the tokens that this rank does not have.

    Raises ProtocolError where it has other tokens than those of its pieces.
    """
    if header.ranges is None:
        return per_token
    size, rank = block.size, block.rank
    needed = [block.slicing.ranges(each, multiple, rank, size) for each in header.tokens]
    if header.ranges != needed:
        raise ProtocolError(
            f"micro-batch {header.index} of step {header.step} has tokens {header.ranges} of its "
            f"samples, and rank {rank} of {size} needs {needed}; was the dispatcher started again "
            "with another --set sample-length-multiple?"
        )
    starts = bounds(header.tokens)
    sent = [
        np.arange(first + start, first + stop)
        for first, own in zip(starts[:-1], needed, strict=True)
        for start, stop in own
    ]
    rows = torch.from_numpy(np.concatenate([np.arange(0), *sent]))
    return {
        name: values.new_zeros((starts[-1], *values.shape[1:])).index_copy_(0, rows, values)
        for name, values in per_token.items()
    }


def with_next(per_token: Tensors, tokens: Sequence[int]) -> Tensors:
    """The same with `next_NAME` beside each NAME, of the token that a row predicts; the last has 0.

    Raises ConfigError where a sample has a field of such a name itself.
    """
    lasts = np.cumsum(tokens) - 1
    found = dict(per_token)
    for name, values in per_token.items():
        if name in ("position_ids", LABELS):  # models shift labels by themselves
            continue
        following = torch.roll(values, -1, dims=0)
        following[torch.from_numpy(lasts)] = 0
        if (made := f"next_{name}") in per_token:
            raise ConfigError(
                f"the samples have a field {made}, which is what a stream with max_split calls "
                f"{name} of the next token; give it another name"
            )
        found[made] = following
    return found


def placed(
    tokens: list[int], block: ContextBlock, multiple: int, length: int | None
) -> tuple[Placement, Placement]:
    """Where the rows of a block's samples lie, and where a rank has its slices of them."""
    if block.size == 1:
        whole = packed(tokens, multiple, length)._replace(has_padding=True)
        return whole, whole
    wide = None if length is None else length * block.size
    whole = packed(tokens, 2 * block.size * multiple, wide)
    own = tuple(bound // block.size for bound in whole.bounds)
    return whole, whole._replace(bounds=own)


def sliced(
    tensors: Tensors, names: frozenset[str], whole: Placement, block: ContextBlock
) -> Tensors:
    """This rank's rows of the tensors of these names, and the others as they are."""
    if block.size == 1:
        return tensors
    rows = torch.from_numpy(block.rows_of(whole.bounds, block.rank))
    return {
        name: values.index_select(0, rows) if name in names else values
        for name, values in tensors.items()
    }


def tokens_in(whole: Placement, block: ContextBlock) -> int:
    """Real tokens among this rank's rows."""
    real = np.zeros(whole.rows, dtype=np.bool_)
    real[whole.rows_of_tokens] = True
    return int(real[block.rows_of(whole.bounds, block.rank)].sum())


# -- for training loops ----------------------------------------------------------------------------


def gather_block(values: Tensor, micro_batch: "MicroBatch") -> Tensor:
    """The rows of all ranks of the block, in the order of the samples, of this rank's.

    A collective of the block, and in the backward pass again: there each rank gets the sum of what
    all of them have for its rows. values: [rows, ...], of one shape and type on all of them. For a
    micro-batch of one rank it is the very tensor.
    """
    block = micro_batch.block
    if block.size == 1:
        return values
    whole = [bound * block.size for bound in micro_batch.placement.bounds]
    order = torch.from_numpy(block.order(whole)).to(values.device)
    together = torch.cat(all_gather(values, block.group))  # type: ignore[no-untyped-call]
    return torch.empty_like(together).index_copy(0, order, together)


def rows_in_block(micro_batch: "MicroBatch") -> Tensor:
    """Which of the rows that `gather_block` gives each row of this rank is, int64[rows]."""
    block = micro_batch.block
    whole = [bound * block.size for bound in micro_batch.placement.bounds]
    rows = np.arange(whole[-1]) if block.size == 1 else block.rows_of(whole, block.rank)
    return torch.from_numpy(rows).to(next(iter(micro_batch.values())).device)


def block_sum(values: Tensor, micro_batch: "MicroBatch") -> Tensor:
    """Sums over whole samples, [n, ...], of the values of each row, [rows, ...]; padding too.

    For values of a whole sample, such as GSPO's ratio. A collective of the block, and in the
    backward pass again, in which every rank of it has to take part: multiply a loss that counts
    once a sample by `owns_samples`, and leave it out on no rank.
    """
    bounds, n = micro_batch.placement.bounds, micro_batch.num_samples
    sizes = torch.tensor([end - start for start, end in pairwise(bounds)], device=values.device)
    segment = torch.repeat_interleave(torch.arange(len(sizes), device=values.device), sizes)
    sums = values.new_zeros((len(sizes), *values.shape[1:])).index_add(0, segment, values)[:n]
    block = micro_batch.block
    if block.size > 1:
        sums = all_reduce(sums, group=block.group)  # type: ignore[no-untyped-call]
    return sums
