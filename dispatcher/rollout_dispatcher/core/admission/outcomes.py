"""Outcomes: what becomes of a sample is written down everywhere that has to know.

Invariant: whatever is accepted is in the buffer, remembered against a repetition, counted, and a
fact if facts are kept; every outcome is in its push's answer and in the totals. The first sample
that is accepted decides on the run's schema, unless it is declared.
"""

from collections.abc import Sequence

from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.entry import Amount, Entry
from rollout_dispatcher.core.effects import SchemaDecided
from rollout_dispatcher.core.facts import Accepted, Note, SchemaFixed
from rollout_dispatcher.core.producers.duplicates import DuplicateMemory
from rollout_dispatcher.core.producers.producers import Producers
from rollout_dispatcher.core.producers.push import Push
from rollout_dispatcher.core.producers.repeats import Repeats
from rollout_dispatcher.core.references.objects import Objects
from rollout_dispatcher.core.totals import Totals
from rollout_dispatcher.errors import SampleRefused
from rollout_dispatcher.payload import Taken
from rollout_dispatcher.sample import Outcome, Sample, SamplesByField, Schema


class Outcomes:
    """Carries out what is decided of samples.

    note: None where nobody keeps facts: one for each sample is not built for nobody.
    untold: what has come in and nobody was told of yet; None where nobody is to be. decided: the
    run's schema, until its effect has left.
    """

    def __init__(
        self,
        buffer: SampleBuffer,
        totals: Totals,
        producers: Producers,
        memory: DuplicateMemory,
        note: Note | None,
        *,
        objects: Objects,
        tells_accepted: bool = False,
    ) -> None:
        self.untold: list[Entry] | None = [] if tells_accepted else None
        self.decided: SchemaDecided | None = None
        self.repeats = Repeats()
        self._plain: SamplesByField | None = None
        self._buffer, self._totals, self._producers = buffer, totals, producers
        self._memory, self._objects, self._note = memory, objects, note

    def fix_schema(self, schema: Schema, set_by: str) -> None:
        """Every sample of the run has this schema from now on."""
        self._buffer.schema, self._buffer.set_by = schema, set_by
        self.decided = SchemaDecided(schema, set_by)
        if self._note is not None:
            self._note(SchemaFixed(schema, set_by))

    def accept_all(
        self, push: Push, samples: SamplesByField, amount: Amount, now: float
    ) -> list[Entry]:
        """These samples of a push come in: the first that wait, plain, and this much together."""
        first = push.outcomes.index(None)
        these = slice(first, first + amount.samples)
        self._decide(push, samples.schemas[0])
        entries = self._buffer.add_all(push.samples[these], amount, push.producer, now)
        if self.untold is not None:  # or what nobody asks for would be kept
            self._plain = None if self.untold else samples
        self._remember(push, entries, push.numbers[these])
        push.outcomes[these] = [Outcome.ACCEPTED] * len(entries)
        self._totals.accepted(samples.tokens, samples.payloads, amount.taken)
        return entries

    def accept(self, push: Push, index: int, sample: Sample, now: float) -> Entry:
        """One sample of a push comes in; `count` follows, once for all of them."""
        self._decide(push, sample.schema)
        entry, seq = self._buffer.add(sample, push.producer, now), push.first_seq + index
        self._plain = None
        self._remember(push, [entry], range(seq, seq + 1))
        push.outcomes[index] = Outcome.ACCEPTED
        return entry

    def _decide(self, push: Push, schema: Schema) -> None:
        """A sample of this schema comes in."""
        if self._buffer.schema is None:
            by = f"producer {push.producer}" if push.producer else "an HTTP client"
            self.fix_schema(schema, f"set by the first accepted push, from {by}")

    def tell(self) -> tuple[Sequence[Entry], SamplesByField | None]:
        """What is `untold`, for somebody to be told now; see `effects.SamplesAccepted`."""
        told, plain = self.untold or (), self._plain
        self.untold, self._plain = [], None
        return told, plain

    def count(self, accepted: Sequence[Sample]) -> None:
        """These have come in one by one."""
        payloads = [sample.payload for sample in accepted]
        tokens = [sample.tokens for sample in accepted]
        self._totals.accepted(tokens, payloads, Taken.by(payloads))

    def settle(self, push: Push, index: int, outcome: Outcome, *, theirs: bool = False) -> None:
        """One sample of a push does not come in. theirs: it may be pushed again, to a successor."""
        push.outcomes[index] = outcome
        self._totals.received[outcome] += 1
        if push.refers:
            self._objects.settled(push, index, outcome, theirs=theirs)

    def repeat(self, push: Push, index: int) -> None:
        """One sample of a push was accepted before, by its number or by the id that it was given.

        Of its own numbers a producer knows no better; another sample's id it has used again.
        """
        sample, outcome = push.samples[index], Outcome.DUPLICATE
        if not self._memory.is_resent(push.producer, push.first_seq + index):
            conflicts = self._memory.conflicts(sample.sample_id, sample.checksum)
            outcome = Outcome.CONFLICT if conflicts else outcome
            self.repeats.repeated(push.producer, sample.sample_id, conflicts=conflicts)
        self.settle(push, index, outcome)

    def refuse(self, push: Push, index: int, why: SampleRefused) -> None:
        """One sample of a push never will, and its producer is told why."""
        push.errors[index], push.reasons[index] = str(why), why.reason
        self._totals.refused[why.reason] += 1
        self.settle(push, index, Outcome.REFUSED, theirs=why.retriable)

    def _remember(self, push: Push, entries: Sequence[Entry], numbers: range) -> None:
        """Entries of a push are accepted, under these numbers."""
        samples = [entry.sample for entry in entries] if push.named else ()
        given = {sample.sample_id: sample.checksum for sample in samples}
        self._memory.accept(push.producer, numbers, given)
        self.repeats.accepted(push.producer)
        self._producers.contributed(push.producer)
        if push.refers:
            self._objects.accepted(push, entries, numbers)
        if self.untold is not None:
            self.untold += entries
        if self._note is not None:
            for entry, seq in zip(entries, numbers, strict=True):
                given_id = entry.sample.sample_id if push.named else None
                self._note(Accepted(entry, push.producer, seq, given_id))
