"""Says in the log which accepted samples are given up, and why: a line a reason now and then.

Invariant: every drop is in some line, by its reason, and the first of them is told at once. What an
effect of its own says (groups for want of room, what is unresolved) and what a shutdown costs is
told where that is decided.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rollout_dispatcher.core.buffer.dropping import Losses
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.facts import DropReason

log = logging.getLogger(__name__)

#: Where samples expire, each step may drop some.
INTERVAL_SECONDS = 10.0
#: Level and words of each reason; what the settings ask for is no warning.
WORDS: Final = {
    DropReason.STALE: (
        logging.WARNING, "older than --max-staleness allows when their step was planned",
    ),
    DropReason.INCOMPLETE_GROUP: (logging.WARNING, "of groups that cannot become whole any more"),
    DropReason.SUPERSEDED: (
        logging.WARNING, "of producers that are gone and whose groups another one pushes anew",
    ),
    DropReason.SCHEMA: (logging.WARNING, "accepted with other fields than --fields declares now"),
    DropReason.OVERSIZE: (
        logging.INFO, "longer than --micro-batch-tokens, as --oversize drop asks for",
    ),
    DropReason.LAST_BATCH: (
        logging.INFO, "of the partial batch at the end, as --last-batch drop asks for",
    ),
    DropReason.UNUSED: (logging.INFO, "not used when the DP ranks finished the run"),
}  # fmt: skip


@dataclass(slots=True)
class _Untold:
    """What was dropped for one reason since its last line. due: when the next may be written."""

    due: float
    losses: Losses = field(default_factory=Losses)


class DropsLog:
    """Lines for one run."""

    def __init__(self) -> None:
        self._untold: dict[DropReason, _Untold] = {}

    def note(self, dropped: Mapping[DropReason, Sequence[Entry]], now: float) -> None:
        """These were dropped."""
        for reason in filter(dropped.__contains__, WORDS):  # in that order
            self._untold.setdefault(reason, _Untold(now)).losses.note(reason, dropped[reason])
        self.check(now)

    def check(self, now: float) -> None:
        """Write what is due."""
        for reason, untold in self._untold.items():
            if untold.losses.samples and now >= untold.due:
                self._write(reason, untold)
                untold.due = now + INTERVAL_SECONDS

    def close(self) -> None:
        """Write what is left."""
        for reason, untold in self._untold.items():
            if untold.losses.samples:
                self._write(reason, untold)

    def _write(self, reason: DropReason, untold: _Untold) -> None:
        level, why = WORDS[reason]
        count = untold.losses.samples
        log.log(
            level, "%d accepted %s dropped (%s), %s: %s",
            count, "sample is" if count == 1 else "samples are", reason, why, untold.losses.named,
        )  # fmt: skip
        untold.losses = Losses()
