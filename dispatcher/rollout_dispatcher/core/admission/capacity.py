"""Capacity: which cap holds a sample back, now and the last time that one was.

A sample is held back only

    at a hard cap       if its bytes would exceed what may be in memory, or in payload stores, or
                        the journal has no capacity for it
    at a soft cap       if it is reached by ready samples, a step could be planned of what is
                        ready, and the sample belongs to no open group

so while ranks cannot be given a step, whatever may make one comes in: nobody waits for a producer
that waits for us.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.entry import Amount, Entry
from rollout_dispatcher.core.buffer.limits import MEMORY_CAP, STORES_CAP
from rollout_dispatcher.errors import BufferFull
from rollout_dispatcher.payload import Taken
from rollout_dispatcher.sample import Sample, SamplesByField

#: Caps that nothing but leaving samples can lift; the first of them is lifted by a journal, too.
HARD_CAPS = (MEMORY_CAP, STORES_CAP, "journal")
#: A producer that cannot be held, as over HTTP, and has not asked again for so long has gone.
ASKS_AGAIN_S = 5.0


class Capacity:
    """The caps on what comes in.

    shortfall: units that are ready fewer than a step needs, 0 or less if one could be planned.
    """

    def __init__(self, buffer: SampleBuffer, shortfall: Callable[[], int]) -> None:
        self._buffer, self.shortfall = buffer, shortfall
        #: Whether the journal takes so many samples of so many bytes; None without one.
        self.journal_takes: Callable[[int, int], bool] | None = None
        #: What was accepted and is not with the journal yet.
        self._unnoted = Amount()
        #: The cap that last held a sample back, until something leaves.
        self.pressed: BufferFull | None = None
        self._asked_at = 0.0
        #: When a sample last came in, or one that waits was last helped.
        self.last_moved = 0.0
        #: Since when payloads are on their way from memory to the journal; None if none is.
        self.helped_since: float | None = None

    # -- what a cap lets in -----------------------------------------------------------------

    def admits(self, samples: SamplesByField, amount: Amount) -> int:
        """How many of these samples, all without a group, come in before one is held back.

        amount: of all of them, which nearly always do.
        """
        if self._admits(amount.samples, amount.taken, amount.tokens - samples.tokens[-1]):
            return amount.samples
        each = [Taken.by((payload,)) for payload in samples.payloads]
        sums = list(map(Taken, *(accumulate(column) for column in zip(*each, strict=True))))
        tokens = list(accumulate(samples.tokens, initial=0))
        return bisect_left(
            range(amount.samples),
            True,  # what comes in before a sample only ever holds it back
            key=lambda at: not self._admits(at + 1, sums[at], tokens[at]),
        )

    def _admits(self, count: int, taken: Taken, tokens_before: int) -> bool:
        """Whether the last of so many samples comes in behind the others."""
        if self._hard_cap(*taken, count) is not None:
            return False
        before = count - 1
        return self._buffer.soft_cap(before, tokens_before) is None or self.shortfall() > before

    def holds_back(self, sample: Sample) -> BufferFull | None:
        """The cap that holds this sample back now, if one does."""
        full = self._hard_cap(*sample.taken)
        if full is None and (full := self._buffer.soft_cap()) is not None:
            passes = self._buffer.is_expected(sample) or self.shortfall() > 0
            full = None if passes else full
        return full

    def holds_back_all(self, least: Iterable[Taken]) -> BufferFull | None:
        """The cap that holds back samples that take one of these and more, whatever they are."""
        found = [self._hard_cap(*taken) for taken in least]
        return found[0] if found and None not in found else None

    def fits(self, taken: Taken) -> bool:
        """Whether no hard cap holds back a sample that takes so much."""
        return self._hard_cap(*taken) is None

    def holds_back_after(self, coming: int, sample: Sample) -> BufferFull | None:
        """The cap that holds a sample back whose payload is not here, behind so many others."""
        referenced = sample.taken[1]
        full = self._hard_cap(sample.nbytes - referenced, referenced)
        if full is None and self.shortfall() <= coming and not self._buffer.is_expected(sample):
            full = self._buffer.soft_cap(coming)
        return full

    def _hard_cap(self, nbytes: int, referenced: int, samples: int = 1) -> BufferFull | None:
        """The hard cap that so many samples and bytes more would exceed, if they would."""
        if self.journal_takes is not None:
            unnoted, held = self._unnoted, self._buffer.held_bytes
            if not self.journal_takes(samples + unnoted.samples, nbytes + unnoted.nbytes):
                return BufferFull("journal", held, held)
        return self._buffer.hard_cap(nbytes, referenced)

    # -- what comes in ------------------------------------------------------------------------

    def came_in(self, entries: Sequence[Entry], now: float) -> None:
        """These were accepted, and the journal, if there is one, does not count them yet."""
        self.last_moved = now
        if self.journal_takes is not None:
            self._unnoted += Amount.of_entries(entries)

    def noted(self) -> None:
        """What was accepted is with the journal: it counts that from now on."""
        if self._unnoted.samples:
            self._unnoted = Amount()

    # -- what was held back ---------------------------------------------------------------------

    def press(self, full: BufferFull, now: float) -> None:
        """Remember what holds samples back: of several caps the one that is easiest to relieve."""
        if full.cap in HARD_CAPS:
            self._asked_at = now
        if self.pressed is None or _rank(full) <= _rank(self.pressed):
            self.pressed = full

    def press_if_held_back(self, taken: Taken, now: float) -> None:
        """The same of a sample that takes so much, if a hard cap holds it back."""
        if (full := self._hard_cap(*taken)) is not None:
            self.press(full, now)

    @property
    def at_hard_cap(self) -> bool:
        """Whether a sample was held back that only leaving samples can let in."""
        return self.pressed is not None and self.pressed.cap in HARD_CAPS

    @property
    def at_stores_cap(self) -> bool:
        """Whether it is that of payload stores."""
        return self.pressed is not None and self.pressed.cap == STORES_CAP

    @property
    def is_helped(self) -> bool:
        """Whether capacity is on its way: payloads leave memory for a journal that takes them."""
        pressed = self.pressed
        return self.helped_since is not None and pressed is not None and pressed.cap == MEMORY_CAP

    def was_asked_for(self, now: float) -> bool:
        """Whether somebody found a hard cap of late who asks again and again, as over HTTP."""
        return now - self._asked_at <= ASKS_AGAIN_S

    def reached(self) -> BufferFull:
        """What a producer is told who is held back."""
        buffer = self._buffer
        reached = self.pressed or buffer.soft_cap()
        return reached or BufferFull("samples", buffer.ready_units, buffer.limits.samples)


def _rank(full: BufferFull) -> int:
    return HARD_CAPS.index(full.cap) if full.cap in HARD_CAPS else len(HARD_CAPS)
