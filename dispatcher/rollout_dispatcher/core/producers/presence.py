"""Producers come and go, and what they leave behind: pushes that wait, and beginnings of groups.

A group whose producers are gone is given up when its time is over (open_groups.py).
"""

from rollout_dispatcher.core.admission.admission import Admission
from rollout_dispatcher.core.buffer.dropping import Dropping
from rollout_dispatcher.core.buffer.open_groups import OpenGroups
from rollout_dispatcher.core.producers.producers import Producers


class Presence:
    """Who is there, and what follows when somebody is not."""

    def __init__(
        self, producers: Producers, groups: OpenGroups, admission: Admission, dropping: Dropping
    ) -> None:
        self._producers, self._groups = producers, groups
        self._admission, self._dropping = admission, dropping

    def lost(self, producer: str, now: float, *, for_good: bool) -> None:
        """A producer's connection is lost, `for_good` if it said goodbye."""
        self._admission.producer_gone(producer)
        gone = self._producers.lost(producer, now, for_good=for_good)
        self._gone(gone, left=producer if for_good else "")

    def tick(self, now: float) -> None:
        """Give up producers that are away for too long, and groups that nobody contributes to."""
        self._gone(self._producers.expire(now))
        why = (
            f"no member had come for {self._groups.timeout:g} s (--group-timeout), and none of its "
            "producers was there"
        )
        for group in self._groups.overdue(now):
            self._dropping.give_up(group, why)

    def next_deadline(self) -> float | None:
        """When `tick` is wanted next; None if nothing is waited for."""
        overdue, expired = self._groups.next_deadline(), self._producers.next_deadline()
        if overdue is None or expired is None:
            return expired if overdue is None else overdue
        return min(overdue, expired)

    def connected(self, producer: str, incarnation: str) -> None:
        """A producer is there; incarnation: tells its process from others, empty if it does not."""
        if self._producers.connected(producer, incarnation):
            self._groups.producer_replaced(producer)

    def _gone(self, producers: list[str], left: str = "") -> None:
        for producer in producers:
            self._groups.producer_gone(producer, left=producer == left)
