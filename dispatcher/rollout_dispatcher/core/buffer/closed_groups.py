"""Groups that have ended: a group id names one group, for as long as ids are remembered.

    a member was accepted --complete, or given up--> every later member is refused
    none was accepted, and one never will be --> others are refused; after the last the id is free

Who pushes such a member is told why it is refused, rather than have it begin a second group under
the id that can never be whole. `horizon` groups that have ended are remembered, then the oldest is
forgotten; each is a fact, so a restart refuses the same.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rollout_dispatcher.core.facts import GroupEnded, Note

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

    def __init__(self, horizon: int, note: Note) -> None:
        self._horizon, self._note = horizon, note
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
        """A group that had members is complete, or was given up and `why` says so."""
        self._lacking.pop(group_id, None)
        if group_id in self._ended or not self._horizon:
            return
        self._ended[group_id] = why = why[:MAX_LETTERS]
        self._note(GroupEnded(group_id, why))
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
