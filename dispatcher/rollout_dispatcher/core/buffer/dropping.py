"""Accepted samples that will never be trained on: dropped from the buffer, counted, and a fact.

Invariant: what leaves the buffer other than into a step, or an open step, leaves it here, with its
reason; a group is dropped whole. A group that cannot be whole is dropped, or made whole of what has
come (`keep`).
"""

from collections.abc import Sequence

from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.closed_groups import ClosedGroups
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.buffer.losses import BY_SHUTDOWN, Losses
from rollout_dispatcher.core.buffer.open_groups import OpenGroup
from rollout_dispatcher.core.facts import Dropped, DropReason, GroupSized, Note
from rollout_dispatcher.core.producers.duplicates import DuplicateMemory
from rollout_dispatcher.core.references.objects import Objects
from rollout_dispatcher.core.totals import Totals


class Dropping:
    """The only way out but training. keep: groups that lack members are trained on."""

    def __init__(
        self,
        buffer: SampleBuffer,
        totals: Totals,
        closed_groups: ClosedGroups,
        memory: DuplicateMemory,
        note: Note,
        *,
        objects: Objects,
        keep: bool,
    ) -> None:
        self._buffer, self._totals, self._note = buffer, totals, note
        self._closed_groups, self._memory, self.keep = closed_groups, memory, keep
        self._objects = objects
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
