"""What a DP rank does about micro-batches that come as descriptors of shared memory.

They are gathered as they arrive, in the client's thread, which the training loop need not wait for:
each is ready when its turn comes, and the memory that others hold for it is theirs again soonest.
"""

import resource
from collections.abc import Sequence

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import Schema
from rollout_dispatcher.transport.descriptors.closing import CLOSER
from rollout_dispatcher.transport.shared_memory.arrivals import Arrivals
from rollout_dispatcher.transport.shared_memory.segments import check_sealed
from rollout_workers.rank.shared_memory.gatherer import Gatherer

#: Payloads that are mapped at a time, however many files may be open.
MOST_MAPPINGS = 16 * 1024


def most_mappings() -> int:
    """How many payloads may be mapped at a time: each takes a descriptor.

    A quarter of those that this process may have is for shared memory, what arrives included.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_MAPPINGS
    return max(0, min(soft // 4 - 3 * m.MAX_SEGMENTS, MOST_MAPPINGS))


class SharedMemory:
    """Completes micro-batches, as a client's `Incoming`."""

    def __init__(self, gatherer: Gatherer) -> None:
        self._gatherer = gatherer
        self._schema: Schema | None = None

    def complete(
        self, message: m.Message, payload: memoryview, arrivals: Arrivals
    ) -> tuple[m.Message, memoryview]:
        """Gather a micro-batch; see `Gatherer.gather`."""
        if isinstance(message, m.StepHeader):
            self._schema = message.schema_  # that of all steps of a run
        if not isinstance(message, m.MicroBatch):
            return message, payload
        if message.segments is None:
            arrivals.let_go()
            return message, payload
        if self._schema is None:
            raise ProtocolError(f"a micro-batch of step {message.step}, which was not announced")
        _keep(arrivals, message.segments)
        gathered = self._gatherer.gather(self._schema, message, payload, arrivals.kept)
        if not message.keep_segments:
            arrivals.let_go()
        elif len(arrivals.kept) > m.MAX_SEGMENTS:
            raise ProtocolError(f"{len(arrivals.kept)} segments are to be kept")
        return gathered


def _keep(arrivals: Arrivals, sizes: Sequence[int]) -> None:
    """Have the segments of these sizes that came along among those kept.

    Raises SegmentRefused for one that is not sealed; all that came are closed then.
    """
    if not sizes:
        return
    came = arrivals.take(len(sizes))
    try:
        for descriptor in came:
            check_sealed(descriptor)
    except BaseException:  # which may be for what they are
        CLOSER.close(came)
        raise
    arrivals.kept = [*arrivals.kept, *zip(came, sizes, strict=True)]
