"""`Eligibility`: permanent checks of a sample; `Capacity`: caps, now; `Outcomes`: records each
decision.

Most pushes have only new and valid samples without a group: these take a *fast path*, checked as a
whole by the same rules.

`Capacity` finds the cap that blocks a sample, and keeps the last one. A sample is blocked only

    at a hard cap       if its bytes would exceed what may be in memory, or in payload stores, or
                        the journal has no capacity for it
    at a soft cap       if ready samples reach it, a step could be planned of them, and the sample
                        belongs to no open group

so the soft cap is lifted while no step can be planned, to avoid deadlock.

`Repeats` counts samples in a row under ids that were accepted before: a sign that ids are not
unique enough. Resends are recognised by sequence number, and not counted. A producer that replays
after a crash is counted, as it cannot be distinguished here; so the result is only logged.

`Outcomes` records each decision. Invariant: an accepted sample is in the buffer, in the duplicate
memory, in the totals, and a fact if facts are kept; every outcome is in its push's answer and in
the totals. The first accepted sample sets the run's schema, unless it is declared.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.entry import MEMORY_CAP, STORES_CAP, Amount, Entry
from rollout_dispatcher.core.buffer.open_groups import OpenGroup
from rollout_dispatcher.core.config import DispatchConfig
from rollout_dispatcher.core.effects import IdsRepeated, SchemaDecided
from rollout_dispatcher.core.facts import Accepted, SchemaFixed
from rollout_dispatcher.errors import BufferFull, SampleRefused, ShuttingDown
from rollout_dispatcher.payload import Footprint
from rollout_dispatcher.sample import Outcome, Sample, SamplesByField, Schema

if TYPE_CHECKING:
    from rollout_dispatcher.core.parts import Parts

#: Caps that apply even while no step can be planned.
JOURNAL_CAP = "journal"
HARD_CAPS = (MEMORY_CAP, STORES_CAP, JOURNAL_CAP)
#: Seconds for which a producer that was answered `full`, as over HTTP, counts as waiting.
ASKS_AGAIN_S = 5.0


class Capacity:
    """The caps on accepted samples.

    units_short: units still missing for a whole step (<= 0: enough).
    """

    def __init__(self, buffer: SampleBuffer, units_short: Callable[[], int]) -> None:
        self._buffer, self.units_short = buffer, units_short
        #: Whether the journal takes so many samples of so many bytes; None without one.
        self.journal_takes: Callable[[int, int], bool] | None = None
        #: Accepted samples that the journal does not count yet.
        self._unjournaled = Amount()
        #: The cap that last blocked a sample; None once blocked pushes are retried.
        self.blocking_cap: BufferFull | None = None
        self._refused_at = 0.0
        #: Time of the last accept, or of the last eviction.
        self.last_moved = 0.0
        #: Time since which payloads are being written to the journal; None if none is.
        self.spilling_since: float | None = None

    # -- caps -------------------------------------------------------------------------------

    def admits_all(self, samples: SamplesByField, amount: Amount) -> bool:
        """Whether all of these ungrouped samples are accepted now. amount: of all of them."""
        if self.hard_cap(*amount.footprint, amount.samples) is not None:
            return False
        before, tokens_before = amount.samples - 1, amount.tokens - samples.tokens[-1]
        return self._buffer.soft_cap(before, tokens_before) is None or self.units_short() > before

    def blocked_by(self, sample: Sample) -> BufferFull | None:
        """The cap that blocks this sample now; None if none does."""
        full = self.hard_cap(*sample.footprint)
        if full is None and (full := self._buffer.soft_cap()) is not None:
            passes = self._buffer.belongs_to_open_group(sample) or self.units_short() > 0
            full = None if passes else full
        return full

    def all_blocked_by(self, smallest: Iterable[Footprint]) -> BufferFull | None:
        """The hard cap that blocks every sample of at least one of these footprints, or None."""
        found = [self.hard_cap(*footprint) for footprint in smallest]
        return found[0] if found and None not in found else None

    def resend_blocked_by(self, coming: int, sample: Sample) -> BufferFull | None:
        """The cap that blocks a sample with an evicted payload.

        coming: number of samples that are being resent.
        """
        referenced = sample.footprint[1]
        full = self.hard_cap(sample.nbytes - referenced, referenced)
        if (
            full is None
            and self.units_short() <= coming
            and not self._buffer.belongs_to_open_group(sample)
        ):
            full = self._buffer.soft_cap(coming)
        return full

    def hard_cap(self, nbytes: int, referenced: int, samples: int = 1) -> BufferFull | None:
        """The hard cap that this many more samples and bytes would exceed; None if none."""
        if self.journal_takes is not None:
            unnoted, held = self._unjournaled, self._buffer.held.nbytes
            if not self.journal_takes(samples + unnoted.samples, nbytes + unnoted.nbytes):
                return BufferFull(JOURNAL_CAP, held, held)
        return self._buffer.hard_cap(nbytes, referenced)

    # -- accepted samples ---------------------------------------------------------------------

    def came_in(self, entries: Sequence[Entry], now: float) -> None:
        """Count accepted samples against the journal's capacity, until it counts them itself."""
        self.last_moved = now
        if self.journal_takes is not None:
            self._unjournaled += Amount.of_entries(entries)

    def journaled(self) -> None:
        """The journal has received the accepted samples, and counts them from now on."""
        if self._unjournaled.samples:
            self._unjournaled = Amount()

    # -- blocked samples ----------------------------------------------------------------------

    def set_blocking_cap(self, full: BufferFull, now: float) -> None:
        """Set the blocking cap; of several the one that is easiest to relieve stays."""
        if full.cap in HARD_CAPS:
            self._refused_at = now
        if self.blocking_cap is None or _rank(full) <= _rank(self.blocking_cap):
            self.blocking_cap = full

    @property
    def at_hard_cap(self) -> bool:
        """Whether the blocking cap is a hard one."""
        return self.blocking_cap is not None and self.blocking_cap.cap in HARD_CAPS

    def is_stuck(self, now: float, *, waits: bool) -> bool:
        """Whether a producer waits at a hard cap; over HTTP it retries repeatedly.

        waits: whether a push is blocked.
        """
        return self.at_hard_cap and (waits or now - self._refused_at <= ASKS_AGAIN_S)

    def reached(self) -> BufferFull:
        """The cap to report to a blocked producer."""
        buffer = self._buffer
        reached = self.blocking_cap or buffer.soft_cap()
        return reached or BufferFull("samples", buffer.ready_units, buffer.limits.samples)


def _rank(full: BufferFull) -> int:
    return HARD_CAPS.index(full.cap) if full.cap in HARD_CAPS else len(HARD_CAPS)


#: Report after this many repeated samples in a row.
MANY = 256


class Repeats:
    """Counts per producer since it connected; clients over HTTP count as one."""

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}
        self._in_conflict: set[str] = set()
        #: Unreported effects.
        self.found: list[IdsRepeated] = []

    def repeated(self, producer: str, sample_id: str, *, conflicts: bool) -> None:
        """A sample had the id of an accepted one. conflicts: with other content."""
        count = self._in_a_row[producer] = self._in_a_row.get(producer, 0) + 1
        news = conflicts and producer not in self._in_conflict
        if conflicts:
            self._in_conflict.add(producer)
        if news or count == MANY:
            self.found.append(IdsRepeated(producer, sample_id, count, conflicts=news))

    def accepted(self, producer: str) -> None:
        """A sample of this producer is accepted."""
        if self._in_a_row:
            self._in_a_row.pop(producer, None)

    def forget(self, producer: str) -> None:
        """The producer connected anew, or left."""
        self._in_a_row.pop(producer, None)
        self._in_conflict.discard(producer)


class Eligibility:
    """Decides whether a sample may ever be accepted. memory: of the accepted samples."""

    def __init__(self, parts: "Parts", config: DispatchConfig) -> None:
        self._needs_version = config.max_staleness is not None
        self._buffer, self._producers = parts.buffer, parts.producers
        self._closed_groups, self.memory = parts.closed_groups, parts.memory
        #: Why nothing more is accepted; None while samples are.
        self.closed: str | None = None
        self.closed_code = "closed"
        #: Whether the next dispatcher may accept refused samples.
        self.shuts_down = False
        #: Samples of older policy versions than this are refused: their phase has ended.
        self.oldest_version = 0

    def bar(self, version: int) -> None:
        """Refuse samples older than this version from now on."""
        self.oldest_version = max(self.oldest_version, version)

    @property
    def recheck_key(self) -> tuple[object, ...]:
        """Changes whenever a blocked sample may have become ineligible."""
        return self.oldest_version, self._buffer.schema_source

    def fast_path(self, push: Push) -> SamplesByField | None:
        """The undecided samples of a push if they can take the fast path, else None.

        They can if they are ungrouped, valid, new, and last in the push.
        """
        first = next(iter(push.samples), None)
        if first is None or self._buffer.is_grouped(first):
            return None  # the usual exceptions, found cheaply
        decided = len(push.outcomes) - push.outcomes.count(None)
        if None in push.outcomes[:decided] or decided == len(push.outcomes):
            return None
        samples = SamplesByField.of(push.samples[decided:])
        plain = (
            self.closed is None
            and self._buffer.can_take_fast_path(samples)
            and not self._producers.has_ended(push.producer)
            and self._is_young(push, samples)
            and not (self._needs_version and None in samples.policy_versions)
            and self.memory.are_new(push.producer, push.numbers[decided:], push.given_ids[decided:])
        )
        return samples if plain else None

    def is_begun_anew(self, group: OpenGroup, coming: int) -> bool:
        """Whether `coming` new members can only replace those of producers that are gone."""
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
        """Raise SampleRefused if this sample may never be accepted."""
        if self.closed is not None and not push.exempt_from_end:
            if self.shuts_down:
                raise ShuttingDown(self.closed)
            raise SampleRefused(self.closed_code, self.closed)
        if self._producers.has_ended(push.producer) and not push.exempt_from_end:
            raise SampleRefused("closed", "this producer has ended its stream")
        version = sample.judged_version
        if self._needs_version and version is None and not sample.staleness_exempt:
            raise SampleRefused(
                "policy-version-missing",
                f"sample {sample.sample_id} has no policy_version, and --max-staleness is set: "
                "its age is not known; push it with the version of the weights "
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
        if push.exempt_from_end:
            return 0
        return max(self.oldest_version, self._producers.phase(push.producer))


class Outcomes:
    """Records decisions.

    unreported: accepted samples that no effect has reported yet; None if none is reported. decided:
    the run's schema, until its effect is returned.
    """

    def __init__(self, parts: "Parts", config: DispatchConfig) -> None:
        self.unreported: list[Entry] | None = [] if config.reports_accepted else None
        self.decided: SchemaDecided | None = None
        self.repeats = Repeats()
        self._buffer, self._totals, self._producers = parts.buffer, parts.totals, parts.producers
        self._memory, self._objects = parts.memory, parts.references.objects
        self._append, self._durable = parts.append_fact, config.durable

    def fix_schema(self, schema: Schema, set_by: str) -> None:
        """Set the run's schema."""
        self._buffer.schema, self._buffer.schema_source = schema, set_by
        self.decided = SchemaDecided(schema, set_by)
        self._append(SchemaFixed(schema, set_by))

    def accept_all(
        self, push: Push, samples: SamplesByField, amount: Amount, now: float
    ) -> list[Entry]:
        """Accept the undecided samples of a push on the fast path. amount: of all of them."""
        these = slice(push.outcomes.index(None), None)
        self._fix_schema_if_unset(push, samples.schemas[0])
        entries = self._buffer.add_all(push.samples[these], amount, push.producer, now)
        self._remember(push, entries, push.numbers[these])
        push.outcomes[these] = [Outcome.ACCEPTED] * len(entries)
        self._totals.accepted(samples.tokens, samples.payloads, amount.footprint)
        return entries

    def accept(self, push: Push, index: int, sample: Sample, now: float) -> Entry:
        """Accept one sample of a push; `count` has to follow, once for all of them."""
        self._fix_schema_if_unset(push, sample.schema)
        entry, seq = self._buffer.add(sample, push.producer, now), push.first_seq + index
        self._remember(push, [entry], range(seq, seq + 1))
        push.outcomes[index] = Outcome.ACCEPTED
        return entry

    def _fix_schema_if_unset(self, push: Push, schema: Schema) -> None:
        """Set the run's schema to that of its first accepted sample."""
        if self._buffer.schema is None:
            by = f"producer {push.producer}" if push.producer else "an HTTP client"
            self.fix_schema(schema, f"set by the first accepted push, from {by}")

    def count(self, accepted: Sequence[Sample]) -> None:
        """Count samples that were accepted one by one."""
        payloads = [sample.payload for sample in accepted]
        tokens = [sample.tokens for sample in accepted]
        self._totals.accepted(tokens, payloads, Footprint.by(payloads))

    def record(
        self, push: Push, index: int, outcome: Outcome, *, producer_owned: bool = False
    ) -> None:
        """Record an outcome other than `accepted`.

        producer_owned: the sample may be pushed to the next dispatcher.
        """
        push.outcomes[index] = outcome
        self._totals.received[outcome] += 1
        if push.has_references:
            self._objects.not_accepted(push, index, outcome, producer_owned=producer_owned)

    def repeat(self, push: Push, index: int) -> None:
        """Record a duplicate or a conflict: a sample whose number or given id was accepted before.

        A repeated number is a resend; a repeated id is counted in `Repeats`.
        """
        sample, outcome = push.samples[index], Outcome.DUPLICATE
        if not self._memory.is_resent(push.producer, push.first_seq + index):
            conflicts = self._memory.conflicts(sample.sample_id, sample.checksum)
            outcome = Outcome.CONFLICT if conflicts else outcome
            self.repeats.repeated(push.producer, sample.sample_id, conflicts=conflicts)
        self.record(push, index, outcome)

    def refuse(self, push: Push, index: int, why: SampleRefused) -> None:
        """Refuse one sample of a push, with the reason."""
        push.errors[index], push.reasons[index] = str(why), why.reason
        self._totals.refused[why.reason] += 1
        self.record(push, index, Outcome.REFUSED, producer_owned=why.retriable)

    def _remember(self, push: Push, entries: Sequence[Entry], numbers: range) -> None:
        """Remember accepted entries. numbers: their sequence numbers."""
        samples = [entry.sample for entry in entries] if push.named else ()
        given = {sample.sample_id: sample.checksum for sample in samples}
        self._memory.accept(push.producer, numbers, given)
        self.repeats.accepted(push.producer)
        self._producers.contributed(push.producer)
        if push.has_references:
            self._objects.accepted(push, entries, numbers)
        if self.unreported is not None:
            self.unreported += entries
        if self._durable:  # facts are built only for a journal
            for entry, seq in zip(entries, numbers, strict=True):
                given_id = entry.sample.sample_id if push.named else None
                self._append(Accepted(entry, push.producer, seq, given_id))
