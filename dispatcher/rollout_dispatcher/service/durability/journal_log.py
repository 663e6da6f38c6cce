"""Says in the log when the journal cannot be written, and when it can again; once each."""

import logging

from rollout_dispatcher.errors import DispatcherError
from rollout_dispatcher.service.durability.barrier import DurabilityBarrier

log = logging.getLogger(__name__)


class JournalLog:
    """Looks at one barrier, as often as it is asked to."""

    def __init__(self, barrier: DurabilityBarrier) -> None:
        self._barrier = barrier
        self._told: DispatcherError | None = None

    def check(self) -> None:
        """Speak if something has changed; the same trouble in other words is no news."""
        failure = self._barrier.failure
        if type(failure) is type(self._told):
            return
        self._told = failure
        if failure is None:
            log.warning("the journal can be written again; what waited for it is answered")
        else:
            log.error("the journal cannot be written, and nothing is acknowledged: %s", failure)
