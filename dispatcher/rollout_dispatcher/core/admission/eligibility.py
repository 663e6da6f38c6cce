"""Who may come in: `Eligibility` ever, `Capacity` now; `Outcomes` writes down what is decided.

Most pushes are of new and valid samples without a group: these are told from others as a whole, by
the rules that decide on each of them too.

`Capacity` knows which cap holds a sample back, now and the last time that one was. A sample is held
back only

    at a hard cap       if its bytes would exceed what may be in memory, or in payload stores, or
                        the journal has no capacity for it
    at a soft cap       if it is reached by ready samples, a step could be planned of what is
                        ready, and the sample belongs to no open group

so while ranks cannot be given a step, whatever may make one comes in: nobody waits for a producer
that waits for us.

`Repeats` counts samples in a row under ids that were accepted before: a sign that ids name too
little. Who pushes a sample again because it does not know what became of it is no such case: these
numbers of its are known. Nor is a producer that begins anew, with what it has pushed before a
crash; but that cannot be told from here, so what is found is for the log.

`Outcomes` writes down what becomes of a sample everywhere that has to know. Invariant: whatever is
accepted is in the buffer, remembered against a repetition, counted, and a fact if facts are kept;
every outcome is in its push's answer and in the totals. The first sample that is accepted decides
on the run's schema, unless it is declared.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from rollout_dispatcher.core.admission.held_pushes import Push
from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.entry import MEMORY_CAP, STORES_CAP, Amount, Entry
from rollout_dispatcher.core.buffer.open_groups import OpenGroup
from rollout_dispatcher.core.config import DispatchConfig
from rollout_dispatcher.core.effects import IdsRepeated, SchemaDecided
from rollout_dispatcher.core.facts import Accepted, SchemaFixed
from rollout_dispatcher.errors import BufferFull, SampleRefused, ShuttingDown
from rollout_dispatcher.payload import Taken
from rollout_dispatcher.sample import Outcome, Sample, SamplesByField, Schema

if TYPE_CHECKING:
    from rollout_dispatcher.core.parts import Parts

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
        if self.hard_cap(*taken, count) is not None:
            return False
        before = count - 1
        return self._buffer.soft_cap(before, tokens_before) is None or self.shortfall() > before

    def holds_back(self, sample: Sample) -> BufferFull | None:
        """The cap that holds this sample back now, if one does."""
        full = self.hard_cap(*sample.taken)
        if full is None and (full := self._buffer.soft_cap()) is not None:
            passes = self._buffer.is_expected(sample) or self.shortfall() > 0
            full = None if passes else full
        return full

    def holds_back_all(self, least: Iterable[Taken]) -> BufferFull | None:
        """The cap that holds back samples that take one of these and more, whatever they are."""
        found = [self.hard_cap(*taken) for taken in least]
        return found[0] if found and None not in found else None

    def holds_back_after(self, coming: int, sample: Sample) -> BufferFull | None:
        """The cap that holds a sample back whose payload is not here, behind so many others."""
        referenced = sample.taken[1]
        full = self.hard_cap(sample.nbytes - referenced, referenced)
        if full is None and self.shortfall() <= coming and not self._buffer.is_expected(sample):
            full = self._buffer.soft_cap(coming)
        return full

    def hard_cap(self, nbytes: int, referenced: int, samples: int = 1) -> BufferFull | None:
        """The hard cap that so many samples and bytes more would exceed, if they would."""
        if self.journal_takes is not None:
            unnoted, held = self._unnoted, self._buffer.held.nbytes
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

    @property
    def at_hard_cap(self) -> bool:
        """Whether a sample was held back that only leaving samples can let in."""
        return self.pressed is not None and self.pressed.cap in HARD_CAPS

    def is_stuck(self, now: float, *, waits: bool) -> bool:
        """Whether a producer waits there; over HTTP it asks again and again.

        waits: whether a push is held.
        """
        return self.at_hard_cap and (waits or now - self._asked_at <= ASKS_AGAIN_S)

    def reached(self) -> BufferFull:
        """What a producer is told who is held back."""
        buffer = self._buffer
        reached = self.pressed or buffer.soft_cap()
        return reached or BufferFull("samples", buffer.ready_units, buffer.limits.samples)


def _rank(full: BufferFull) -> int:
    return HARD_CAPS.index(full.cap) if full.cap in HARD_CAPS else len(HARD_CAPS)


#: So many in a row, none of which is trained on, are told.
MANY = 256


class Repeats:
    """Counts for each producer since it has connected; nameless ones, as over HTTP, are one."""

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}
        self._in_conflict: set[str] = set()
        #: What nobody was told of yet.
        self.found: list[IdsRepeated] = []

    def repeated(self, producer: str, sample_id: str, *, conflicts: bool) -> None:
        """One more came in vain. conflicts: with other content than before."""
        count = self._in_a_row[producer] = self._in_a_row.get(producer, 0) + 1
        news = conflicts and producer not in self._in_conflict
        if conflicts:
            self._in_conflict.add(producer)
        if news or count == MANY:
            self.found.append(IdsRepeated(producer, sample_id, count, conflicts=news))

    def accepted(self, producer: str) -> None:
        """A sample of it is accepted."""
        if self._in_a_row:
            self._in_a_row.pop(producer, None)

    def forget(self, producer: str) -> None:
        """It has connected anew, or has gone."""
        self._in_a_row.pop(producer, None)
        self._in_conflict.discard(producer)


class Eligibility:
    """What refuses samples. memory: of what was accepted before."""

    def __init__(self, parts: "Parts", config: DispatchConfig) -> None:
        self._needs_version = config.max_staleness is not None
        self._buffer, self._producers = parts.buffer, parts.producers
        self._closed_groups, self.memory = parts.closed_groups, parts.memory
        #: Set once nothing more is accepted; says why.
        self.closed: str | None = None
        self.closed_code = "closed"
        #: Whether a successor of this dispatcher may accept it.
        self.shuts_down = False
        #: Samples of weights older than this come too late: their phase has ended.
        self.oldest_version = 0

    def bar(self, version: int) -> None:
        """What is older than this comes too late."""
        self.oldest_version = max(self.oldest_version, version)

    @property
    def situation(self) -> tuple[object, ...]:
        """Another one whenever any sample that is held back may be eligible no more."""
        return self.oldest_version, self._buffer.set_by

    def plain(self, push: Push) -> SamplesByField | None:
        """The samples of a push that wait, if they come last and capacity is all that they need."""
        first = next(iter(push.samples), None)
        if first is None or self._buffer.is_grouped(first):
            return None  # the usual exceptions, found before anything is computed
        decided = len(push.outcomes) - push.outcomes.count(None)
        if None in push.outcomes[:decided] or decided == len(push.outcomes):
            return None
        samples = SamplesByField.of(push.samples[decided:])
        plain = (
            self.closed is None
            and self._buffer.are_plain(samples)
            and not self._producers.has_ended(push.producer)
            and self._is_young(push, samples)
            and not (self._needs_version and None in samples.policy_versions)
            and self.memory.are_new(push.producer, push.numbers[decided:], push.given_ids[decided:])
        )
        return samples if plain else None

    def is_begun_anew(self, group: OpenGroup, coming: int) -> bool:
        """Whether so many new members can only replace what producers that are gone have pushed."""
        if not group.entries:
            return False
        if self._buffer.groups.has_died(group):
            return True
        missing = group.missing
        too_many = missing is not None and coming > missing
        return too_many and all(map(self._producers.is_away, group.contributors))

    def is_late(self, sample: Sample) -> bool:
        """Whether its group has ended."""
        return self._buffer.is_grouped(sample) and sample.group_id in self._closed_groups

    def check(self, push: Push, sample: Sample) -> None:
        """Raise SampleRefused if this sample may not come in, now or later."""
        if self.closed is not None and not push.excused:
            if self.shuts_down:
                raise ShuttingDown(self.closed)
            raise SampleRefused(self.closed_code, self.closed)
        if self._producers.has_ended(push.producer) and not push.excused:
            raise SampleRefused("closed", "this producer has ended its stream")
        version = sample.judged_version
        if self._needs_version and version is None and not sample.staleness_exempt:
            raise SampleRefused(
                "policy-version-missing",
                f"sample {sample.sample_id} has no policy_version, and --max-staleness is set: "
                "nobody could tell whether it is too old; push it with the version of the weights "
                "that generated it, or, if none did (a demonstration, replay), with "
                "staleness_exempt=True",
            )
        if version is not None and version < (oldest := self._oldest_for(push)):
            raise SampleRefused(
                "phase-ended",
                f"sample {sample.sample_id} is of policy version {version}, whose phase has ended; "
                f"push samples of version {oldest} or newer",
            )
        self._buffer.check(sample)
        if self._buffer.is_grouped(sample):
            assert sample.group_id is not None
            if (why := self._closed_groups.why_refused(sample.group_id)) is not None:
                raise SampleRefused(
                    "group-closed",
                    f"{why}; a group_id names one group: what is generated for its prompt again, "
                    "or in another epoch, is a group of another id, such as f'{prompt}@{epoch}'",
                )
            self._buffer.check_group(sample)

    def _is_young(self, push: Push, samples: SamplesByField) -> bool:
        versions = [version for version in set(samples.policy_versions) if version is not None]
        return not versions or min(versions) >= self._oldest_for(push)

    def _oldest_for(self, push: Push) -> int:
        if push.excused:
            return 0
        return max(self.oldest_version, self._producers.phase(push.producer))


class Outcomes:
    """Carries out what is decided of samples.

    untold: what has come in and nobody was told of yet; None where nobody is to be. decided: the
    run's schema, until its effect has left.
    """

    def __init__(self, parts: "Parts", config: DispatchConfig) -> None:
        self.untold: list[Entry] | None = [] if config.tells_accepted else None
        self.decided: SchemaDecided | None = None
        self.repeats = Repeats()
        self._plain: SamplesByField | None = None
        self._buffer, self._totals, self._producers = parts.buffer, parts.totals, parts.producers
        self._memory, self._objects = parts.memory, parts.references.objects
        self._note, self._durable = parts.note, config.durable

    def fix_schema(self, schema: Schema, set_by: str) -> None:
        """Every sample of the run has this schema from now on."""
        self._buffer.schema, self._buffer.set_by = schema, set_by
        self.decided = SchemaDecided(schema, set_by)
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
        if self._durable:  # else one for each sample is built for nobody
            for entry, seq in zip(entries, numbers, strict=True):
                given_id = entry.sample.sample_id if push.named else None
                self._note(Accepted(entry, push.producer, seq, given_id))
