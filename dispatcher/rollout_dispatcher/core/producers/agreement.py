"""When a phase, or the stream, ends: everybody who contributed has said so, or a controller has.

    asked for --everybody is done, or gone, or it is forced--> decided
    decided --what waited for room before that has come in--> ended

From the decision on, what comes and belongs to it is refused; what was held back before is let in
first. Invariant: an end is decided once and ended once, phases in the order of their versions.
"""

from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush, nsmallest

from rollout_dispatcher.core.admission.admission import Admission
from rollout_dispatcher.core.producers.producers import Producers
from rollout_dispatcher.errors import ProtocolError


class _Stage(IntEnum):
    """How far an end has come."""

    ASKED, DECIDED = 1, 2


#: Ends that may be asked for and not have come: a trainer is a few versions behind at the most.
MAX_ENDS = 1024

#: An end: the policy version of a phase, or None for the stream.
End = int | None


class Agreement:
    """Ends that were asked for, by version; the stream's comes after all of them."""

    def __init__(self, producers: Producers, admission: Admission) -> None:
        self._producers, self._admission = producers, admission
        self._asked: dict[End, _Stage] = {}
        self._forced: set[End] = set()
        # Phases that were asked for, and those of them that are not forced, as heaps: lowest first.
        self._phases: list[int] = []
        self._unforced: list[int] = []

    # -- producers say so -------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Whether any producer has contributed anything."""
        return self._producers.begun

    def ends_phase(self, producer: str, version: int) -> tuple[int, bool]:
        """A producer pushes nothing older than `version`; returns all that it has said so far."""
        self._producers.ends_phase(producer, version)
        self._admission.held.excuse(producer)  # it has pushed that before
        return self._producers.word(producer)

    def ends_stream(self, producer: str) -> tuple[int, bool]:
        """A producer pushes nothing more; returns all that it has said so far."""
        self._producers.ends_stream(producer)
        self._admission.held.excuse(producer)
        return self._producers.word(producer)

    # -- ends come --------------------------------------------------------------------------

    @property
    def num_pending(self) -> int:
        """How many ends were asked for and have not come."""
        return len(self._asked)

    def pending(self, limit: int) -> list[End]:
        """The first of them, phases in the order of their versions before the stream's."""
        ends: list[End] = [*nsmallest(limit, self._phases)]
        return [*ends, None] if None in self._asked and len(ends) < limit else ends

    def is_decided(self, end: End) -> bool:
        """Whether it is decided, or forced, and waits for what was held back before."""
        return end in self._forced or self._asked.get(end) is _Stage.DECIDED

    @property
    def decided(self) -> bool:
        """Whether an end is decided, and waits for what was held back before."""
        return bool(self._asked) and self._asked[self._first] is _Stage.DECIDED

    def check(self, end: End) -> None:
        """Raise ProtocolError if no more ends may be asked for."""
        if len(self._asked) >= MAX_ENDS and end is not None and end not in self._asked:
            raise ProtocolError(
                f"the ends of {MAX_ENDS} phases were asked for and wait for other producers; ask "
                f"for that of policy version {end} when some of them have come"
            )

    def ask(self, end: End, *, force: bool = False) -> None:
        """A producer has said so; with `force` it speaks for all, and of what comes before."""
        if end not in self._asked:
            self._asked[end] = _Stage.ASKED
            if end is not None:
                heappush(self._phases, end)
                heappush(self._unforced, end)
        if force:
            while self._unforced and (end is None or self._unforced[0] <= end):
                self._forced.add(heappop(self._unforced))
            self._forced.add(end)

    def waits_for(self, end: End) -> list[str]:
        """Producers that have not said so; looks at all of them, for words."""
        found = self._producers.before_end() if end is None else self._producers.before_phase(end)
        return list(found)

    def pending_waits(self, end: End) -> list[str]:
        """The same of an end that was asked for and is not decided; nobody otherwise."""
        pending = end in self._asked and not self.is_decided(end)
        return self.waits_for(end) if pending else []

    def settle(self, decided: Callable[[End], None], ended: Callable[[End], None]) -> None:
        """Decide what everybody has agreed to, and end what is decided and has come in."""
        while self._asked:
            end = self._first
            if self._asked[end] is _Stage.ASKED:
                if end not in self._forced and self._is_waited_for(end):
                    return
                self._asked[end] = _Stage.DECIDED
                self._admission.held.excuse()
                decided(end)
            if self._admission.held.waits(end):
                return
            self._forget(end)
            ended(end)

    @property
    def _first(self) -> End:
        """The end that comes first, of those that were asked for; there has to be one."""
        return self._phases[0] if self._phases else None

    def _is_waited_for(self, end: End) -> bool:
        producers = self._producers
        return producers.end_is_waited_for() if end is None else producers.phase_is_waited_for(end)

    def _forget(self, first: End) -> None:
        del self._asked[first]
        if first is not None:
            heappop(self._phases)
            if first not in self._forced:
                heappop(self._unforced)
        self._forced.discard(first)
