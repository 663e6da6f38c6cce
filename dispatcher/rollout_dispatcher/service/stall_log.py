"""Says in the log whom the next step waits for, once ranks have waited for long or stand still.

A run that is bound by generation waits between steps by nature: so not at once, and not often.
"""

import logging
import math

from rollout_dispatcher.core.dispatch import Dispatch

log = logging.getLogger(__name__)

#: Ranks that have waited for so long are spoken of, and again each time that this has passed.
FIRST_AFTER_SECONDS, AGAIN_AFTER_SECONDS = 10.0, 60.0


class StallLog:
    """Looks at one core, as often as it is asked to."""

    def __init__(self, core: Dispatch) -> None:
        self._core = core
        self._silent_until = -math.inf
        #: Ranks that were said to hang; None where ranks waited for a step.
        self._hung: tuple[int, ...] | None = None

    def check(self, now: float) -> None:
        """Speak if it is due."""
        since, standstill = self._core.hungry_since, self._core.standstill(now)
        if standstill is None and (since is None or now < since + FIRST_AFTER_SECONDS):
            return
        hung = None if standstill is None else standstill.hung
        if hung == self._hung and now < self._silent_until:
            return
        self._hung, self._silent_until = hung, now + AGAIN_AFTER_SECONDS
        whom = self._core.waits_for(now)
        if standstill is not None:
            level = logging.WARNING if hung else logging.INFO
            log.log(level, "training stands still: %s", whom)
        elif since is not None:
            log.warning(
                "ranks have waited %.0f s for a step, which waits for: %s", now - since, whom
            )
