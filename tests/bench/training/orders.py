"""How others give samples to DP ranks: which of them a step has, and which of those each rank.

Pure functions over lengths, the same on every rank. All of them pack a rank's samples by the code
that packs the dispatcher's, into the fewest micro-batches of the token budget, so that rows differ
by what is chosen and who gets it, and by nothing else.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rollout_planner.cost import parse_cost
from rollout_planner.split.packing import pack
from rollout_planner.types import CostModel, IntArray
from tests.peers.adapters.verl import load_karmarkar_karp

#: As Hugging Face's LengthGroupedSampler sorts: so many batches at a time, at the most.
MEGA_BATCHES = 50


@dataclass(frozen=True, slots=True)
class Work:
    """What is trained on. lengths: tokens of each sample, in order of arrival. batch: samples of a
    step over all ranks. budget: tokens of a micro-batch. cost: as `--cost` has it.
    """

    lengths: list[int]
    batch: int
    ranks: int
    budget: int
    cost: str
    seed: int

    @property
    def tokens(self) -> IntArray:
        """The lengths as an array."""
        return np.array(self.lengths)

    @property
    def cost_model(self) -> CostModel:
        """What the dispatcher and verl are told that samples cost."""
        return parse_cost(self.cost, lambda path: path)


#: Indices of samples, by rank.
Shares = list[IntArray]
#: Shares of each step.
Order = Callable[[Work], Iterator[Shares]]


def dataloader(work: Work) -> Iterator[Shares]:
    """In order of arrival, dealt out in turn, as DataLoader and DistributedSampler do."""
    for batch in _batches(np.arange(len(work.lengths)), work.batch):
        yield [batch[rank :: work.ranks] for rank in range(work.ranks)]


def group_by_length(work: Work, mega_batches: int = MEGA_BATCHES) -> Iterator[Shares]:
    """As Hugging Face's `group_by_length`: shuffled, sorted inside mega-batches, dealt out in turn.

    It needs all samples beforehand, and a step's are all of like length.
    """
    random = np.random.default_rng(work.seed)
    mixed = random.permutation(len(work.lengths))
    many = max(1, min(len(mixed) // (4 * work.batch), mega_batches)) * work.batch
    tokens = work.tokens
    order = [part[np.argsort(-tokens[part], kind="stable")] for part in _parts(mixed, many)]
    for batch in _batches(np.concatenate(order), work.batch):
        yield [batch[rank :: work.ranks] for rank in range(work.ranks)]


def verl_kk(work: Work) -> Iterator[Shares]:
    """In order of arrival, each global batch balanced by verl's Karmarkar-Karp.

    As its trainer calls it: as many samples on each rank.
    """
    karmarkar_karp = load_karmarkar_karp()
    assert karmarkar_karp is not None, "verl is not here: make build/bench/peers/.unpacked"
    costs = work.cost_model(work.tokens)
    for batch in _batches(np.arange(len(work.lengths)), work.batch):
        parts = karmarkar_karp(costs[batch].tolist(), work.ranks, True)
        yield [batch[sorted(part)] for part in parts]


ORDERS: dict[str, Order] = {
    "dataloader": dataloader,
    "group-by-length": group_by_length,
    "verl-kk": verl_kk,
}


def packed(share: IntArray, work: Work) -> list[list[int]]:
    """One rank's samples in micro-batches of the token budget."""
    tokens = work.tokens[share]
    order = np.argsort(-tokens, kind="stable")
    costs = work.cost_model(tokens[order])
    bins, count = pack(costs, tokens[order], 1, work.budget)
    return [share[order[bins == number]].tolist() for number in range(count)]


def _parts(indices: IntArray, size: int) -> Iterator[IntArray]:
    for start in range(0, len(indices), size):
        yield indices[start : start + size]


def _batches(indices: IntArray, size: int) -> Sequence[IntArray]:
    return list(_parts(indices, size))
