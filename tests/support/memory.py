"""What facts add up to, kept in dictionaries: the journal without files, to check cores against."""

from collections.abc import Iterable, Mapping
from typing import Any

from dispatcher.core import facts as f
from dispatcher.core.buffer import Entry


class Memory:
    """Notes facts in order; `remembered` is what a new core would start from."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._steps: dict[int, f.Planned] = {}
        self._accepted: dict[str, set[int]] = {}
        self._floors: dict[str, int] = {}
        self._given_ids: list[str] = []
        self._next_ticket = self._next_step = self._generation = 0
        self._dp_size: int | None = None
        self._version: int | None = None
        self._phases: list[int] = []
        self._ended = False
        self._totals: Mapping[str, Any] = {}

    def note(self, facts: Iterable[f.Fact], totals: Mapping[str, Any]) -> None:
        """Remember facts and the totals after them."""
        for fact in facts:
            self._note_one(fact)
            self._totals = totals

    def remembered(self) -> f.Remembered:
        """Everything, in objects of its own where a core would change them."""
        entries = {ticket: _copy(entry) for ticket, entry in self._entries.items()}
        steps = tuple(
            f.RememberedStep(
                plan.step,
                plan.digest,
                plan.planned_at,
                tuple(
                    tuple(tuple(entries[ticket] for ticket in part) for part in rank)
                    for rank in plan.micro_batches
                ),
            )
            for plan in self._steps.values()
        )
        open_tickets = {ticket for plan in self._steps.values() for ticket in _tickets(plan)}
        return f.Remembered(
            entries=tuple(e for ticket, e in sorted(entries.items()) if ticket not in open_tickets),
            steps=steps,
            next_ticket=self._next_ticket,
            next_step=self._next_step,
            generation=self._generation,
            dp_size=self._dp_size,
            policy_version=self._version,
            phases=tuple(self._phases),
            ended=self._ended,
            producers={
                name: (self._floors.get(name, 0), frozenset(self._accepted.get(name, set())))
                for name in self._accepted.keys() | self._floors.keys()
            },
            given_ids=tuple(self._given_ids),
            totals=self._totals,
        )

    def _note_one(self, fact: f.Fact) -> None:
        match fact:
            case f.Accepted():
                self._entries[fact.entry.ticket] = _copy(fact.entry)
                self._next_ticket = fact.entry.ticket + 1
                self._accepted.setdefault(fact.producer, set()).add(fact.seq)
                self._given_ids += [] if fact.given_id is None else [fact.given_id]
            case f.FloorRaised():
                self._floors[fact.producer] = fact.floor
                kept = self._accepted.get(fact.producer, set())
                self._accepted[fact.producer] = {seq for seq in kept if seq >= fact.floor}
            case f.Planned():
                self._steps[fact.step] = fact
                self._next_step = max(self._next_step, fact.step + 1)
                for ticket in fact.passed_over:
                    self._entries[ticket].skips += 1
            case f.Committed():
                self._forget(_tickets(self._steps.pop(fact.step)))
            case f.Dropped():
                self._forget(fact.tickets)
            case f.GenerationBegan():
                self._generation, self._dp_size = fact.generation, fact.dp_size
            case f.VersionReported():
                self._version = fact.version
            case f.PhaseEnded():
                self._phases.append(fact.version)
            case f.StreamEnded():
                self._ended = True

    def _forget(self, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            del self._entries[ticket]


def _tickets(plan: f.Planned) -> list[int]:
    return [ticket for rank in plan.micro_batches for part in rank for ticket in part]


def _copy(entry: Entry) -> Entry:
    return Entry(entry.sample, entry.ticket, entry.arrived, entry.group, entry.skips)
