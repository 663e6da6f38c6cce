"""The frame of a micro-batch for one DP rank, from where its samples' payloads are.

Payloads that the journal alone has are read back for this once. What the rank can find in shared
memory goes as descriptors of it; what lies in a payload store, as a reference.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from weakref import WeakKeyDictionary

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.steps.group_totals import GroupTotals
from rollout_dispatcher.core.steps.step import OpenStep
from rollout_dispatcher.errors import JournalCorrupt
from rollout_dispatcher.payload import InJournal, InMemory, Reference, are_in_memory
from rollout_dispatcher.protocol.assemble import filler, micro_batch
from rollout_dispatcher.protocol.messages.ranks import MAX_SEGMENTS
from rollout_dispatcher.protocol.outbox import Buffer
from rollout_dispatcher.sample import Sample
from rollout_dispatcher.service.barrier import DurabilityBarrier
from rollout_dispatcher.service.connections.connections import RankConnection
from rollout_dispatcher.service.connections.descriptors import for_segments, open_files_limit
from rollout_dispatcher.service.connections.peer import Bulk, Peer
from rollout_dispatcher.service.delivery.in_flight import InFlight
from rollout_dispatcher.transport.shared_memory.sharing import Numbers, share

#: Segments that a rank keeps at most: with those of one more micro-batch no more than it may.
KEPT = MAX_SEGMENTS // 2


class Frames:
    """Builds them. barrier: reads back what the journal alone has."""

    def __init__(self, barrier: DurabilityBarrier) -> None:
        self._barrier = barrier
        self._in_flight = InFlight(for_segments(open_files_limit()))
        #: Segments whose descriptors a peer has kept, of the step that it is being given.
        self._kept: WeakKeyDictionary[Peer, Numbers] = WeakKeyDictionary()

    def of(
        self, rank: RankConnection, step: OpenStep, groups: GroupTotals | None, index: int
    ) -> Bulk:
        """That of one micro-batch, a filler where it has no samples; raises what the journal does.

        groups: where the rank is told of them.
        """
        mine, attempt = step.micro_batches[rank.dp_rank], step.attempt
        entries, is_last = mine[index], index == len(mine) - 1
        if not entries:
            (sample,) = self._samples([_any_here(step)])
            return self._closing(rank.peer, filler(step.number, index, sample, attempt=attempt))
        numbers = None if groups is None else groups.numbers[rank.dp_rank][index]
        samples = self._samples(entries)
        frame = partial(micro_batch, step.number, index, samples, numbers, attempt=attempt)
        if not rank.peer.shares_memory:
            return Bulk(frame())
        shared = self._shared(rank.peer, samples, frame, is_last=is_last)
        return shared or self._closing(rank.peer, frame())

    def unreadable(self, dp_rank: int, step: OpenStep, first: int) -> dict[str, str]:
        """Samples that the journal cannot read back for a rank from that micro-batch on, and why.

        What the journal alone has is read twice so, before the rank may be prepared and once more
        for its frame: a rank that waits inside a collective can be told of no error.
        """
        parts = step.micro_batches[dp_rank][first:]
        entries = [entry for part in parts for entry in part or (_any_here(step),)]
        found: dict[str, str] = {}
        for entry in entries:
            if isinstance(entry.sample.payload, InJournal):
                try:
                    self._barrier.fetch(entry.ticket)
                except JournalCorrupt as error:
                    where = f"{error.path} at {error.offset}"
                    found[entry.sample.sample_id] = f"{where}: {error.what}"
        return found

    def _closing(self, peer: Peer, frame: list[Buffer]) -> Bulk:
        """A frame that says nothing of segments: whoever gets it closes those that it has kept."""
        self._kept.pop(peer, None)
        return Bulk(frame)

    def _shared(
        self,
        peer: Peer,
        samples: Sequence[Sample],
        frame: Callable[..., list[Buffer]],
        *,
        is_last: bool,
    ) -> Bulk | None:
        """With what a peer that may can find in shared memory, if there is enough of that.

        is_last: of the step; after it nothing is kept, as who knows when there is another.
        """
        payloads = [sample.payload for sample in samples]
        if not are_in_memory(payloads):  # some lie in a payload store
            return None
        kept = self._kept.get(peer, {})
        if (found := share(payloads, self._in_flight.left, kept)) is None:
            return None
        keeps = not is_last and len(found.numbers) <= KEPT and peer.keeps_segments
        if keeps:
            self._kept[peer] = found.numbers
        else:
            self._kept.pop(peer, None)
        shared = found.shared._replace(keep=keeps)
        self._in_flight.sent(peer, len(found.descriptors))
        return Bulk(
            frame(shared=shared), found.descriptors, without=lambda: self._closing(peer, frame())
        )

    def _samples(self, entries: Iterable[Entry]) -> list[Sample]:
        """With their payloads in memory, but for those in payload stores."""
        return [
            self._read_back(entry) if isinstance(entry.sample.payload, InJournal) else entry.sample
            for entry in entries
        ]

    def _read_back(self, entry: Entry) -> Sample:
        return entry.sample._replace(payload=InMemory(self._barrier.fetch(entry.ticket)))


def _any_here(step: OpenStep) -> Entry:
    """A sample of the step that lies in no payload store, if there is one."""
    here = (entry for entry in step.entries() if not isinstance(entry.sample.payload, Reference))
    return next(here, next(step.entries()))
