"""Admission: decide every pushed sample, hold back what finds no room, forget nothing.

A push is answered once, when all of its samples are decided. While a cap is reached, a producer's
pushes wait here in order of arrival, at most `credits` of them a producer; what exceeds that is
answered `full`. A member of an open group never waits: its room is reserved.

Most pushes are of new and valid samples without a group that all find room, or none does: these are
decided as a whole. Others are decided sample by sample, which comes to the same and takes longer.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dispatcher.core.buffer import Entry, SampleBuffer
from dispatcher.core.duplicates import DuplicateMemory
from dispatcher.core.events import Effect, Outcome, PushAnswered, PushHeld
from dispatcher.core.facts import Accepted, FloorRaised, Note
from dispatcher.core.room import Amount
from dispatcher.core.totals import Totals
from dispatcher.errors import BufferFull, ProtocolError, SampleRefused
from dispatcher.sample import Columns, Sample

#: Sample numbers that a producer may have above its floor, each of which is remembered; far above
#: what its credits allow, and a bound on what a producer can cost that never raises its floor.
MAX_UNANSWERED = 1 << 20


@dataclass(slots=True, eq=False)
class Push:
    """Samples `first_seq`, `first_seq + 1`, ... of one producer, as far as they are decided.

    producer: its client id; empty for a push that is never sent again under the same numbers.
    floor: this producer never again sends a number below it.
    named: sample ids were given by the user, so a repeat from any producer is a duplicate.
    """

    producer: str
    first_seq: int
    samples: tuple[Sample, ...]
    floor: int = 0
    named: bool = False
    outcomes: list[Outcome | None] = field(init=False)
    errors: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.outcomes = [None] * len(self.samples)

    @property
    def numbers(self) -> range:
        """The samples' sequence numbers."""
        return range(self.first_seq, self.first_seq + len(self.samples))

    @property
    def undecided(self) -> list[int]:
        """Indices of the samples that wait for room."""
        return [index for index, outcome in enumerate(self.outcomes) if outcome is None]

    @property
    def is_decided(self) -> bool:
        """Whether no sample waits."""
        return all(self.outcomes)

    @property
    def given_ids(self) -> tuple[str, ...]:
        """The samples' ids, if the user gave them."""
        return tuple(sample.sample_id for sample in self.samples) if self.named else ()

    def answer(self) -> PushAnswered:
        """The outcomes, in the order of the samples."""
        outcomes = tuple(filter(None, self.outcomes))
        return PushAnswered(self.producer, self.first_seq, outcomes, self.errors)


class Admission:
    """Lets samples into the buffer."""

    def __init__(
        self,
        buffer: SampleBuffer,
        totals: Totals,
        credits_: int,
        id_horizon: int,
        note: Note | None = None,
    ) -> None:
        self._buffer = buffer
        self._note = note
        self._credits = credits_
        self.memory = DuplicateMemory(id_horizon)
        self._held: deque[Push] = deque()
        self._totals = totals
        #: Set once nothing more is accepted; says why.
        self.closed: str | None = None
        #: Samples of weights older than this come too late: their phase has ended.
        self.oldest_version = 0

    @property
    def num_held(self) -> int:
        """Pushes that wait for room."""
        return len(self._held)

    def push(self, push: Push, now: float, *, may_hold: bool) -> list[Effect]:
        """Decide what can be decided now; hold or refuse the rest.

        Raises ProtocolError for a floor so low that it would have too much remembered.
        """
        if push.producer and push.numbers.stop - push.floor > MAX_UNANSWERED:
            raise ProtocolError(
                f"sample number {push.first_seq} with a floor of {push.floor}: a producer may have "
                f"{MAX_UNANSWERED} unanswered samples; raise the floor to the lowest number that "
                "may be sent again"
            )
        raised = bool(push.producer) and self.memory.raise_floor(push.producer, push.floor)
        if raised and self._note is not None:
            self._note(FloorRaised(push.producer, push.floor))
        self._decide(push, now, in_line=bool(self._held))
        if push.is_decided:
            return [push.answer()]
        if may_hold and self._holds_for(push.producer) < self._credits:
            self._held.append(push)
            return [PushHeld(push.producer, push.first_seq, self._reason(push))]
        for index in push.undecided:
            self._settle(push, index, Outcome.FULL)
        return [push.answer()]

    def retry(self, now: float) -> list[Effect]:
        """Room was made: let held pushes in, first come first served."""
        effects: list[Effect] = []
        while self._held:
            self._decide(self._held[0], now, in_line=False)
            if not self._held[0].is_decided:
                break
            effects.append(self._held.popleft().answer())
        return effects

    def producer_gone(self, producer: str) -> None:
        """A connection is lost: what it still had waiting was never accepted."""
        self._held = deque(push for push in self._held if push.producer != producer)

    def close(self, reason: str) -> list[Effect]:
        """Accept nothing more; answer what waits."""
        self.closed = reason
        effects: list[Effect] = []
        while self._held:
            push = self._held.popleft()
            for index in push.undecided:
                self._refuse(push, index, reason)
            effects.append(push.answer())
        return effects

    def _decide(self, push: Push, now: float, *, in_line: bool) -> None:
        """Decide the samples of a push as far as there is room.

        in_line: others wait already, so only what has its room reserved may pass them.
        """
        samples = Columns.of(push.samples)
        amount = Amount.of(samples)
        if not self._is_plain(push, samples):
            self._decide_each(push, now, in_line=in_line)
        elif in_line:
            return  # every one of them waits
        elif self._buffer.has_room(amount):
            entries = self._buffer.add_all(push.samples, amount, now)
            self._remember(push, entries, push.numbers)
            push.outcomes = [Outcome.ACCEPTED] * len(entries)
            self._totals.accepted(samples.tokens, amount.nbytes)
        elif (full := self._buffer.full(push.samples[0])) is None or full.cap != "samples":
            self._decide_each(push, now, in_line=in_line)  # smaller ones may find room

    def _is_plain(self, push: Push, samples: Columns) -> bool:
        """Whether room is all that the samples of a push need, and none of them is decided."""
        versions = {version for version in samples.policy_versions if version is not None}
        return (
            self.closed is None
            and not any(push.outcomes)
            and min(versions, default=self.oldest_version) >= self.oldest_version
            and self._buffer.are_plain(samples)
            and self.memory.are_new(push.producer, push.numbers, push.given_ids)
        )

    def _remember(self, push: Push, entries: Sequence[Entry], numbers: range) -> None:
        """Entries of a push are accepted, under these numbers."""
        given_ids = [entry.sample.sample_id for entry in entries] if push.named else ()
        self.memory.accept(push.producer, numbers, given_ids)
        if self._note is not None:
            for entry, seq in zip(entries, numbers, strict=True):
                given_id = entry.sample.sample_id if push.named else None
                self._note(Accepted(entry, push.producer, seq, given_id))

    def _decide_each(self, push: Push, now: float, *, in_line: bool) -> None:
        seen, check, full, add = self.memory.seen, self._check, self._buffer.full, self._buffer.add
        accepted: list[Sample] = []
        for index in push.undecided:
            sample, seq = push.samples[index], push.first_seq + index
            given_id = sample.sample_id if push.named else None
            if seen(push.producer, seq, given_id):
                self._settle(push, index, Outcome.DUPLICATE)
                continue
            try:
                check(sample)
            except SampleRefused as error:
                self._refuse(push, index, str(error))
                continue
            waits_in_line = in_line and not self._buffer.is_expected(sample)
            if waits_in_line or full(sample) is not None:
                continue
            entry = add(sample, now)
            self._remember(push, [entry], range(seq, seq + 1))
            push.outcomes[index] = Outcome.ACCEPTED
            accepted.append(sample)
        nbytes = sum(sample.nbytes for sample in accepted)
        self._totals.accepted([sample.tokens for sample in accepted], nbytes)

    def _check(self, sample: Sample) -> None:
        if self.closed is not None:
            raise SampleRefused("closed", self.closed)
        version = sample.policy_version
        if version is not None and version < self.oldest_version:
            raise SampleRefused(
                "phase-ended",
                f"sample {sample.sample_id} is of policy version {version}, whose phase has ended; "
                f"push samples of version {self.oldest_version} or newer",
            )
        self._buffer.check(sample)

    def _settle(self, push: Push, index: int, outcome: Outcome) -> None:
        push.outcomes[index] = outcome
        self._totals.received[outcome] += 1

    def _refuse(self, push: Push, index: int, why: str) -> None:
        push.errors[index] = why
        self._settle(push, index, Outcome.REFUSED)

    def _holds_for(self, producer: str) -> int:
        return sum(push.producer == producer for push in self._held)

    def _reason(self, push: Push) -> BufferFull:
        full = self._buffer.pressed or self._buffer.full(push.samples[push.undecided[0]])
        return full or BufferFull("samples", len(self._buffer), self._buffer.limits.samples)
