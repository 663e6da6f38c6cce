"""Who is there to release objects: any client that opens payload stores, one thing at a time.

Whoever could not do it for a store *rests* from that store, longer each time, while others are
asked; whoever does not answer is not asked again until it does. Nobody is given up for good.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

#: A worker that failed is asked again after so long, twice as long each time up to the second.
FIRST_REST_S, LONGEST_REST_S = 1.0, 60.0


@dataclass(slots=True)
class _Rest:
    until: float
    seconds: float


class Workers:
    """Workers by name; who was asked last is the last to be asked again."""

    def __init__(self) -> None:
        self._idle: dict[str, None] = {}
        self._busy: dict[str, int] = {}  # with what, by number
        self._leaving: set[str] = set()
        self._rests: dict[tuple[str, str], _Rest] = {}

    def __len__(self) -> int:
        return len(self._idle) + len(self._busy)

    def there(self, worker: str) -> None:
        """It may be asked."""
        self.gone(worker)
        self._idle[worker] = None

    def leaves(self, worker: str) -> None:
        """It may be asked, but waits to leave."""
        if worker in self._idle or worker in self._busy:
            self._leaving.add(worker)

    def gone(self, worker: str) -> None:
        """It may not."""
        self._idle.pop(worker, None)
        self._busy.pop(worker, None)
        self._leaving.discard(worker)
        for known in [known for known in self._rests if known[0] == worker]:
            del self._rests[known]

    def is_leaving(self, worker: str) -> bool:
        """Whether it waits to leave."""
        return worker in self._leaving

    @property
    def staying(self) -> int:
        """How many are there that do not wait to leave."""
        return len(self) - len(self._leaving)

    def busy_with(self, worker: str) -> int | None:
        """What it was asked and has not answered; None for nothing."""
        return self._busy.get(worker)

    # -- asking -----------------------------------------------------------------------------

    def ready(self, store: str, now: float) -> str | None:
        """Who can be asked about this store now."""
        return next((who for who in self._idle if self._rested(who, store) <= now), None)

    def ready_at(self, stores: Iterable[str]) -> float | None:
        """When somebody can be asked about one of these stores; None if nobody is idle."""
        return min(
            (self._rested(who, store) for store in stores for who in self._idle), default=None
        )

    def asked(self, worker: str, number: int) -> None:
        """It is at work."""
        del self._idle[worker]
        self._busy[worker] = number

    def answered(self, worker: str, number: int) -> bool:
        """It has answered; returns whether it had been asked that."""
        if self._busy.get(worker) != number:
            return False
        del self._busy[worker]
        self._idle[worker] = None
        return True

    def succeeded(self, worker: str, store: str) -> None:
        """It can do that."""
        self._rests.pop((worker, store), None)

    def failed(self, worker: str, store: str, now: float) -> None:
        """It could not do that just now."""
        rest = self._rests.get((worker, store))
        seconds = FIRST_REST_S if rest is None else min(2 * rest.seconds, LONGEST_REST_S)
        self._rests[worker, store] = _Rest(now + seconds, seconds)

    def _rested(self, worker: str, store: str) -> float:
        rest = self._rests.get((worker, store))
        return -math.inf if rest is None else rest.until
