"""Which samples to fetch from payload stores now, and what the dispatcher is told of their steps.

    every micro-batch is here --room, or the loop waits--> fetching --all found--> resolved
                                                              |
                                                              +--some missing--> unresolved

A micro-batch is fetched as a whole, and each in its turn: a step that does not fit is fetched ahead
as far as it does. Invariants: what is fetched, or being fetched, of steps that the training loop
has not begun is at most `limit` bytes, but for the one that it waits for: that is always fetched,
so no rank waits for itself. And a step is told to be prepared behind those before it, since whoever
prepares one has prepared those.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollout_dispatcher.payload import Reference
from rollout_dispatcher.protocol import messages as m
from rollout_workers.rank.held_steps import HeldState, HeldStep, HeldSteps, Received


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """A micro-batch of a held step, of which samples are to be fetched.

    received: its header, and what came inline. references: where the others are.
    """

    held: HeldStep
    received: Received
    references: Sequence[Reference]


class Fetches:
    """What is fetched of the steps that a rank holds. limit: bytes ahead, None: any."""

    def __init__(self, steps: HeldSteps) -> None:
        self._steps = steps
        self.limit: int | None = None

    def take(self, *, waits: bool) -> Iterator[Fetch]:
        """What to fetch now, taken as begun. waits: whether the training loop asked for a step."""
        ahead, following = 0, self._steps.following()
        for held in self._steps:
            if not held.header.num_referenced:
                continue
            if len(held.micro_batches) < held.header.num_micro_batches:
                return  # and later ones are not here either
            taken = held.state is HeldState.TAKEN
            for index, nbytes in held.referenced.items():
                ahead += 0 if taken else nbytes
                if index in held.asked:
                    continue
                fits = taken or self.limit is None or ahead <= self.limit
                if not fits and not (waits and held is following):
                    return
                held.fetch(index)
                yield Fetch(held, held.micro_batches[index], held.lacking[index])

    def found(self, fetch: Fetch, payload: memoryview) -> None:
        """All that a micro-batch lacked is fetched; payload: of all its samples."""
        if self._steps.holds(fetch.held):
            fetch.held.fetched(fetch.received.header.index, payload)

    def missed(self, fetch: Fetch, missing: dict[str, str]) -> None:
        """Samples of a micro-batch, by id, are gone, and why."""
        if self._steps.holds(fetch.held):
            fetch.held.missed(fetch.received.header.index, missing)

    def tell(self) -> Iterator[m.Message]:
        """What there is to say of the steps and was not said yet; taken as said once yielded."""
        all_before = True
        for held in self._steps:
            all_before &= held.is_resolved
            if not held.told and all_before:
                held.told = True
                yield _prepared(held.header)
            elif not held.told and held.is_unresolved:
                held.told = True
                yield _unresolved(held)


def _prepared(header: m.StepHeader) -> m.Prepared:
    return m.Prepared(step=header.step, digest=header.digest, attempt=header.attempt)


def _unresolved(held: HeldStep) -> m.Unresolved:
    """As many samples as one message takes; the others are missing from the next attempt too."""
    sample_ids = list(held.missing)[: m.MAX_SAMPLES]
    why = "; ".join(dict.fromkeys(held.missing.values()))[: m.MAX_WHY_LETTERS]
    header = held.header
    return m.Unresolved(step=header.step, attempt=header.attempt, sample_ids=sample_ids, why=why)
