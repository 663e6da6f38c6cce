"""Admission: every push is answered once, when all of its samples are decided.

Pushes with blocked samples wait in a fair queue, at most `credits` of them a producer, and at most
`MAX_OF_GROUP` members of one group; samples above that are answered `full`. When something leaves
they are retried: in order until one stays blocked, and further ones while no step can be planned.

Each sample of a push is a duplicate, refused, accepted, or blocked for now. Most pushes have only
new and valid samples without a group, and capacity for all of them: these take a *fast path*, which
accepts them at once. Other pushes are decided sample by sample, to the same result and slower.
"""

from collections import Counter
from typing import TYPE_CHECKING

from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.buffer.entry import Amount
from rollout_dispatcher.core.config import DispatchConfig
from rollout_dispatcher.core.effects import Effect, PushBlocked, ResendRequested
from rollout_dispatcher.core.facts import FloorRaised
from rollout_dispatcher.errors import ProtocolError, SampleRefused, ShuttingDown
from rollout_dispatcher.sample import SIZE_AT_CLOSE, Outcome, Sample

if TYPE_CHECKING:
    from rollout_dispatcher.core.parts import Parts

#: Reasons of refusal for which the sample's group loses a member. Excludes mislabelled members and
#: samples after the end.
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
        "group-too-long",
        "policy-version-missing",
    )
)


class Admission:
    """Answers pushes, accepts samples into the buffer, and queues blocked pushes."""

    def __init__(self, parts: "Parts", config: DispatchConfig) -> None:
        self.eligibility, self.capacity, self.blocked = (
            parts.eligibility,
            parts.capacity,
            parts.blocked,
        )
        self._buffer, self._outcomes, self._dropping = parts.buffer, parts.outcomes, parts.dropping
        self._producers, self._append = parts.producers, parts.append_fact
        self._credits = config.producer_credits
        self._recheck_key: tuple[object, ...] = ()

    # -- pushes -----------------------------------------------------------------------------

    def push(self, push: Push, now: float, *, may_wait: bool) -> list[Effect]:
        """Decide the samples that can be decided now; block the rest, or answer `full`.

        Raises ProtocolError for a push more than `MAX_UNANSWERED` above its floor, and for a resent
        payload that differs.
        """
        if push.producer and push.numbers.stop - push.floor > MAX_UNANSWERED:
            raise ProtocolError(
                f"sample number {push.first_seq} with a floor of {push.floor}: a producer may have "
                f"{MAX_UNANSWERED} unanswered samples; raise the floor to the lowest number that "
                "may be sent again"
            )
        if (known := self.blocked.find_evicted(push.producer, push.first_seq)) is not None:
            self.blocked.restore_payload(known, push.samples)
            return self._try(known, now)
        memory = self.eligibility.memory
        raised = bool(push.producer) and memory.raise_floor(push.producer, push.floor)
        if raised:
            self._append(FloorRaised(push.producer, push.floor))
        others_wait = len(self.blocked) > 0
        in_line = others_wait and self.capacity.units_short() <= 0
        self._decide_samples(push, now, in_line=in_line)
        if others_wait and any(push.outcomes):
            self.blocked.changes += 1  # these samples have passed those in the queue
        if push.is_decided:
            return [push.answer()]
        if may_wait and self._has_place(push):
            self.blocked.add(push)
            self._producers.contributed(push.producer)  # an end waits for this producer as well
            # It may be first in the fair queue, and fit where those behind it do not.
            is_first = in_line and self.blocked.first() is push
            tried = self._try(push, now) if is_first else []
            if push not in self.blocked:
                return tried
            return [PushBlocked(push.producer, push.first_seq, self.capacity.reached()), *tried]
        for index in push.undecided:  # finds no capacity, and cannot wait for any
            self._outcomes.record(push, index, Outcome.FULL)
        return [push.answer()]

    def _has_place(self, push: Push) -> bool:
        """Whether a push may be queued."""
        of_producer = len(self.blocked.of_producer(push.producer))
        return of_producer < self._credits and not self.blocked.exceeds_group_limit(push)

    def retry(self, now: float) -> list[Effect]:
        """Retry blocked pushes in the order of the queue: something has left, or changed."""
        self.capacity.blocking_cap = None
        effects: list[Effect] = []
        while self.blocked:
            first = self.blocked.first()
            effects += self._try(first, now)
            if first in self.blocked:
                break
        if self.blocked and self.capacity.units_short() > 0:
            effects += self._retry_behind(now)
        return effects + self._retry_members(now)

    def _retry_behind(self, now: float) -> list[Effect]:
        """Retry smaller pushes behind the first, while no step can be planned."""
        if (recheck_key := self.eligibility.recheck_key) != self._recheck_key:
            self._recheck_key = recheck_key
            self.blocked.mark_all_changed()
        effects: list[Effect] = []
        first = self.blocked.first()
        for push in self.blocked.fitting(
            lambda footprint: self.capacity.hard_cap(*footprint) is None
        ):
            if push in self.blocked and push is not first:
                effects += self._try(push, now)
            if self.capacity.units_short() <= 0:
                return effects  # a step can be planned: the others keep their order
        for footprint in self.blocked.largest():
            if (full := self.capacity.hard_cap(*footprint)) is not None:
                self.capacity.set_blocking_cap(full, now)
        return effects

    def _retry_members(self, now: float) -> list[Effect]:
        """Retry members of changed groups: those of open ones pass the queue, others may be refused
        now.
        """
        effects: list[Effect] = []
        while changed := self.blocked.pop_group_changed():
            for push in changed:
                if push in self.blocked and not push.payload_evicted:
                    self._decide_each(push, now, in_line=True)
                    effects += self._after_try(push)
        return effects

    def producer_gone(self, producer: str) -> None:
        """Withdraw the blocked pushes of a producer that is disconnected."""
        for push in self.blocked.of_producer(producer):
            self.blocked.withdraw(push)

    def shut_down(self, reason: str) -> list[Effect]:
        """Accept nothing more; answer blocked pushes with ShuttingDown."""
        self.eligibility.closed, self.eligibility.shuts_down = reason, True
        return self.refuse_blocked(ShuttingDown(reason))

    def end(self, code: str, why: str) -> list[Effect]:
        """Accept nothing more for this reason; refuse blocked pushes."""
        self.eligibility.closed, self.eligibility.closed_code = why, code
        return self.refuse_blocked(SampleRefused(code, why))

    def refuse_blocked(self, why: SampleRefused) -> list[Effect]:
        """Refuse every blocked push."""
        effects: list[Effect] = []
        for push in list(self.blocked):
            for index in push.undecided:
                self._outcomes.refuse(push, index, why)
            self.blocked.remove(push)
            effects.append(push.answer())
        return effects

    # -- pushes that wait ---------------------------------------------------------------------

    def _try(self, push: Push, now: float) -> list[Effect]:
        """Decide a blocked push as far as that is possible now."""
        if push.payload_evicted:
            return self._request_resend(push, now)
        if not push.groups:  # a member may be refused by now
            full = self.capacity.all_blocked_by(push.smallest)
            if full is not None:
                self.capacity.set_blocking_cap(full, now)
                return []
        self._decide_samples(push, now, in_line=False)
        return self._after_try(push)

    def _after_try(self, push: Push) -> list[Effect]:
        if push.is_decided:
            self.blocked.remove(push)
            return [push.answer()]
        self.blocked.update_size(push)
        return []

    def _request_resend(self, push: Push, now: float) -> list[Effect]:
        """Request a resend of the payload, unless enough resends are already in flight to fill the
        capacity.
        """
        if push.resend_requested:
            return []
        first, asked = push.waiting[0], self.blocked.resending_samples
        if (full := self.capacity.resend_blocked_by(asked, first)) is not None:
            self.capacity.set_blocking_cap(full, now)
            return []
        self.blocked.request_resend(push, now)
        return [ResendRequested(push.producer, push.first_seq)]

    # -- the samples of one push ---------------------------------------------------------------

    def _decide_samples(self, push: Push, now: float, *, in_line: bool) -> None:
        """Accept, refuse or leave blocked each undecided sample of a push.

        in_line: others are queued already, so only members of open groups may pass them.
        """
        samples = self.eligibility.fast_path(push)
        if samples is None:
            self._decide_each(push, now, in_line=in_line)
        elif in_line:
            return  # every one of them waits
        elif self.capacity.admits_all(samples, amount := Amount.of(samples)):
            self.capacity.came_in(self._outcomes.accept_all(push, samples, amount, now), now)
        else:
            self._decide_each(push, now, in_line=False)

    def _decide_each(self, push: Push, now: float, *, in_line: bool) -> None:
        """`_decide_samples`, sample by sample."""
        self._supersede(push)
        accepted: list[Sample] = []
        lost = False
        for index in push.undecided:
            sample, seq = push.samples[index], push.first_seq + index
            given_id = sample.sample_id if push.named else None
            if self.eligibility.memory.seen(push.producer, seq, given_id):
                self._outcomes.repeat(push, index)
                continue
            try:
                self.eligibility.check(push, sample)
            except SampleRefused as error:
                lost |= self._refuse(push, index, error, now)
                continue
            if in_line and not self._buffer.belongs_to_open_group(sample):
                continue
            if (full := self.capacity.blocked_by(sample)) is not None:
                self.capacity.set_blocking_cap(full, now)
                continue
            if self._buffer.is_grouped(sample):
                sample = self._buffer.sized(sample)
            self.capacity.came_in([self._outcomes.accept(push, index, sample, now)], now)
            accepted.append(sample)
        if accepted:
            self._outcomes.count(accepted)
        # A lost member may open or end its group, which decides members before it.
        if push.waiting and (lost or any(map(self.eligibility.is_late, push.waiting))):
            self._decide_each(push, now, in_line=in_line)

    def _supersede(self, push: Push) -> None:
        """Drop open groups of producers that are gone, and that this push begins anew.

        It does if all producers of the group have died, or if the group would exceed its size while
        none of its producers is connected.
        """
        memory, groups = self.eligibility.memory, self._buffer.groups
        coming = Counter(
            sample.group_id
            for index in push.undecided
            if (sample := push.samples[index]).group_id is not None
            and groups.get(sample.group_id) is not None
            and not memory.seen(
                push.producer, push.first_seq + index, sample.sample_id if push.named else None
            )
        )
        for group_id, count in coming.items():
            group = groups.get(str(group_id))
            if group is not None and self.eligibility.is_begun_anew(group, count):
                self._dropping.supersede(group)

    def _refuse(self, push: Push, index: int, error: SampleRefused, now: float) -> bool:
        """Refuse a sample; returns whether its group has lost it for good."""
        self._outcomes.refuse(push, index, error)
        sample, seq = push.samples[index], push.first_seq + index
        if not (error.reason in MEMBER_LOST and self._buffer.is_grouped(sample)):
            return False
        lost = self.eligibility.memory.refuse(push.producer, seq)
        if lost:
            size = None if sample.group_size == SIZE_AT_CLOSE else sample.group_size
            why = f"a member was refused ({error})"
            self._dropping.lost_member(str(sample.group_id), size, why, now)
        return lost


#: Sample numbers that a producer may have above its floor, each of which is remembered; far above
#: what its credits allow, and a bound on what a producer can cost that never raises its floor.
MAX_UNANSWERED = 1 << 20
