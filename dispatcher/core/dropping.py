"""Accepted samples that will never be trained on: dropped from the buffer, counted, and a fact.

Invariant: what leaves the buffer other than into a step leaves it here, with its reason; a group is
dropped whole.
"""

from collections.abc import Callable

from dispatcher.core.buffer import Entry, SampleBuffer
from dispatcher.core.events import DropReason
from dispatcher.core.facts import Dropped, Note
from dispatcher.core.losses import Losses
from dispatcher.core.totals import Totals


class Dropping:
    """The only way out of the buffer but a step."""

    def __init__(self, buffer: SampleBuffer, totals: Totals, note: Note) -> None:
        self._buffer, self._totals, self._note = buffer, totals, note
        #: What a shutdown has cost; None before there is one.
        self.losses: Losses | None = None

    def ready(self, reason: DropReason, doomed: Callable[[Entry], bool]) -> int:
        """Drop ready samples for which `doomed` holds, with their groups; returns how many."""
        return self._drop(reason, self._buffer.drop_ready(doomed))

    def group(self, group_id: str) -> None:
        """Drop an open group, if there is one of that name."""
        self._drop(DropReason.INCOMPLETE_GROUP, self._buffer.drop_group(group_id))

    def open_groups(self, doomed: Callable[[Entry], bool] = lambda _: True) -> None:
        """Drop the open groups that have a member for which `doomed` holds."""
        for group_id in [
            group_id
            for group_id, _, entries in self._buffer.open_groups()
            if any(doomed(entry) for entry in entries)
        ]:
            self.group(group_id)

    def everything(self, reason: DropReason) -> None:
        """Drop what is left; open groups for being incomplete, whatever the reason."""
        self.open_groups()
        self.ready(reason, lambda _: True)

    def _drop(self, reason: DropReason, entries: list[Entry]) -> int:
        if entries:
            self._totals.dropped[reason] += len(entries)
            self._note(Dropped(tuple(entry.ticket for entry in entries), reason))
            if self.losses is not None:
                self.losses.note(reason, entries)
        return len(entries)
