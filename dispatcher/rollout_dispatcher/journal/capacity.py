"""The capacity for new samples: room in the log, less the queued bytes.

Invariant: while samples are queued within the capacity that `ask` returned, the queue fits either
into the rest of the active segment or into the next one, however it is cut into blocks. So one
spare is left for other records, and plans and commits continue on a full disk.
"""

import threading


class Capacity:
    """Counts bytes of the log. Any thread asks and queues; the journal's own thread writes.

    usable: bytes of samples that the log takes before its last spare.
    """

    def __init__(self, usable: int) -> None:
        self._lock = threading.Lock()
        self._usable, self._queued = usable, 0
        #: The least request that was not available; None once that is reported.
        self._shortfall: int | None = None
        #: The largest request that exceeds the log's room even with an empty queue; 0: none.
        self.wide = 0

    @property
    def available(self) -> int:
        """Bytes that may be queued now."""
        return max(0, self._usable - self._queued)

    def ask(self, wanted: int) -> int:
        """The available bytes; if less than `wanted`, `written` reports when it may be enough."""
        if (found := self.available) >= wanted:
            return found
        with self._lock:
            if (found := self.available) < wanted:
                self._shortfall = min(wanted, self._shortfall or wanted)
                if wanted > self._usable:
                    self.wide = max(wanted, self.wide)
        return found

    def queue(self, nbytes: int) -> None:
        """Count queued bytes, with or without capacity for them."""
        with self._lock:
            self._queued += nbytes

    def reserve(self, nbytes: int, left: int) -> bool:
        """Queue bytes if they are available, or fit into the `left` of the active segment."""
        with self._lock:
            fits = max(self.available, left - self._queued) >= nbytes
            if fits:
                self._queued += nbytes
        return fits

    def written(self, nbytes: int, usable: int) -> bool:
        """Queued bytes were written, and `usable` are left.

        Returns whether there may be enough now for a request that fell short.
        """
        with self._lock:
            self._usable = usable
            self._queued -= nbytes
            grown = self._shortfall is not None and self.available >= self._shortfall
            if grown:
                self._shortfall = None
        return grown
