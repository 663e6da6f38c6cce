"""A player of a core: facts that may follow each other, drawn, with a model that adds them up."""

from dataclasses import replace
from itertools import pairwise
from random import Random

from rollout_dispatcher.core.facts import (
    Accepted,
    CheckpointSaved,
    Committed,
    Deleted,
    Dropped,
    DropReason,
    EndsReported,
    Fact,
    Finished,
    FloorRaised,
    GenerationBegan,
    GroupEnded,
    GroupSized,
    GroupSizeSet,
    IncarnationBegan,
    IncarnationSwept,
    PhaseEnded,
    Planned,
    ProducerKeyed,
    ProducerLeft,
    Releasable,
    Resumed,
    RetainedEvicted,
    RunBegan,
    StreamEnded,
    VersionReported,
    Withdrawn,
)
from rollout_dispatcher.payload import StoredObject
from tests.journal.support import OBJECTS, SCHEMAS, accepted
from tests.support.core.memory import Memory, without


class Player:
    """Plays a core: valid facts from random numbers, the same for the same seed."""

    def __init__(self, random: Random, id_horizon: int = 100) -> None:
        self.random = random
        self.model = Memory(id_horizon)

    def batch(self) -> tuple[list[Fact], dict[str, object]]:
        """The next facts and totals; the model has them already."""
        facts: list[Fact] = []
        for _ in range(self.random.randrange(4)):
            more = self._facts()
            self.model.note(more, self.model.totals)
            facts += more
        totals: dict[str, object] = {"accepted": self.model.next_ticket, "dropped": {"stale": 1}}
        self.model.totals = totals
        return facts, totals

    def _facts(self) -> list[Fact]:
        kind, random = self.random.random(), self.random
        if kind < 0.55:
            return [self._accepted(at) for at in range(random.randrange(1, 5))]
        if kind < 0.66:
            return self._planned()
        if kind < 0.68 and self.model.open():
            return self._planned_again()
        if kind < 0.71 and self.model.open():
            return self._lost()
        if kind < 0.83 and self.model.open():
            return [Committed(self.model.open()[0], retained=random.random() < 0.5)]
        if kind < 0.86 and self.model.retained:
            return [self._checkpoint()]
        if kind < 0.89 and self.model.buffered():
            buffered = self.model.buffered()
            doomed = random.sample(buffered, min(3, len(buffered)))
            if random.random() < 0.5:
                return [GroupSized(tuple(doomed), random.randrange(1, 9))]
            return [Dropped(tuple(doomed), random.choice(list(DropReason)))]
        producer = f"p-{random.randrange(3)}"
        others: list[Fact] = [
            FloorRaised(producer, random.randrange(self.model.next_ticket + 1)),
            GenerationBegan(self.model.generation + 1, random.randrange(1, 5)),
            VersionReported((self.model.version or 0) + random.randrange(2), self.model.next_step),
            EndsReported(producer, random.randrange(3), random.random() < 0.3),
            ProducerLeft(producer),
            ProducerKeyed(producer, f"{random.randrange(2):032x}"),
            PhaseEnded(max(self.model.phases, default=0) + random.randrange(2)),
            StreamEnded(),
            Finished(random.random() < 0.5),
            RunBegan("run"),
            GroupEnded(f"größe-{random.randrange(99)}", random.choice(["", "it was closed"])),
            Releasable(tuple(self._stored() for _ in range(random.randrange(3)))),
            Deleted(tuple(self._stored() for _ in range(random.randrange(3)))),
            IncarnationBegan(producer, f"{producer}.{random.randrange(2)}"),
            IncarnationSwept(f"{producer}.{random.randrange(2)}"),
            GroupSizeSet(random.choice([None, 4])),
            GroupSizeSet(random.randrange(3) or None),
        ]
        return [random.choice(others)]

    def _stored(self) -> StoredObject:
        store, number = f"file:///{self.random.randrange(2)}", self.random.randrange(4)
        return StoredObject(store, f"schlüssel/{number}", 1000 * number)

    def _checkpoint(self) -> Fact:
        step = self.random.choice(sorted(self.model.retained))
        # Back over a step that is forgotten no rank can go.
        rewinds = self.model.steps.keys() >= {*range(step, self.model.next_step)}
        if self.random.random() < 0.5 and rewinds:
            return Resumed(step - 1)
        return CheckpointSaved(step) if self.random.random() < 0.5 else RetainedEvicted(step)

    def _accepted(self, at: int) -> Accepted:
        random, ticket = self.random, self.model.next_ticket + at
        named = random.random() < 0.4
        return accepted(
            ticket,
            tokens=random.choice([1, 3, 20, 150]),
            schema=random.choice(SCHEMAS),
            producer=f"p-{random.randrange(3)}",
            given_id=f"näme-{ticket}" if named else None,
            group=ticket if random.random() < 0.3 else -1,
            version=self._version(),
            stored=random.choice([None, None, *OBJECTS]),
            # Later it would belong to phases that a restart has forgotten, and the model has not.
            may_be_exempt=not self.model.phases,
        )

    def _version(self) -> int | None:
        """Never of a phase that has ended: admission refuses those."""
        newest = max(self.model.phases, default=None)
        if newest is None:
            return self.random.choice([None, 0, 1, 2])
        return newest + self.random.randrange(3)

    def _planned(self) -> list[Fact]:
        buffered = self.model.buffered()
        if len(buffered) < 2:
            return []
        chosen = self.random.sample(buffered, self.random.randrange(2, len(buffered) + 1))
        cut = len(chosen) // 2
        ranks = ((tuple(chosen[:cut]),), (tuple(chosen[cut:-1]), (chosen[-1],)))
        over = tuple(ticket for ticket in buffered if ticket not in chosen)
        number = self.model.next_step
        attempt = self.model.withdrawn.get(number, -1) + 1
        return [
            Planned(number, f"digest-{number}", number / 4, ranks, over, attempt, number % 3 / 7)
        ]

    def _planned_again(self) -> list[Fact]:
        """An open step for another number of ranks: the same samples, elsewhere."""
        number = self.random.choice(self.model.open())
        before, size = self.model.steps[number], self.random.randrange(1, 4)
        members = self.model.members(number)
        self.random.shuffle(members)
        ranks = tuple((tuple(members[rank::size]),) for rank in range(size))
        digest = f"{before.digest}+"
        return [replace(before, digest=digest, micro_batches=ranks, passed_over=())]

    def _lost(self) -> list[Fact]:
        """Samples of an open step are lost, one or all; what comes after it moves up then."""
        numbers, steps = self.model.open(), self.model.steps
        at = self.random.randrange(len(numbers))
        members = self.model.members(numbers[at])
        lost = tuple(self.random.sample(members, self.random.choice([1, len(members)])))
        left = without(lost, steps[numbers[at]])
        facts: list[Fact] = [Dropped(lost, DropReason.UNRESOLVED), _voided(left)]
        if len(lost) < len(members):
            return facts
        for empty, full in pairwise(numbers[at:]):
            moved = replace(steps[empty], micro_batches=steps[full].micro_batches)
            facts.append(_voided(moved))
        return [*facts, Withdrawn(numbers[-1], steps[numbers[-1]].attempt)]


def _voided(step: Planned) -> Planned:
    """The same, without its plan."""
    return replace(step, digest="", passed_over=(), attempt=step.attempt + 1)
