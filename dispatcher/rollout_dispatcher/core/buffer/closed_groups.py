"""Groups that were given up while members were still to come.

Who pushes such a member is told why it is refused, rather than have it begin a group anew that can
never be whole. What is remembered is bounded: a group is forgotten when all of its members were
refused, after `timeout` seconds, and beyond `MAX_CLOSED`.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

#: Groups that are remembered, some hundred bytes each; the one given up longest ago is forgotten.
MAX_CLOSED = 65_536

#: How long members are under way of a group that its producer has closed.
UNDER_WAY_SECONDS = 10.0


@dataclass(slots=True)
class _Closed:
    """missing: members still to be refused, None if nobody knows how many."""

    why: str
    missing: int | None
    until: float


class ClosedGroups:
    """Remembers why; timeout: seconds."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._closed: OrderedDict[str, _Closed] = OrderedDict()
        #: Told of a group that is remembered, or may be used again.
        self.on_change: Callable[[str], None] = _ignore

    def __len__(self) -> int:
        return len(self._closed)

    def close(self, group_id: str, why: str, missing: int | None, now: float) -> None:
        """A group was given up; `missing` of its members are still to come."""
        if missing == 0:
            return
        self.on_change(group_id)
        self._closed[group_id] = _Closed(why, missing, now + self._timeout)
        self._closed.move_to_end(group_id)
        if len(self._closed) > MAX_CLOSED:
            self._closed.popitem(last=False)

    def closed(self, group_id: str, now: float, *, for_good: bool) -> bool:
        """A producer closes the group; returns whether it was given up before.

        Its id may be used again: at once if no member comes any more (`for_good`), else when those
        that are under way have come.
        """
        known = self._closed.get(group_id)
        if known is not None:
            self.on_change(group_id)
        if known is not None and for_good:
            del self._closed[group_id]
        elif known is not None:
            known.until = min(known.until, now + UNDER_WAY_SECONDS)
        return known is not None

    def why_refused(self, group_id: str, now: float) -> str | None:
        """Why a member that comes now is refused, and counted as refused; None if it is not."""
        closed = self._closed.get(group_id)
        if closed is None:
            return None
        if closed.until < now:
            del self._closed[group_id]
            return None
        if closed.missing is not None:
            closed.until = now + self._timeout
            closed.missing -= 1
            if not closed.missing:
                del self._closed[group_id]
        return closed.why


def _ignore(group_id: str) -> None:
    """What `on_change` is until somebody waits for groups."""
