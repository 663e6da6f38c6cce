"""Accepted samples that will never be trained on: dropped from the buffer, counted, and a fact.

Invariant: a sample leaves the buffer, or an open step, only by training or through `Dropping`, with
a reason; a group is dropped whole. A group that cannot be completed is dropped, or completed with
the members received so far (`keep`).

`DropCounts`: dropped samples by reason, counted and the first ones named; `Dropping.shutdown_drops`
are those of a shutdown.

Drops that settings ask for, such as `last_batch=drop`, are none of a shutdown.
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

#: Reasons that a shutdown causes: no rank is there to train, or a group's other members are
#: refused.
BY_SHUTDOWN = frozenset({DropReason.SHUTDOWN, DropReason.INCOMPLETE_GROUP})
#: Samples that a log line names; an id has a few hundred characters at most.
NAMED_IN_LOG = 8


@dataclass(slots=True)
class DropCounts:
    """Dropped samples by reason, and the names of the first few."""

    reasons: Counter[DropReason] = field(default_factory=Counter)
    first: list[str] = field(default_factory=list)

    def add(self, reason: DropReason, entries: Sequence[Entry]) -> None:
        """Count dropped samples, and name the first."""
        self.reasons[reason] += len(entries)
        left = NAMED_IN_LOG - len(self.first)
        for entry in entries[:left]:
            stale = reason is DropReason.STALE and entry.version is not None
            version = f" of version {entry.version}" if stale else ""
            self.first.append(_name(entry.sample) + version)

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


def name_unfinished(steps: OpenSteps, buffer: SampleBuffer) -> str:
    """The first of the samples that are in open steps or ready, oldest first, for the log."""
    undone = [entry for step in steps.uncommitted() for entry in step.entries()]
    undone.sort(key=lambda entry: entry.ticket)
    undone += buffer.ready(NAMED_IN_LOG)
    names = [_name(entry.sample) for entry in undone[:NAMED_IN_LOG]]
    return _listed(names, steps.in_flight + len(buffer))


def _listed(names: list[str], count: int) -> str:
    """The names of the first few of `count` samples."""
    more = count - len(names)
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


def _name(sample: Sample) -> str:
    """Its id, with its group."""
    return sample.sample_id + ("" if sample.group_id is None else f" (group {sample.group_id})")


class Dropping:
    """Drops samples. keep: incomplete groups are completed as they are, and trained on."""

    def __init__(self, parts: "Parts", *, keep: bool) -> None:
        self._buffer, self._totals, self._append = parts.buffer, parts.totals, parts.append_fact
        self._closed_groups, self._memory, self.keep = parts.closed_groups, parts.memory, keep
        self._objects = parts.references.objects
        #: Dropped samples that are not reported to their producers yet.
        self.unreported: dict[DropReason, list[Entry]] = {}
        #: Samples dropped by the shutdown; None before one.
        self.shutdown_drops: DropCounts | None = None

    def ready(self, reason: DropReason, entries: Sequence[Entry]) -> int:
        """Drop these ready samples, of which groups are whole; returns how many there are."""
        if entries:  # else nothing has left
            self._buffer.remove(entries)
        return self._drop(reason, entries)

    def planned(self, reason: DropReason, entries: Sequence[Entry]) -> None:
        """Drop these samples of an open step, of which groups are whole.

        Their lengths stay counted as dispatched.
        """
        self._drop(reason, entries, dispatched=True)

    def everything(self, reason: DropReason) -> None:
        """Drop all buffered samples; those of open groups for INCOMPLETE_GROUP, unless the reason
        is UNUSED.
        """
        unused = reason is DropReason.UNUSED
        over = "the run was finished" if unused else "the dispatcher was shut down"
        why = f"{over} before its other members came"
        for group in list(self._buffer.groups):
            entries = self._buffer.drop_group(group, why)
            self._drop(reason if unused else DropReason.INCOMPLETE_GROUP, entries)
        self.ready(reason, list(self._buffer.entries()))

    def schema_mismatches(self) -> None:
        """Drop samples that an earlier process accepted with another schema, groups whole.

        Later members of such a group are refused with the reason.
        """
        schema = self._buffer.schema
        why = f"its samples have other fields than the run's ({self._buffer.schema_source})"
        for group in list(self._buffer.groups):
            if group.entries and group.entries[0].sample.schema != schema:
                self._drop(DropReason.SCHEMA, self._buffer.drop_group(group, why))
        others = [entry for entry in self._buffer.entries() if entry.sample.schema != schema]
        self.ready(DropReason.SCHEMA, others)

    # -- open groups ------------------------------------------------------------------------

    def abandon(
        self, group: OpenGroup, why: str, reason: DropReason = DropReason.INCOMPLETE_GROUP,
        *, keep: bool | None = None,
    ) -> None:  # fmt: skip
        """Drop the group, or (keep) mark it complete with the members received so far.

        Later members are refused. why: for them, in words. reason: of the drop.
        """
        keep = self.keep if keep is None else keep
        if keep and group.entries:
            group.size = group.num_accounted
            self._append_size(group)
            self._buffer.complete(group, why)
        else:
            self._drop(reason, self._buffer.drop_group(group, why))

    def abandon_all(self) -> None:
        """Abandon every open group: the stream has ended."""
        for group in list(self._buffer.groups):
            self.abandon(group, "the stream has ended without all of its members")

    def supersede(self, group: OpenGroup) -> None:
        """Drop the members of a group that other producers push anew."""
        self._drop(DropReason.SUPERSEDED, self._buffer.drop_group(group, None))

    def abandon_before(self, version: int, *, untracked: bool) -> None:
        """Abandon open groups of earlier phases. untracked: those without a version, too."""
        why = f"the phase before policy version {version} has ended without all of its members"
        for group in self._buffer.groups.before(version, untracked=untracked):
            self.abandon(group, why)

    def resize(self, group: OpenGroup, size: int) -> None:
        """Set the group's size: all its members, the lost ones included."""
        self._buffer.groups.on_change(group.group_id)
        group.size = max(size, len(group.entries) + group.lost)
        self._append_size(group)
        if group.missing == 0:
            self._buffer.complete(group)

    def lost_member(self, group_id: str, size: int | None, why: str, now: float) -> None:
        """A member is refused or withdrawn: abandon its group, or (keep) shrink it. size: of the
        group, if known.
        """
        if self._closed_groups.why_refused(group_id) is not None:
            return  # the group is closed, and this member was counted
        group = self._buffer.groups.get(group_id)
        if group is None and not self.keep:
            missing = None if size is None else max(0, size - 1)
            self._closed_groups.lack(group_id, why, missing)
            return
        group = group or self._buffer.groups.open(group_id, size, now)
        group.lost += 1
        self._buffer.groups.on_change(group.group_id)
        if not self.keep:
            self.abandon(group, why)
            return
        self._append_size(group)
        if group.missing == 0:
            self._buffer.complete(group)

    def _append_size(self, group: OpenGroup) -> None:
        """Record the group's size with the members present; later ones are journaled with it
        themselves.
        """
        if group.entries and group.size is not None:
            self._append(GroupSized(group.tickets, group.size_to_report))

    def _drop(
        self, reason: DropReason, entries: Sequence[Entry], *, dispatched: bool = False
    ) -> int:
        if entries:
            self._totals.dropped[reason] += len(entries)
            if not dispatched:
                self._totals.dropped_lengths.add([entry.sample.tokens for entry in entries])
            self._memory.forget(entry.sample.sample_id for entry in entries)
            self._objects.done(entries)
            self.unreported.setdefault(reason, []).extend(entries)
            self._append(Dropped(tuple(entry.ticket for entry in entries), reason))
            if self.shutdown_drops is not None and reason in BY_SHUTDOWN:
                self.shutdown_drops.add(reason, entries)
        return len(entries)
