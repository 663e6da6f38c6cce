"""Payloads as shared memory: whether this client's go so, and the segments that they are in.

It is chosen by itself: over a Unix socket, where both sides can, for pushes that are large enough.
Where a segment cannot be had the bytes are sent, as over any other connection; where the dispatcher
has refused one, this client's are from then on.
"""

import logging
from collections.abc import Sequence

from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.protocol.outbox import Buffer
from rollout_dispatcher.transport.shared_memory.segments import ARE_SUPPORTED, write_segment

log = logging.getLogger(__name__)

#: From this size on a segment costs less than the copy that it saves.
SEGMENT_FROM_BYTES = 256 * 1024


class Sharing:
    """Of one client, over all its connections. is_on: whether the next one offers it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.is_on = ARE_SUPPORTED and bool(endpoint.path)
        self._has_failed = False

    def segment(self, payload: Sequence[Buffer]) -> int | None:
        """The descriptor of a segment with these bytes; None where they had better be sent."""
        try:
            return write_segment(payload)
        except OSError as error:
            self.failed(error)
            return None

    def failed(self, error: OSError) -> None:
        """There could be no segment, or no descriptor for it: bytes are sent instead, this time."""
        if not self._has_failed:
            log.warning("no shared memory (%s): a push is sent as bytes, and is slower", error)
        self._has_failed = True

    def give_up(self, why: object) -> None:
        """From the next connection on bytes are sent."""
        if self.is_on:
            log.warning("shared memory is not used any more: %s", why)
        self.is_on = False
