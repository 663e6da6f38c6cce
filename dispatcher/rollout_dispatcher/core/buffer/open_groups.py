"""Groups that lack members, their contributors, and groups that have ended.

A group is open from its first member until it is complete or closed. Nothing is reserved for it: an
incomplete group takes the memory of its accepted members, and no place in the window.

    every member accepted, or closed with those -> complete: its members are ready, all at once
    a member is lost, closed, or overdue        -> dropped whole (or complete without it: keep)

A group is *overdue* when no member was accepted for `timeout` seconds and none of its contributors
is connected or may come back: otherwise a member may be under way, however long its rollout takes.

`ClosedGroups`: groups that have ended. A group id names one group while it is remembered.

    a member was accepted --complete, or abandoned--> every later member is refused
    none was accepted, and one never will be --> others are refused; after the last the id is free

A later member is refused with the reason, as a second group of the same id could never be complete.
`horizon` ended groups are remembered, then the oldest is forgotten; each is a fact, so a restart
refuses the same.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from math import inf, nextafter

from rollout_dispatcher.core.buffer.entry import Entry, Lowest
from rollout_dispatcher.core.facts import AppendFact, GroupEnded
from rollout_dispatcher.sample import SIZE_AT_CLOSE, Sample

#: Remembered groups without an accepted member, some hundred bytes each.
MAX_LACKING = 65_536
#: Characters of a reason that are remembered, enough to quote two ids.
MAX_LETTERS = 300


@dataclass(slots=True)
class _Lacking:
    """A group without an accepted member. missing: members still to refuse, None if not known."""

    why: str
    missing: int | None


class ClosedGroups:
    """Ended groups with the reasons. horizon: number of them."""

    def __init__(self, horizon: int, append_fact: AppendFact) -> None:
        self._horizon, self._append = horizon, append_fact
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._lacking: OrderedDict[str, _Lacking] = OrderedDict()
        #: Called with the id of a group that was closed.
        self.on_change: Callable[[str], None] = _ignore

    def __contains__(self, group_id: object) -> bool:
        return group_id in self._ended or group_id in self._lacking

    def __len__(self) -> int:
        return len(self._ended) + len(self._lacking)

    def restore(self, ended: Iterable[tuple[str, str]]) -> None:
        """Restore the ended groups of an earlier process, oldest first."""
        self._ended.update(ended)

    def end(self, group_id: str, why: str = "") -> None:
        """Close a group that had members. why: it was abandoned; empty if it is complete."""
        self._lacking.pop(group_id, None)
        if group_id in self._ended or not self._horizon:
            return
        self._ended[group_id] = why = why[:MAX_LETTERS]
        self._append(GroupEnded(group_id, why))
        self.on_change(group_id)
        if len(self._ended) > self._horizon:
            self._ended.popitem(last=False)

    def lack(self, group_id: str, why: str, missing: int | None) -> None:
        """Close a group without an accepted member. missing: members that may still be pushed."""
        if missing == 0 or group_id in self:
            return
        self._lacking[group_id] = _Lacking(why, missing)
        self.on_change(group_id)
        if len(self._lacking) > MAX_LACKING:
            self._lacking.popitem(last=False)

    def why_refused(self, group_id: str) -> str | None:
        """Why a new member is refused, in words, and count the refusal; None if it is not."""
        if (why := self._ended.get(group_id)) is not None:
            if not why:
                return f"group {group_id} is complete: all of its members have come"
            return f"group {group_id} was given up: {why}"
        lacking = self._lacking.get(group_id)
        if lacking is None:
            return None
        if lacking.missing is not None:
            lacking.missing -= 1
            if not lacking.missing:
                del self._lacking[group_id]
        return f"group {group_id} was given up: {lacking.why}"


def _ignore(group_id: str) -> None:
    """The default of `on_change`."""


#: Groups that may be opened before their first member.
MAX_EMPTY = 65_536


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group that lacks members.

    size: final number of members, None while not known. lost: members that will never be accepted.
    serial: identifies it among groups of its id. number: its first sample's ticket, -1 without one.
    oldest: the oldest policy version in it, None if none is tracked. grown: time of the last
    accepted member. left: contributors that left with a goodbye. replaced: those whose name another
    process uses now. restored: whether it is from an earlier process, which may have known of lost
    members.
    """

    group_id: str
    size: int | None
    grown: float
    serial: int
    number: int = -1
    oldest: int | None = None
    lost: int = 0
    entries: list[Entry] = field(default_factory=list)
    #: Frozen sets, as most are empty, and an empty set takes 216 bytes.
    contributors: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    replaced: frozenset[str] = frozenset()
    restored: bool = False

    @property
    def missing(self) -> int | None:
        """Members that are still expected, None while not known."""
        return None if self.size is None else max(0, self.size - self.num_accounted)

    @property
    def num_accounted(self) -> int:
        """Members that were accepted or lost."""
        return len(self.entries) + self.lost

    @property
    def size_to_report(self) -> int:
        """The `group_size` of a member that is accepted now."""
        return SIZE_AT_CLOSE if self.size is None else max(1, self.size - self.lost)

    @property
    def referenced_bytes(self) -> int:
        """Payload bytes in payload stores."""
        return sum(entry.sample.footprint[1] for entry in self.entries)

    @property
    def tickets(self) -> tuple[int, ...]:
        """Tickets of its accepted members."""
        return tuple(entry.ticket for entry in self.entries)

    def __str__(self) -> str:
        size = "a size set at close" if self.size is None else f"{self.size - self.lost}"
        return f"group {self.group_id} ({len(self.entries)} of {size})"


class OpenGroups:
    """Open groups by id, in the order of their opening.

    is_there: whether a producer is there or may come back. timeout: seconds. closed: records the
    groups that end.
    """

    def __init__(
        self, is_there: Callable[[str], bool], timeout: float, closed: ClosedGroups
    ) -> None:
        self._is_there, self.timeout, self.closed = is_there, timeout, closed
        self._groups: dict[str, OpenGroup] = {}
        self._of_producer: dict[str, dict[OpenGroup, None]] = {}
        #: When each deserted group may be overdue.
        self._deserted: Lowest[str] = Lowest()
        self._serials = count()
        self._versions: Lowest[str] = Lowest()
        self._untracked: dict[OpenGroup, None] = {}  # with members, all without a version
        self._in_memory: dict[OpenGroup, None] = {}  # groups with members that may be in memory
        #: Called with the id of a group that is opened, grows, is closed or changes its size.
        self.on_change: Callable[[str], None] = _ignore
        #: Samples of all open groups.
        self.samples = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[OpenGroup]:
        return iter(self._groups.values())

    def get(self, group_id: str) -> OpenGroup | None:
        """The group, if it is open."""
        return self._groups.get(group_id)

    def open(self, group_id: str, size: int | None, now: float) -> OpenGroup:
        """Open a group before its first member; without one it is overdue after `timeout`."""
        group = self._begin(group_id, size, now)
        self._await(group)
        return group

    def _begin(self, group_id: str, size: int | None, now: float) -> OpenGroup:
        group = self._groups[group_id] = OpenGroup(group_id, size, now, next(self._serials))
        self.on_change(group_id)
        return group

    def of(self, sample: Sample, now: float) -> OpenGroup:
        """The group of this sample, opened if it is not open."""
        assert sample.group_id is not None
        group = self._groups.get(sample.group_id)
        if group is None:
            size = None if sample.group_size == SIZE_AT_CLOSE else sample.group_size
            return self._begin(sample.group_id, size, now)
        if group.size is None and sample.group_size != SIZE_AT_CLOSE:
            group.size = sample.group_size
        return group

    def add(self, group: OpenGroup, entry: Entry, now: float) -> None:
        """Add an accepted member."""
        if not group.entries:
            group.number = entry.ticket
            self._untracked[group] = None
        entry.group = group.number
        group.entries.append(entry)
        self.samples += 1
        self.on_change(group.group_id)
        group.grown = now
        self._note_version(group, entry.sample.judged_version)
        if entry.sample.is_in_memory:
            self._in_memory[group] = None
        if entry.producer not in group.contributors:
            group.contributors |= {entry.producer}
            self._of_producer.setdefault(entry.producer, {})[group] = None
        group.left -= {entry.producer}
        if not self._is_there(entry.producer):  # else the group waits for it
            self._await(group)

    def _note_version(self, group: OpenGroup, version: int | None) -> None:
        if version is not None and (group.oldest is None or version < group.oldest):
            group.oldest = version
            self._versions.set(group.group_id, version)
            self._untracked.pop(group, None)

    def remove(self, group: OpenGroup, why: str | None) -> None:
        """Remove a group that is no longer open.

        why: the reason for which it was abandoned; empty if it is complete; None if members may
        open a new group of its id.
        """
        del self._groups[group.group_id]
        if why is not None and group.entries:
            self.closed.end(group.group_id, why)
        elif why:
            self.closed.lack(group.group_id, why, group.missing)
        self.on_change(group.group_id)
        self._versions.remove(group.group_id)
        self._deserted.remove(group.group_id)
        self._untracked.pop(group, None)
        self._in_memory.pop(group, None)
        self.samples -= len(group.entries)
        for producer in group.contributors:
            theirs = self._of_producer[producer]
            del theirs[group]
            if not theirs:
                del self._of_producer[producer]

    # -- queries -------------------------------------------------------------------------------

    def before(self, version: int, *, untracked: bool) -> list[OpenGroup]:
        """Groups with members older than this; with `untracked` those without a version too.

        Each is returned once, to be abandoned, in the order of their opening.
        """
        found = [self._groups[group_id] for group_id in self._versions.take_below(version)]
        if untracked:
            found += self._untracked
        return sorted(found, key=_serial)

    def youngest(self, *, in_stores: bool) -> OpenGroup:
        """The group with members that was opened last; there has to be one.

        in_stores: prefer one with a member in a payload store.
        """
        youngest_first = (group for group in reversed(self._groups.values()) if group.entries)
        first = next(youngest_first)
        if not in_stores or first.referenced_bytes:
            return first
        return next((group for group in youngest_first if group.referenced_bytes), first)

    def in_memory(self) -> list[Entry]:
        """Members whose payloads are in memory, group by group."""
        found: list[Entry] = []
        for group in sorted(self._in_memory, key=_serial):
            members = [entry for entry in group.entries if entry.sample.is_in_memory]
            if not members:
                del self._in_memory[group]
            found += members
        return found

    @property
    def may_open_empty(self) -> bool:
        """Whether one more group may be opened before its first member."""
        return len(self._groups) < MAX_EMPTY

    # -- groups that will never be complete ----------------------------------------------------

    def producer_gone(self, producer: str, *, left: bool) -> None:
        """A producer will not come back. left: whether it left with a goodbye."""
        for group in self._of_producer.get(producer, ()):
            if left:
                group.left |= {producer}
            self._await(group)

    def producer_replaced(self, producer: str) -> None:
        """Another process uses this producer's name: the one before has died."""
        for group in self._of_producer.get(producer, ()):
            group.replaced |= {producer}

    def has_died(self, group: OpenGroup) -> bool:
        """Whether all contributors are gone without a goodbye.

        False for contributors over HTTP, which have no name.
        """
        return all(
            producer in group.replaced
            or (producer != "" and producer not in group.left and not self._is_there(producer))
            for producer in group.contributors
        )

    def overdue(self, now: float) -> list[OpenGroup]:
        """Groups whose last member is too old and whose contributors are gone."""
        found = []
        for group_id in self._deserted.take_below(nextafter(now, inf)):
            group = self._groups[group_id]
            if group.grown + self.timeout > now:
                self._await(group)
            elif not self._has_contributor(group):
                found.append(group)
        return found

    def next_deadline(self) -> float | None:
        """When `overdue` may return a group next; None if no group is deserted."""
        return self._deserted.lowest

    def _await(self, group: OpenGroup) -> None:
        """Schedule the check whether a group without contributors is overdue."""
        if group.group_id not in self._deserted and not self._has_contributor(group):
            self._deserted.set(group.group_id, group.grown + self.timeout)

    def _has_contributor(self, group: OpenGroup) -> bool:
        return any(map(self._is_there, group.contributors))


def _serial(group: OpenGroup) -> int:
    return group.serial
