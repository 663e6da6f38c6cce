"""The books of one who watches: what was decided, what was told to whom, and what must be true.

*Decided* is read from the facts, in their order; a crash takes back what was not durable. *Told*
is what peers have heard, which nothing takes back: a promise that was broken shows here, whatever
the dispatcher itself believes.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rollout_dispatcher.core import facts as f
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.spans import PADDING
from tests.support.client import SCHEMA

BUFFERED, DROPPED, DONE = "buffered", "dropped", "done"

Place = tuple[int, int]  # generation, DP rank


@dataclass(slots=True)
class Decided:
    """What facts add up to, as far as it can be checked from outside."""

    accepted: dict[str, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    #: Where each ticket is: buffered, in the step of that number, done with, or dropped.
    where: dict[int, str | int] = field(default_factory=dict)
    plans: dict[int, f.Planned] = field(default_factory=dict)
    committed: dict[int, list[int]] = field(default_factory=dict)
    generation: int = 0
    dp_size: int = 0
    saved: int = -1
    ended: bool = False

    @property
    def last_committed(self) -> int:
        """-1 for none."""
        return max(self.committed, default=-1)


def tickets_of(plan: f.Planned) -> list[int]:
    """Every ticket of a plan."""
    return [ticket for rank in plan.micro_batches for part in rank for ticket in part]


class Books:
    """Raises AssertionError for whatever breaks a promise.

    spans: payload by sample id, from whoever pushes.
    """

    def __init__(self) -> None:
        self.decided = Decided()
        self.spans: dict[str, tuple[int, bytes]] = {}
        self.told_accepted: set[str] = set()
        #: By place, the last step that anybody there has claimed to hold, or to have applied.
        self.holds: defaultdict[Place, int] = defaultdict(lambda: -1)
        self.applied: defaultdict[Place, int] = defaultdict(lambda: -1)
        #: A step that a checkpoint covers, which a rank says just now that it has loaded.
        self.resuming = -1
        self._headers: dict[tuple[int, int], m.StepHeader] = {}
        self._durable: list[f.Fact] = []

    # -- decided

    def noted(self, facts: Iterable[f.Fact]) -> None:
        """The core has decided this."""
        for fact in facts:
            self._note(self.decided, fact)

    def durable(self, facts: Iterable[f.Fact]) -> None:
        """This will outlive a crash."""
        self._durable += facts

    def crashed(self) -> None:
        """Only what was durable was ever decided; and nobody was told of anything else."""
        lost = self.decided.generation
        self.decided = again = Decided()
        for fact in self._durable:
            self._note(again, fact, check=False)
        for number in range(again.generation + 1, lost + 1):
            for claims in (self.holds, self.applied):
                for place in [place for place in claims if place[0] == number]:
                    del claims[place]
        missing = self.told_accepted - again.accepted.keys()
        assert not missing, f"acknowledged and lost: {sorted(missing)}"

    def _note(self, decided: Decided, fact: f.Fact, *, check: bool = True) -> None:
        match fact:
            case f.Accepted(entry=entry):
                name, ticket = entry.sample.sample_id, entry.ticket
                assert name not in decided.accepted, f"{name} is accepted twice"
                decided.accepted[name], decided.names[ticket] = ticket, name
                decided.where[ticket] = BUFFERED
            case f.Planned():
                self._plan(decided, fact)
            case f.Committed(step=step):
                if check:
                    self._may_commit(decided, step)
                held = tickets_of(decided.plans[step])
                assert all(decided.where[ticket] == step for ticket in held), "trained twice"
                decided.where |= dict.fromkeys(held, DONE)
                decided.committed[step] = held
            case f.Dropped(tickets=tickets):
                for ticket in tickets:
                    assert decided.where[ticket] == BUFFERED, "dropped, and not buffered"
                    decided.where[ticket] = DROPPED
            case _:
                self._note_ranks(decided, fact)

    def _note_ranks(self, decided: Decided, fact: f.Fact) -> None:
        match fact:
            case f.GenerationBegan(generation=number, dp_size=size):
                assert number > decided.generation, "generations do not fall"
                decided.generation, decided.dp_size = number, size
            case f.Resumed(after=after):
                for step in [step for step in decided.committed if step > after]:
                    if step > decided.saved:  # else it was released, and does not come back
                        self._rewind(decided, step)
            case f.CheckpointSaved(step=step):
                decided.saved = max(decided.saved, step)
            case f.StreamEnded():
                decided.ended = True

    #: Whether committed steps are kept until a checkpoint covers them.
    retains = False

    def _rewind(self, decided: Decided, step: int) -> None:
        if self.retains:
            decided.where |= dict.fromkeys(decided.committed.pop(step), step)

    def _plan(self, decided: Decided, plan: f.Planned) -> None:
        tickets = tickets_of(plan)
        assert len(set(tickets)) == len(tickets), "a sample is twice in a step"
        before = decided.plans.get(plan.step)
        if before is None:
            assert all(decided.where[ticket] == BUFFERED for ticket in tickets), "in two steps"
        else:
            assert sorted(tickets) == sorted(tickets_of(before)), "planned again, other samples"
        decided.where |= dict.fromkeys(tickets, plan.step)
        decided.plans[plan.step] = plan

    def _may_commit(self, decided: Decided, step: int) -> None:
        if step <= self.resuming:
            return
        for dp_rank in range(decided.dp_size):
            applied = self.applied[decided.generation, dp_rank]
            assert applied >= step, f"{step} is committed, and DP rank {dp_rank} said {applied}"

    # -- told

    def answered(self, names: Sequence[str], outcomes: Sequence[str]) -> None:
        """A producer has heard what became of its samples."""
        durable = {fact.entry.sample.sample_id for fact in self._durable
                   if isinstance(fact, f.Accepted)}  # fmt: skip
        for name, outcome in zip(names, outcomes, strict=True):
            if outcome == "accepted":
                assert name in durable, f"{name} is acknowledged before it is durable"
                assert name not in self.told_accepted, f"{name} is acknowledged twice"
                self.told_accepted.add(name)

    def hears_header(self, generation: int, header: m.StepHeader) -> None:
        """A rank of this generation hears of a step: all of them hear the same."""
        known = self._headers.setdefault((generation, header.step), header)
        assert known == header, f"DP ranks of generation {generation} disagree on {header.step}"
        plan = self.decided.plans[header.step]
        assert header.digest == plan.digest, "the header of another plan"
        assert header.num_samples == len(tickets_of(plan)), "samples that are not in the plan"

    def hears_micro_batch(self, dp_rank: int, part: m.MicroBatch, payload: memoryview) -> None:
        """A rank gets what the plan says, every byte as it was pushed."""
        plan = self.decided.plans[part.step]
        names = [self.decided.names[at] for at in plan.micro_batches[dp_rank][part.index]]
        if part.is_filler:
            assert not names, "a filler in the place of samples"
            tokens, span = self.spans[part.sample_ids[0]]
            places = SCHEMA.slices(tokens)
            firsts = [span[at.start :][: one.stop - one.start]
                      for at, one in zip(places, SCHEMA.slices(1), strict=True)]  # fmt: skip
            wanted = _padded([[first] for first in firsts])
        else:
            assert part.sample_ids == names, "other samples than planned"
            wanted = _padded([self._values(names, at) for at in range(len(SCHEMA.fields))])
        assert bytes(payload) == wanted, "other bytes than were pushed"

    def _values(self, names: Iterable[str], at: int) -> list[bytes]:
        """The values of field `at` of these samples."""
        found = (self.spans[name] for name in names)
        return [span[SCHEMA.slices(tokens)[at]] for tokens, span in found]

    def hears_release(self, generation: int, step: int) -> None:
        """A rank may train a step: every rank of the generation holds it."""
        for dp_rank in range(self.decided.dp_size):
            holds = self.holds[generation, dp_rank]
            assert holds >= step, f"step {step} is released, and DP rank {dp_rank} holds {holds}"


def _padded(blocks: Sequence[Sequence[bytes]]) -> bytes:
    joined = (b"".join(values) for values in blocks)
    return b"".join(block + PADDING[len(block) % 8] for block in joined)
