"""Says in the log whom the next step waits for, once ranks have waited for long.

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

    def check(self, now: float) -> None:
        """Speak if it is due."""
        since = self._core.hungry_since
        if since is None or now < max(since + FIRST_AFTER_SECONDS, self._silent_until):
            return
        self._silent_until = now + AGAIN_AFTER_SECONDS
        waited, whom = now - since, self._core.waits_for(now)
        log.warning("ranks have waited %.0f s for a step, which waits for: %s", waited, whom)
