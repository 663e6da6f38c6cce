"""The frame of a micro-batch for one DP rank, from where its samples' payloads are.

Payloads that are in the journal alone are read back for it; samples in payload stores are sent as
references.
"""

from collections.abc import Iterable, Sequence

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.steps.step import GroupTotals, OpenStep
from rollout_dispatcher.errors import JournalCorrupt
from rollout_dispatcher.payload import InJournal, InMemory, Reference
from rollout_dispatcher.protocol.assemble import filler, micro_batch
from rollout_dispatcher.protocol.outbox import Buffer
from rollout_dispatcher.protocol.slices import Slicing
from rollout_dispatcher.sample import Sample
from rollout_dispatcher.service.barrier import DurabilityBarrier


class Frames:
    """Builds frames. barrier: reads payloads back from the journal. multiple: of tokens, to which
    ranks pad samples.
    """

    def __init__(self, barrier: DurabilityBarrier, multiple: int) -> None:
        self._barrier, self._multiple = barrier, multiple

    def of(
        self,
        dp_rank: int,
        step: OpenStep,
        groups: GroupTotals | None,
        index: int,
        slicing: Slicing | None,
    ) -> Sequence[Buffer]:
        """The frame of a micro-batch, a filler where it has no samples; raises JournalCorrupt.

        groups: None where no sample has one. slicing: of samples that the rank trains with others;
        None: it gets the whole of them.
        """
        entries, attempt = step.trained_by(dp_rank, index), step.attempt
        if not entries:
            (sample,) = self._samples([_any_here(step)])
            return filler(step.number, index, sample, attempt=attempt)
        size, place = step.block(dp_rank, index)
        numbers = None if groups is None else groups.numbers[dp_rank - place][index]
        return micro_batch(
            step.number, index, self._samples(entries), numbers, attempt=attempt,
            block=(size, place), slicing=slicing, multiple=self._multiple,
        )  # fmt: skip

    def unreadable(self, dp_rank: int, step: OpenStep, first: int) -> dict[str, str]:
        """Samples that the journal cannot read back for a rank from that micro-batch on, and why.

        Such payloads are read twice, before the rank may be prepared and for its frame: an error
        cannot reach a rank that waits inside a collective.
        """
        indices = range(first, len(step.micro_batches[dp_rank]))
        parts = [step.trained_by(dp_rank, index) for index in indices]
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
