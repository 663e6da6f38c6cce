"""Accepted samples that will never be trained on: dropped from the buffer, counted, and a fact.

Invariant: what leaves the buffer other than into a step, or an open step, leaves it here, with its
reason; a group is dropped whole. A group that cannot be whole is dropped, or made whole of what has
come (`keep`).

`Losses`: what a shutdown costs: accepted samples that nobody will train on, counted and the first
named.

Reasons that the settings ask for, such as `last_batch=drop`, are no losses.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.buffer.open_groups import OpenGroup
from rollout_dispatcher.core.facts import Dropped, DropReason, GroupSized
from rollout_dispatcher.core.steps.step import OpenSteps
from rollout_dispatcher.sample import Sample

if TYPE_CHECKING:
    from rollout_dispatcher.core.parts import Parts

#: What a shutdown brings about: nobody is there to train, or a group's other members are refused.
BY_SHUTDOWN = frozenset({DropReason.SHUTDOWN, DropReason.INCOMPLETE_GROUP})
#: Samples that are named; ids have a few hundred characters at most, and a log line its end.
NAMED = 8


@dataclass(slots=True)
class Losses:
    """Samples lost by reason, and the names of the first few of them."""

    reasons: Counter[DropReason] = field(default_factory=Counter)
    first: list[str] = field(default_factory=list)

    def note(self, reason: DropReason, entries: Sequence[Entry]) -> None:
        """These are dropped."""
        self.reasons[reason] += len(entries)
        left = NAMED - len(self.first)
        self.first += [_name(entry.sample) for entry in entries[:left]]

    @property
    def samples(self) -> int:
        """How many there are."""
        return self.reasons.total()

    @property
    def named(self) -> str:
        """The first few of them."""
        return _listed(self.first, self.samples)

    def __str__(self) -> str:
        """For the log: how many, why, and which."""
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self.reasons.items()))
        are = "sample is" if self.samples == 1 else "samples are"
        return (
            f"{self.samples} accepted {are} lost, dropped by the shutdown ({reasons}): {self.named}"
        )


def name_undone(steps: OpenSteps, buffer: SampleBuffer) -> str:
    """The first of the samples that are in open steps or ready, oldest first, for the log."""
    undone = [entry for step in steps.uncommitted() for entry in step.entries()]
    undone.sort(key=lambda entry: entry.ticket)
    undone += buffer.ready(NAMED)
    names = [_name(entry.sample) for entry in undone[:NAMED]]
    return _listed(names, steps.in_flight + len(buffer))


def _listed(names: list[str], count: int) -> str:
    """The names of the first few of `count` samples."""
    more = count - len(names)
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


def _name(sample: Sample) -> str:
    """Its id, with its group."""
    return sample.sample_id + ("" if sample.group_id is None else f" (group {sample.group_id})")


class Dropping:
    """The only way out but training. keep: groups that lack members are trained on."""

    def __init__(self, parts: "Parts", *, keep: bool) -> None:
        self._buffer, self._totals, self._note = parts.buffer, parts.totals, parts.note
        self._closed_groups, self._memory, self.keep = parts.closed_groups, parts.memory, keep
        self._objects = parts.references.objects
        #: What was dropped and its producers have not been told of.
        self.untold: dict[DropReason, list[Entry]] = {}
        #: What a shutdown has cost; None before there is one.
        self.losses: Losses | None = None

    def ready(self, reason: DropReason, entries: Sequence[Entry]) -> int:
        """Drop these ready samples, of which groups are whole; returns how many there are."""
        if entries:  # else nothing has left
            self._buffer.take(entries)
        return self._drop(reason, entries)

    def planned(self, reason: DropReason, entries: Sequence[Entry]) -> None:
        """Drop these samples of an open step, of which groups are whole.

        Their lengths stay counted as dispatched.
        """
        self._drop(reason, entries, dispatched=True)

    def everything(self, reason: DropReason) -> None:
        """Drop what is left; open groups for being incomplete, unless they are simply not used."""
        unused = reason is DropReason.UNUSED
        over = "the run was finished" if unused else "the dispatcher was shut down"
        why = f"{over} before its other members came"
        for group in list(self._buffer.groups):
            entries = self._buffer.drop_group(group, why)
            self._drop(reason if unused else DropReason.INCOMPLETE_GROUP, entries)
        self.ready(reason, list(self._buffer.entries()))

    def other_fields(self) -> None:
        """Drop what an earlier process accepted with other fields than the run's, groups whole.

        Members of such a group that may still come are refused, and told why.
        """
        schema = self._buffer.schema
        why = f"its samples have other fields than the run's ({self._buffer.set_by})"
        for group in list(self._buffer.groups):
            if group.entries and group.entries[0].sample.schema != schema:
                self._drop(DropReason.SCHEMA, self._buffer.drop_group(group, why))
        others = [entry for entry in self._buffer.entries() if entry.sample.schema != schema]
        self.ready(DropReason.SCHEMA, others)

    # -- open groups ------------------------------------------------------------------------

    def give_up(
        self, group: OpenGroup, why: str, reason: DropReason = DropReason.INCOMPLETE_GROUP,
        *, keep: bool | None = None,
    ) -> None:  # fmt: skip
        """This group goes whole, or is whole with what has come.

        Members that still come are refused, and told why.
        """
        keep = self.keep if keep is None else keep
        if keep and group.entries:
            group.size = group.settled
            self._note_size(group)
            self._buffer.complete(group, why)
        else:
            self._drop(reason, self._buffer.drop_group(group, why))

    def give_up_groups(self) -> None:
        """No further member of any group comes."""
        for group in list(self._buffer.groups):
            self.give_up(group, "the stream has ended without all of its members")

    def supersede(self, group: OpenGroup) -> None:
        """Others push this group anew: what has come of it goes."""
        self._drop(DropReason.SUPERSEDED, self._buffer.drop_group(group, None))

    def give_up_before(self, version: int, *, untracked: bool) -> None:
        """Give up groups that belong before this phase; untracked: those without a version, too."""
        why = f"the phase before policy version {version} has ended without all of its members"
        for group in self._buffer.groups.before(version, untracked=untracked):
            self.give_up(group, why)

    def resize(self, group: OpenGroup, size: int) -> None:
        """The group has so many members in all, those included that are lost."""
        self._buffer.groups.on_change(group.group_id)
        group.size = max(size, len(group.entries) + group.lost)
        self._note_size(group)
        if group.missing == 0:
            self._buffer.complete(group)

    def lost_member(self, group_id: str, size: int | None, why: str, now: float) -> None:
        """A member is refused or withdrawn: its group, of `size` if it said so, will lack it."""
        if self._closed_groups.why_refused(group_id) is not None:
            return  # it is given up, and this member has been counted
        group = self._buffer.groups.get(group_id)
        if group is None and not self.keep:
            missing = None if size is None else max(0, size - 1)
            self._closed_groups.lack(group_id, why, missing)
            return
        group = group or self._buffer.groups.open(group_id, size, now)
        group.lost += 1
        self._buffer.groups.on_change(group.group_id)
        if not self.keep:
            self.give_up(group, why)
            return
        self._note_size(group)
        if group.missing == 0:
            self._buffer.complete(group)

    def _note_size(self, group: OpenGroup) -> None:
        """Members that come later bring what is known by then themselves."""
        if group.entries and group.size is not None:
            self._note(GroupSized(group.tickets, group.told))

    def _drop(
        self, reason: DropReason, entries: Sequence[Entry], *, dispatched: bool = False
    ) -> int:
        if entries:
            self._totals.dropped[reason] += len(entries)
            if not dispatched:
                self._totals.dropped_lengths.add([entry.sample.tokens for entry in entries])
            self._memory.forget(entry.sample.sample_id for entry in entries)
            self._objects.done(entries)
            self.untold.setdefault(reason, []).extend(entries)
            self._note(Dropped(tuple(entry.ticket for entry in entries), reason))
            if self.losses is not None and reason in BY_SHUTDOWN:
                self.losses.note(reason, entries)
        return len(entries)
