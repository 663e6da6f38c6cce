"""Groups that still lack members: who contributes to them, and which will never be whole.

A group is open from its first member until it is complete or closed. Nothing is reserved for it: a
beginning of a group takes the memory of what has come, and no place in the window.

    every member came, or closed with what came -> complete: its members are ready, all at once
    a member is lost, closed, or overdue        -> dropped whole (or complete without it: keep)

A group is *overdue* when nothing has come for `timeout` seconds and none of its contributors is
there any more: while one is, a member may be under way, however long its rollout takes.

`ClosedGroups`: groups that have ended: a group id names one group, for as long as ids are
remembered.

    a member was accepted --complete, or given up--> every later member is refused
    none was accepted, and one never will be --> others are refused; after the last the id is free

Who pushes such a member is told why it is refused, rather than have it begin a second group under
the id that can never be whole. `horizon` groups that have ended are remembered, then the oldest is
forgotten; each is a fact, so a restart refuses the same.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from math import inf, nextafter

from rollout_dispatcher.core.buffer.entry import Entry, Lowest
from rollout_dispatcher.core.facts import AppendFact, GroupEnded
from rollout_dispatcher.sample import SIZE_AT_CLOSE, Sample

#: Groups that are remembered of which no member was accepted, some hundred bytes each.
MAX_LACKING = 65_536
#: Letters of a reason that are remembered: it may quote an id or two, and more would add up.
MAX_LETTERS = 300


@dataclass(slots=True)
class _Lacking:
    """missing: members still to be refused, None if nobody knows how many."""

    why: str
    missing: int | None


class ClosedGroups:
    """Remembers why; horizon: groups."""

    def __init__(self, horizon: int, append_fact: AppendFact) -> None:
        self._horizon, self._append = horizon, append_fact
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._lacking: OrderedDict[str, _Lacking] = OrderedDict()
        #: Told of a group that is remembered, or may be used again.
        self.on_change: Callable[[str], None] = _ignore

    def __contains__(self, group_id: object) -> bool:
        return group_id in self._ended or group_id in self._lacking

    def __len__(self) -> int:
        return len(self._ended) + len(self._lacking)

    def restore(self, ended: Iterable[tuple[str, str]]) -> None:
        """Remember again what an earlier process remembered, oldest first."""
        self._ended.update(ended)

    def end(self, group_id: str, why: str = "") -> None:
        """Close a group that had members: it is complete, or (why) was abandoned."""
        self._lacking.pop(group_id, None)
        if group_id in self._ended or not self._horizon:
            return
        self._ended[group_id] = why = why[:MAX_LETTERS]
        self._append(GroupEnded(group_id, why))
        self.on_change(group_id)
        if len(self._ended) > self._horizon:
            self._ended.popitem(last=False)

    def lack(self, group_id: str, why: str, missing: int | None) -> None:
        """No member of a group was accepted, and one never will be; `missing` may still come."""
        if missing == 0 or group_id in self:
            return
        self._lacking[group_id] = _Lacking(why, missing)
        self.on_change(group_id)
        if len(self._lacking) > MAX_LACKING:
            self._lacking.popitem(last=False)

    def why_refused(self, group_id: str) -> str | None:
        """In words, why a member that comes now is refused, and counted so; None if it is not."""
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
    """What `on_change` is until somebody waits for groups."""


#: Groups that were told of before their first member.
MAX_EMPTY = 65_536


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group that lacks members.

    size: members in the end, None while nobody knows. lost: members that will never come.
    serial: tells it from others of its id. number: its first sample's ticket, -1 while there is
    none. oldest: the oldest policy version in it, None if none is tracked. grown: when the last
    member came.
    left: contributors that said goodbye. replaced: those under whose name another process is there.
    restored: from an earlier process, which may have known of members that were lost.
    """

    group_id: str
    size: int | None
    grown: float
    serial: int
    number: int = -1
    oldest: int | None = None
    lost: int = 0
    entries: list[Entry] = field(default_factory=list)
    #: Frozen, as most are empty, and an empty set of each group's own has 216 bytes.
    contributors: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    replaced: frozenset[str] = frozenset()
    restored: bool = False

    @property
    def missing(self) -> int | None:
        """Members that are still to come, None while nobody knows."""
        return None if self.size is None else max(0, self.size - self.num_accounted)

    @property
    def num_accounted(self) -> int:
        """Members of which is known what becomes of them: they have come, or never will."""
        return len(self.entries) + self.lost

    @property
    def size_to_report(self) -> int:
        """What a member that comes now says of the size, in effect."""
        return SIZE_AT_CLOSE if self.size is None else max(1, self.size - self.lost)

    @property
    def referenced_bytes(self) -> int:
        """Payload bytes in payload stores."""
        return sum(entry.sample.footprint[1] for entry in self.entries)

    @property
    def tickets(self) -> tuple[int, ...]:
        """Of the members that have come."""
        return tuple(entry.ticket for entry in self.entries)

    def __str__(self) -> str:
        size = "a size told at close" if self.size is None else f"{self.size - self.lost}"
        return f"group {self.group_id} ({len(self.entries)} of {size})"


class OpenGroups:
    """Open groups by id, in the order in which they were opened.

    is_there: whether a producer is there, or may come back. timeout: seconds. closed: told of
    groups that are open no more.
    """

    def __init__(
        self, is_there: Callable[[str], bool], timeout: float, closed: ClosedGroups
    ) -> None:
        self._is_there, self.timeout, self.closed = is_there, timeout, closed
        self._groups: dict[str, OpenGroup] = {}
        self._of_producer: dict[str, dict[OpenGroup, None]] = {}
        #: When to look at which group.
        self._deserted: Lowest[str] = Lowest()
        self._serials = count()
        self._versions: Lowest[str] = Lowest()
        self._untracked: dict[OpenGroup, None] = {}  # with members, none of which has a version
        self._in_memory: dict[OpenGroup, None] = {}  # those of which any payload may be
        #: Told of a group that comes, grows or goes, or has another size.
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
        """A group is told of before its first member, for which it does not wait for ever."""
        group = self._begin(group_id, size, now)
        self._await(group)
        return group

    def _begin(self, group_id: str, size: int | None, now: float) -> OpenGroup:
        group = self._groups[group_id] = OpenGroup(group_id, size, now, next(self._serials))
        self.on_change(group_id)
        return group

    def of(self, sample: Sample, now: float) -> OpenGroup:
        """The group of this sample, which begins with it if it is not open."""
        assert sample.group_id is not None
        group = self._groups.get(sample.group_id)
        if group is None:
            size = None if sample.group_size == SIZE_AT_CLOSE else sample.group_size
            return self._begin(sample.group_id, size, now)
        if group.size is None and sample.group_size != SIZE_AT_CLOSE:
            group.size = sample.group_size
        return group

    def add(self, group: OpenGroup, entry: Entry, now: float) -> None:
        """A member has come."""
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
        if not self._is_there(entry.producer):  # else it is waited for
            self._await(group)

    def _note_version(self, group: OpenGroup, version: int | None) -> None:
        if version is not None and (group.oldest is None or version < group.oldest):
            group.oldest = version
            self._versions.set(group.group_id, version)
            self._untracked.pop(group, None)

    def remove(self, group: OpenGroup, why: str | None) -> None:
        """The group is open no more.

        why: it was abandoned, in words; empty if it is complete; None if members may open a new
        group of its id.
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

    # -- which are asked for -------------------------------------------------------------------

    def before(self, version: int, *, untracked: bool) -> list[OpenGroup]:
        """Groups with members that are older than this, and with `untracked` those of no version.

        Each is returned once, to be abandoned; in the order in which they were opened.
        """
        found = [self._groups[group_id] for group_id in self._versions.take_below(version)]
        if untracked:
            found += self._untracked
        return sorted(found, key=_serial)

    def youngest(self, *, in_stores: bool) -> OpenGroup:
        """The group with members that was opened last; there has to be one.

        in_stores: one of which a member lies in a payload store, if there is any.
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
        """Whether one more may be opened before its first member."""
        return len(self._groups) < MAX_EMPTY

    # -- which will never be whole -------------------------------------------------------------

    def producer_gone(self, producer: str, *, left: bool) -> None:
        """A producer will not come back; left: it said goodbye."""
        for group in self._of_producer.get(producer, ()):
            if left:
                group.left |= {producer}
            self._await(group)

    def producer_replaced(self, producer: str) -> None:
        """Another process is there under this producer's name: the one before it has died."""
        for group in self._of_producer.get(producer, ()):
            group.replaced |= {producer}

    def has_died(self, group: OpenGroup) -> bool:
        """Whether all who contributed are gone, none of them with a goodbye.

        Of those over HTTP, who are nobody, it is not known.
        """
        return all(
            producer in group.replaced
            or (producer != "" and producer not in group.left and not self._is_there(producer))
            for producer in group.contributors
        )

    def overdue(self, now: float) -> list[OpenGroup]:
        """Groups that nothing has come of for too long, and whose contributors are gone."""
        found = []
        for group_id in self._deserted.take_below(nextafter(now, inf)):
            group = self._groups[group_id]
            if group.grown + self.timeout > now:
                self._await(group)
            elif not self._has_contributor(group):
                found.append(group)
        return found

    def next_deadline(self) -> float | None:
        """When `overdue` may have something to say; None if nothing is waited for."""
        return self._deserted.lowest

    def _await(self, group: OpenGroup) -> None:
        """See when it is overdue, if nobody is left who contributes to it."""
        if group.group_id not in self._deserted and not self._has_contributor(group):
            self._deserted.set(group.group_id, group.grown + self.timeout)

    def _has_contributor(self, group: OpenGroup) -> bool:
        return any(map(self._is_there, group.contributors))


def _serial(group: OpenGroup) -> int:
    return group.serial
