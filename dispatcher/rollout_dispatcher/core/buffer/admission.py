"""Admission: decide every pushed sample, hold back as little as can be, forget nothing.

A sample is held back only

    at the hard cap     if its bytes would exceed what may be in memory, or the journal has no room
    at a soft cap       if it is reached by ready samples, a step could be planned of what is
                        ready, and the sample belongs to no open group

so while ranks cannot be given a step, whatever may make one comes in: nobody waits for a producer
that waits for us. A push is answered once, when all of its samples are decided. Pushes that are
held wait here in order of arrival, at most `credits` of them a producer; what exceeds that is
answered `full`. When something leaves they are tried again: in order until one is held back, and
all of them while no step can be planned.

Most pushes are of new and valid samples without a group that all find room, or none does: these are
decided as a whole. Others are decided sample by sample, which comes to the same and takes longer.
"""

from collections.abc import Callable, Sequence

from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.closed_groups import ClosedGroups
from rollout_dispatcher.core.buffer.entry import Amount, Entry
from rollout_dispatcher.core.buffer.held_pushes import HeldPushes
from rollout_dispatcher.core.effects import Effect, PushHeld, PushRecalled
from rollout_dispatcher.core.facts import Accepted, FloorRaised, Note
from rollout_dispatcher.core.producers.duplicates import DuplicateMemory
from rollout_dispatcher.core.producers.producers import Producers
from rollout_dispatcher.core.producers.push import Push
from rollout_dispatcher.core.totals import Totals
from rollout_dispatcher.errors import BufferFull, ProtocolError, SampleRefused
from rollout_dispatcher.sample import SIZE_AT_CLOSE, Outcome, Sample, SamplesByField

#: Sample numbers that a producer may have above its floor, each of which is remembered; far above
#: what its credits allow, and a bound on what a producer can cost that never raises its floor.
MAX_UNANSWERED = 1 << 20
#: Caps that nothing but leaving samples can lift.
HARD_CAPS = ("bytes", "journal")

#: A producer that cannot be held, as over HTTP, and has not asked again for so long has gone.
ASKS_AGAIN_S = 5.0
#: Why a sample is refused that its group will lack from now on. Not: what claims to be of a group
#: that is another, or comes when everything is over.
MEMBER_LOST = frozenset(
    (
        "empty",
        "too-long",
        "loss-tokens",
        "schema",
        "larger-than-buffer",
        "unknown-store",
        "phase-ended",
        "group-overflows",
    )
)

#: Called when a group's member is refused for good: the group's id, its size if that is told, why,
#: and now.
OnLost = Callable[[str, int | None, str, float], None]


class Admission:
    """Lets samples into the buffer.

    lacking: units that are ready fewer than a step needs, 0 or less if one could be planned.
    lost: what becomes of a group whose member is refused.
    """

    def __init__(
        self,
        buffer: SampleBuffer,
        totals: Totals,
        producers: Producers,
        closed_groups: ClosedGroups,
        memory: DuplicateMemory,
        *,
        credits_: int,
        lacking: Callable[[], int],
        lost: OnLost,
        note: Note | None = None,
    ) -> None:
        self._buffer, self._totals, self._producers = buffer, totals, producers
        self._closed_groups, self._note = closed_groups, note
        self._credits, self._lacking, self._lost = credits_, lacking, lost
        #: Whether the journal takes so many samples of so many bytes; None without one.
        self.journal_has_room: Callable[[int, int], bool] | None = None
        self._unnoted = Amount()
        self.memory = memory
        self.held = HeldPushes(buffer.limits.held_bytes)
        self._asked_at = 0.0
        self._begun: list[str] = []  # groups of which samples may wait
        #: The cap that last held a sample back, until something leaves.
        self.pressed: BufferFull | None = None
        #: When a sample last came in, or one that waits was last helped.
        self.last_moved = 0.0
        #: Set once nothing more is accepted; says why.
        self.closed: str | None = None
        #: Samples of weights older than this come too late: their phase has ended.
        self.oldest_version = 0

    @property
    def num_held(self) -> int:
        """Pushes that wait."""
        return len(self.held)

    @property
    def at_hard_cap(self) -> bool:
        """Whether a sample was held back that only leaving samples can let in."""
        return self.pressed is not None and self.pressed.cap in HARD_CAPS

    def is_stuck(self, now: float) -> bool:
        """Whether a producer waits at a hard cap; over HTTP it asks again and again."""
        return self.at_hard_cap and (self.num_held > 0 or now - self._asked_at <= ASKS_AGAIN_S)

    # -- pushes -----------------------------------------------------------------------------

    def push(self, push: Push, now: float, *, may_hold: bool) -> list[Effect]:
        """Decide what can be decided now; hold or refuse the rest.

        Raises ProtocolError for a floor so low that it would have too much remembered, and for a
        payload that was asked for again and is another.
        """
        if push.producer and push.numbers.stop - push.floor > MAX_UNANSWERED:
            raise ProtocolError(
                f"sample number {push.first_seq} with a floor of {push.floor}: a producer may have "
                f"{MAX_UNANSWERED} unanswered samples; raise the floor to the lowest number that "
                "may be sent again"
            )
        if (known := self.held.find_emptied(push.producer, push.first_seq)) is not None:
            self.held.refill(known, push.samples)
            return self._try(known, now) + self.retry(now)
        raised = bool(push.producer) and self.memory.raise_floor(push.producer, push.floor)
        if raised and self._note is not None:
            self._note(FloorRaised(push.producer, push.floor))
        self._decide(push, now, in_line=self.num_held > 0 and self._lacking() <= 0)
        if push.is_decided:
            return [push.answer(), *self._let_members_in(now)]
        if may_hold and len(self.held.of_producer(push.producer)) < self._credits:
            self.held.add(push)
            return [PushHeld(push.producer, push.first_seq, self._reason())]
        for index in push.undecided:
            self._settle(push, index, Outcome.FULL)
        return [push.answer()]

    def retry(self, now: float) -> list[Effect]:
        """Something has left: let held pushes in, first come first served."""
        self.pressed = None
        effects: list[Effect] = []
        while self.held:
            first = self.held.first()
            effects += self._try(first, now)
            if first in self.held:
                break
        if self.held and self._lacking() > 0:  # a smaller one may fit, or is a missing member
            for push in list(self.held)[1:]:
                effects += self._try(push, now)
        return effects + self._let_members_in(now)

    def producer_gone(self, producer: str) -> None:
        """A connection is lost: what it still had waiting was never accepted."""
        for push in self.held.of_producer(producer):
            self.held.remove(push)

    def excuse_held(self) -> None:
        """What waits now may come in though it would be refused if it came later."""
        for push in self.held:
            push.excused = True

    def waits(self, belongs: Callable[[int | None], bool]) -> bool:
        """Whether an excused sample of such a policy version still waits."""
        return any(
            belongs(sample.policy_version)
            for push in self.held
            if push.excused
            for sample in push.waiting
        )

    def close(self, reason: str) -> list[Effect]:
        """Accept nothing more; answer what waits."""
        self.closed = reason
        effects: list[Effect] = []
        for push in list(self.held):
            for index in push.undecided:
                self._refuse(push, index, reason)
            self.held.remove(push)
            effects.append(push.answer())
        return effects

    def noted(self) -> None:
        """What was accepted is with the journal: it counts that from now on."""
        if self._unnoted.samples:
            self._unnoted = Amount()

    # -- deciding ---------------------------------------------------------------------------

    def _let_members_in(self, now: float) -> list[Effect]:
        """Samples that wait and whose group has begun meanwhile."""
        effects: list[Effect] = []
        while self._begun:
            for push in self.held.of_group(self._begun.pop()):
                if not self.held.is_emptied(push):
                    self._decide_each(push, now, in_line=True)
                    effects += self._after_try(push)
        return effects

    def _try(self, push: Push, now: float) -> list[Effect]:
        """Decide a held push as far as that is possible now."""
        if self.held.is_emptied(push):
            return self._recall(push, now)
        self._decide(push, now, in_line=False)
        return self._after_try(push)

    def _after_try(self, push: Push) -> list[Effect]:
        if push.is_decided:
            self.held.remove(push)
            return [push.answer()]
        self.held.weigh(push)
        return []

    def _recall(self, push: Push, now: float) -> list[Effect]:
        """Ask for the payload again if it can come in, and not as much as can is on its way."""
        first, asked = push.waiting[0], self.held.asked_samples
        if (full := self._no_room(first.nbytes)) is not None:
            self._press(full, now)
            return []
        full = self._buffer.soft_cap(asked) if self._lacking() <= asked else None
        if full is not None and not self._buffer.is_expected(first):
            self._press(full, now)
            return []
        return [PushRecalled(push.producer, push.first_seq)] if self.held.ask(push, now) else []

    def _decide(self, push: Push, now: float, *, in_line: bool) -> None:
        """Decide the samples of a push as far as they may come in.

        in_line: others wait already, so only members of open groups may pass them.
        """
        samples = self._plain(push)
        if samples is None:
            self._decide_each(push, now, in_line=in_line)
        elif in_line:
            return  # every one of them waits
        elif self._all_pass(samples, amount := Amount.of(samples)):
            entries = self._buffer.add_all(push.samples, amount, push.producer, now)
            self._remember(push, entries, push.numbers, now)
            push.outcomes = [Outcome.ACCEPTED] * len(entries)
            self._totals.accepted(samples.tokens, amount.nbytes)
        else:
            self._decide_each(push, now, in_line=False)

    def _plain(self, push: Push) -> SamplesByField | None:
        """The samples of a push, if room is all that they need and none of them is decided."""
        first = next(iter(push.samples), None)
        if first is None or self._buffer.is_grouped(first):
            return None  # the usual exceptions, found before anything is computed
        samples = SamplesByField.of(push.samples)
        plain = (
            self.closed is None
            and not any(push.outcomes)
            and self._buffer.are_plain(samples)
            and not self._producers.has_ended(push.producer)
            and self._is_young(push, samples)
            and self.memory.are_new(push.producer, push.numbers, push.given_ids)
        )
        return samples if plain else None

    def _is_young(self, push: Push, samples: SamplesByField) -> bool:
        versions = [version for version in samples.policy_versions if version is not None]
        return not versions or min(versions) >= self._oldest_for(push)

    def _oldest_for(self, push: Push) -> int:
        if push.excused:
            return 0
        return max(self.oldest_version, self._producers.phase(push.producer))

    def _all_pass(self, samples: SamplesByField, amount: Amount) -> bool:
        """Whether not even the last of these plain samples is held back."""
        if self._no_room(amount.nbytes, amount.samples) is not None:
            return False
        before, tokens = amount.samples - 1, amount.tokens - samples.tokens[-1]
        return self._buffer.soft_cap(before, tokens) is None or self._lacking() > before

    def _held_back(self, sample: Sample) -> BufferFull | None:
        """The cap that holds this sample back now, if one does."""
        full = self._no_room(sample.memory_bytes)
        if full is None and (full := self._buffer.soft_cap()) is not None:
            passes = self._buffer.is_expected(sample) or self._lacking() > 0
            full = None if passes else full
        return full

    def _no_room(self, nbytes: int, samples: int = 1) -> BufferFull | None:
        """The hard cap that so many samples and bytes more would exceed, if they would."""
        if self.journal_has_room is not None:
            unnoted, held = self._unnoted, self._buffer.held_bytes
            if not self.journal_has_room(samples + unnoted.samples, nbytes + unnoted.nbytes):
                return BufferFull("journal", held, held)
        return self._buffer.hard_cap(nbytes)

    def _remember(self, push: Push, entries: Sequence[Entry], numbers: range, now: float) -> None:
        """Entries of a push are accepted, under these numbers."""
        given_ids = [entry.sample.sample_id for entry in entries] if push.named else ()
        self.memory.accept(push.producer, numbers, given_ids)
        versions = [entry.sample.policy_version for entry in entries]
        oldest = min((version for version in versions if version is not None), default=None)
        self._producers.contributed(push.producer, oldest)
        self.last_moved = now
        if self._note is not None:
            self._unnoted += Amount.of_entries(entries)
            for entry, seq in zip(entries, numbers, strict=True):
                given_id = entry.sample.sample_id if push.named else None
                self._note(Accepted(entry, push.producer, seq, given_id))

    def _decide_each(self, push: Push, now: float, *, in_line: bool) -> None:
        accepted: list[Sample] = []
        for index in push.undecided:
            sample, seq = push.samples[index], push.first_seq + index
            given_id = sample.sample_id if push.named else None
            if self.memory.seen(push.producer, seq, given_id):
                self._settle(push, index, Outcome.DUPLICATE)
                continue
            try:
                self._check(push, sample, now)
            except SampleRefused as error:
                self._refuse(push, index, str(error))
                lost = error.reason in MEMBER_LOST and self._buffer.is_grouped(sample)
                if lost and self.memory.refuse(push.producer, seq):
                    size = None if sample.group_size == SIZE_AT_CLOSE else sample.group_size
                    why = f"a member was refused ({error})"
                    self._lost(str(sample.group_id), size, why, now)
                continue
            if in_line and not self._buffer.is_expected(sample):
                continue
            if (full := self._held_back(sample)) is not None:
                self._press(full, now)
                continue
            if self._buffer.is_grouped(sample):
                self._note_beginning(sample)
                sample = self._buffer.sized(sample)
            entry = self._buffer.add(sample, push.producer, now)
            self._remember(push, [entry], range(seq, seq + 1), now)
            push.outcomes[index] = Outcome.ACCEPTED
            accepted.append(sample)
        nbytes = sum(sample.memory_bytes for sample in accepted)
        self._totals.accepted([sample.tokens for sample in accepted], nbytes)

    def _note_beginning(self, sample: Sample) -> None:
        """If its group begins with it, members of it that wait may come in, too."""
        begins = sample.group_id is not None and not self._buffer.is_expected(sample)
        if begins and self.held.of_group(str(sample.group_id)):
            self._begun.append(str(sample.group_id))

    def _press(self, full: BufferFull, now: float) -> None:
        """Remember what holds samples back: of several caps a hard one."""
        if full.cap in HARD_CAPS:
            self._asked_at = now
        self.pressed = self.pressed if self.at_hard_cap else full

    def _check(self, push: Push, sample: Sample, now: float) -> None:
        """Raise SampleRefused if this sample may not come in, now or later."""
        if self.closed is not None and not push.excused:
            raise SampleRefused("closed", self.closed)
        if self._producers.has_ended(push.producer) and not push.excused:
            raise SampleRefused("closed", "this producer has ended its stream")
        version = sample.policy_version
        if version is not None and version < (oldest := self._oldest_for(push)):
            raise SampleRefused(
                "phase-ended",
                f"sample {sample.sample_id} is of policy version {version}, whose phase has ended; "
                f"push samples of version {oldest} or newer",
            )
        self._buffer.check(sample)
        if self._buffer.is_grouped(sample):
            assert sample.group_id is not None
            if (why := self._closed_groups.why_refused(sample.group_id, now)) is not None:
                raise SampleRefused("group-closed", f"group {sample.group_id} was given up: {why}")
            self._buffer.check_group(sample)

    def _settle(self, push: Push, index: int, outcome: Outcome) -> None:
        push.outcomes[index] = outcome
        self._totals.received[outcome] += 1

    def _refuse(self, push: Push, index: int, why: str) -> None:
        push.errors[index] = why
        self._settle(push, index, Outcome.REFUSED)

    def _reason(self) -> BufferFull:
        limits = self._buffer.limits
        reached = self.pressed or self._buffer.soft_cap()
        return reached or BufferFull("samples", self._buffer.ready_units, limits.samples)
