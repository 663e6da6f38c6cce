"""Relief: what makes capacity, and lets in who was held back for want of it.

Samples leave the buffer in steps, or are dropped; payloads of groups that lack members go to the
journal, if there is one, and come back for their step; and if nothing else can go on, the youngest
beginning of a group is given up.
"""

from rollout_dispatcher.core.admission.admission import Admission
from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.dropping import Dropping
from rollout_dispatcher.core.buffer.limits import MEMORY_CAP
from rollout_dispatcher.core.config import DispatchConfig
from rollout_dispatcher.core.effects import Effect, GroupGivenUp, PayloadsToJournal
from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.core.planning.selection import Selection

#: Capacity that was made shows after this share of `max_wait`: before, no more is made.
RELIEF_SHOWS_AFTER = 1 / 8


class Relief:
    """Makes capacity."""

    def __init__(
        self,
        config: DispatchConfig,
        buffer: SampleBuffer,
        admission: Admission,
        dropping: Dropping,
        selection: Selection,
    ) -> None:
        self._durable, self._max_wait = config.durable, config.trigger.max_wait
        self._buffer, self._held = buffer, admission.held
        self._admission, self._capacity = admission, admission.capacity
        self._dropping, self._selection = dropping, selection
        self._departures = (0, 0)

    def configure(self, config: DispatchConfig) -> None:
        """From now on wait so long; who was held back may come in."""
        self._max_wait = config.trigger.max_wait
        self.look_again()

    # -- who was held back --------------------------------------------------------------------

    def look_again(self) -> None:
        """Who was held back may come in now, though nobody has left the buffer or the line."""
        self._departures = (-1, -1)

    @property
    def is_due(self) -> bool:
        """Whether something has left the buffer since, or the line: who was held may come in."""
        return self._departures != (self._buffer.departures, self._held.changes)

    def let_in(self, now: float) -> list[Effect]:
        """Let in who was held back; what that makes leave lets others in, the next time."""
        self._departures = (self._buffer.departures, self._held.changes)
        return self._admission.retry(now)

    # -- what goes ------------------------------------------------------------------------------

    def help(self, now: float) -> list[Effect]:
        """Beginnings of groups fill the memory: the journal takes their payloads, if there is one.

        They come back for their step.
        """
        capacity = self._capacity
        if not self._durable or capacity.helped_since is not None or capacity.pressed is None:
            return []
        if capacity.pressed.cap != MEMORY_CAP or capacity.shortfall() <= 0:
            return []
        entries = tuple(self._buffer.groups.in_memory())
        if not entries:
            return []
        capacity.helped_since = now
        return [PayloadsToJournal(entries)]

    def drop_unwanted(self) -> int:
        """Drop what the next step may not have; returns how many samples that were."""
        return sum(self._dropping.ready(*unwanted) for unwanted in self._selection.unwanted())

    def give_up_youngest(self, now: float) -> list[Effect]:
        """Beginnings of groups fill a hard cap: the youngest is given up, and its producers told.

        There is one with samples, or nobody would be held back.
        """
        cap = self._capacity.pressed
        # What a journal can take then shows after a while, but not after all of the wait again.
        self._capacity.last_moved = now - self._max_wait * (1 - RELIEF_SHOWS_AFTER)
        in_stores = self._capacity.at_stores_cap
        youngest = self._buffer.groups.youngest(in_stores=in_stores)
        given_up = len(youngest.entries)
        remedy = "--referenced-bytes" if in_stores else "--buffer-bytes or use a journal"
        why = f"there was no room for all open groups; raise {remedy}"
        self._dropping.give_up(youngest, why, DropReason.NO_ROOM)
        self.look_again()
        assert cap is not None
        return [GroupGivenUp(youngest.group_id, given_up, cap)]
