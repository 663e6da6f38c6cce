"""The capacity for new samples: what the log has for them, less what is queued for it.

Invariant: as long as samples are only queued into what `ask` found, all that is queued fits either
into what is left of the active segment or into the next one, however it is cut into blocks; so one
spare is left for what is no sample, and on a full disk plans and commits go on.
"""

import threading


class Capacity:
    """Counts bytes of the log. Any thread asks and queues; the journal's own thread writes.

    usable: what the log takes of samples before its last spare.
    """

    def __init__(self, usable: int) -> None:
        self._lock = threading.Lock()
        self._usable, self._queued = usable, 0
        #: The least that was asked for and not available; None once that was told.
        self._shortfall: int | None = None
        #: What was asked for and is more than the log could take if nothing was queued.
        self.wide = 0

    @property
    def available(self) -> int:
        """Bytes that may be queued now."""
        return max(0, self._usable - self._queued)

    def ask(self, wanted: int) -> int:
        """The available bytes; if that is less than `wanted`, `written` tells when it is not."""
        if (found := self.available) >= wanted:
            return found
        with self._lock:
            if (found := self.available) < wanted:
                self._shortfall = min(wanted, self._shortfall or wanted)
                if wanted > self._usable:
                    self.wide = max(wanted, self.wide)
        return found

    def queue(self, nbytes: int) -> None:
        """So much is queued, whether there was capacity for it or not."""
        with self._lock:
            self._queued += nbytes

    def reserve(self, nbytes: int, left: int) -> bool:
        """Queue so much if it is available, or fits into what is `left` of the active segment."""
        with self._lock:
            fits = max(self.available, left - self._queued) >= nbytes
            if fits:
                self._queued += nbytes
        return fits

    def written(self, nbytes: int, usable: int) -> bool:
        """So much of what was queued is written, and `usable` is left.

        Returns whether somebody whom it fell short for is to be told that there may be enough.
        """
        with self._lock:
            self._usable = usable
            self._queued -= nbytes
            grown = self._shortfall is not None and self.available >= self._shortfall
            if grown:
                self._shortfall = None
        return grown
