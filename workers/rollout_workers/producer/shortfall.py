"""Members of groups that were withdrawn, until they are pushed again or given up.

A group that is short of a member can never complete, so the dispatcher is told, but not before the
caller had `GRACE_S` to push it once more.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from rollout_dispatcher.protocol import messages as m
from rollout_workers.producer.pushes import PendingPush

#: A member that was withdrawn may be pushed again for so long before its group is given up.
GRACE_S = 10.0


@dataclass(slots=True)
class _Shortfall:
    """What one group is short of, by number, and when that is told.

    size: of the group, None if it is told at close. members: what each is known by.
    """

    size: int | None
    members: dict[int, str | bytes] = field(default_factory=dict)
    due: float = math.inf


class Shortfalls:
    """Of all groups that are short of members."""

    def __init__(self) -> None:
        self._groups: dict[str, _Shortfall] = {}

    def due(self) -> Iterator[float]:
        """When there is something to tell, for each group."""
        return (shortfall.due for shortfall in self._groups.values())

    def withdrawn(self, push: PendingPush, now: float) -> None:
        """Members are withdrawn: their groups lack them, unless they are soon pushed once more."""
        message = push.message
        if message.group_ids is None:
            return
        identities = push.identities()
        for at, group_id in enumerate(message.group_ids):
            if group_id is not None:
                size = None if message.group_sizes is None else message.group_sizes[at] or None
                shortfall = self._groups.setdefault(group_id, _Shortfall(size))
                shortfall.members[message.first_seq + at] = identities[at]
                shortfall.due = now + GRACE_S

    def pushed_again(self, push: PendingPush) -> None:
        """What was withdrawn of these groups may be in this push."""
        groups: Iterable[str | None] = push.message.group_ids or ()
        if self._groups.keys().isdisjoint(groups):
            return
        for identity, group_id in zip(push.identities(), groups, strict=True):
            shortfall = None if group_id is None else self._groups.get(group_id)
            if shortfall is None or group_id is None:
                continue
            again = [seq for seq, known in shortfall.members.items() if known == identity]
            for seq in again[:1]:
                del shortfall.members[seq]
            if not shortfall.members:
                del self._groups[group_id]

    def take_due(self, now: float) -> list[m.CloseGroup]:
        """What was not pushed again in time; it is said like a control."""
        late = [(group, short) for group, short in self._groups.items() if short.due <= now]
        for group_id, _ in late:
            del self._groups[group_id]
        return [
            m.CloseGroup(group_id=group_id, size=short.size, withdrawn=list(part))
            for group_id, short in late
            for part in _batched(short.members)
        ]


def _batched(numbers: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """As many at a time as one message takes."""
    left = iter(numbers)
    return iter(lambda: tuple(islice(left, m.MAX_SAMPLES)), ())
