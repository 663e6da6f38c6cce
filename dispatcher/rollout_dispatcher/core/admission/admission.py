"""Admission: every push is answered once, when all of its samples are decided.

Pushes of which samples are held back wait here in line, at most `credits` of them a producer, and
as many members of one group as `held_pushes.py` says; what exceeds that is answered `full`. When
something leaves they are tried again: in order until one is held back, and further ones while no
step can be planned.

Of the samples of one push each is a duplicate, refused, accepted, or held back for now. Most pushes
are of new and valid samples without a group: as many of these as there is capacity for, from the
first on, are decided as a whole. Others are decided sample by sample, which comes to the same and
takes longer.
"""

from collections import Counter
from operator import attrgetter
from typing import TYPE_CHECKING

from rollout_dispatcher.core.admission.held_pushes import Push
from rollout_dispatcher.core.buffer.entry import Amount
from rollout_dispatcher.core.config import DispatchConfig
from rollout_dispatcher.core.effects import Effect, PushHeld, PushRecalled
from rollout_dispatcher.core.facts import FloorRaised
from rollout_dispatcher.errors import ProtocolError, SampleRefused, ShuttingDown
from rollout_dispatcher.sample import SIZE_AT_CLOSE, Outcome, Sample, SamplesByField

if TYPE_CHECKING:
    from rollout_dispatcher.core.parts import Parts

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
        "group-too-long",
        "policy-version-missing",
    )
)

_nbytes = attrgetter("nbytes")


class Admission:
    """Answers pushes, lets samples into the buffer, and holds pushes that wait."""

    def __init__(self, parts: "Parts", config: DispatchConfig) -> None:
        self.eligibility, self.capacity, self.held = parts.eligibility, parts.capacity, parts.held
        self._buffer, self._outcomes, self._dropping = parts.buffer, parts.outcomes, parts.dropping
        self._producers, self._note = parts.producers, parts.note
        self._credits = config.producer_credits
        self._situation: tuple[object, ...] = ()

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
            return self._try(known, now)
        memory = self.eligibility.memory
        raised = bool(push.producer) and memory.raise_floor(push.producer, push.floor)
        if raised:
            self._note(FloorRaised(push.producer, push.floor))
        others_wait = len(self.held) > 0
        in_line = others_wait and self.capacity.shortfall() <= 0
        self._decide(push, now, in_line=in_line)
        if others_wait and any(push.outcomes):
            self.held.changes += 1  # what has passed by those in line is before them now
        if push.is_decided:
            return [push.answer()]
        if may_hold and self._has_place(push):
            self.held.add(push)
            self._producers.contributed(push.producer)  # an end waits for its word as well
            # Who owes nothing may stand before all others in line, whom a cap may hold back alone.
            is_first = in_line and self.held.first() is push
            tried = self._try(push, now) if is_first else []
            if push not in self.held:
                return tried
            return [PushHeld(push.producer, push.first_seq, self.capacity.reached()), *tried]
        for index in push.undecided:  # finds no capacity, and cannot wait for any
            self._outcomes.settle(push, index, Outcome.FULL)
        return [push.answer()]

    def _has_place(self, push: Push) -> bool:
        """Whether a push may wait in line."""
        of_producer = len(self.held.of_producer(push.producer))
        return of_producer < self._credits and not self.held.is_crowded(push)

    def retry(self, now: float) -> list[Effect]:
        """Something has left, or changed: let held pushes in, as they stand in line."""
        self.capacity.pressed = None
        effects: list[Effect] = []
        while self.held:
            first = self.held.first()
            effects += self._try(first, now)
            if first in self.held:
                break
        if self.held and self.capacity.shortfall() > 0:
            effects += self._retry_behind(now)
        return effects + self._retry_members(now)

    def _retry_behind(self, now: float) -> list[Effect]:
        """Behind the first in line a smaller push may fit."""
        if (situation := self.eligibility.situation) != self._situation:
            self._situation = situation
            self.held.unsettle_all()
        effects: list[Effect] = []
        first = self.held.first()
        for push in self.held.fitting(lambda taken: self.capacity.hard_cap(*taken) is None):
            if push in self.held and push is not first:
                effects += self._try(push, now)
            if self.capacity.shortfall() <= 0:
                return effects  # a step can be planned: the others wait in line
        for taken in self.held.largest():
            if (full := self.capacity.hard_cap(*taken)) is not None:
                self.capacity.press(full, now)
        return effects

    def _retry_members(self, now: float) -> list[Effect]:
        """Members of open groups pass by those in line; of others some may be refused by now."""
        effects: list[Effect] = []
        while unsettled := self.held.take_unsettled():
            for push in unsettled:
                if push in self.held and not push.emptied:
                    self._decide_each(push, now, in_line=True)
                    effects += self._after_try(push)
        return effects

    def producer_gone(self, producer: str) -> None:
        """A connection is lost: what it still had waiting was never accepted."""
        for push in self.held.of_producer(producer):
            self.held.give_up(push)

    def shut_down(self, reason: str) -> list[Effect]:
        """Accept nothing more; answer what waits."""
        self.eligibility.closed, self.eligibility.shuts_down = reason, True
        return self.refuse_held(ShuttingDown(reason))

    def end(self, code: str, why: str) -> list[Effect]:
        """Accept nothing more for this reason, and answer what waits."""
        self.eligibility.closed, self.eligibility.closed_code = why, code
        return self.refuse_held(SampleRefused(code, why))

    def refuse_held(self, why: SampleRefused) -> list[Effect]:
        """Answer what waits: it will not come in any more."""
        effects: list[Effect] = []
        for push in list(self.held):
            for index in push.undecided:
                self._outcomes.refuse(push, index, why)
            self.held.remove(push)
            effects.append(push.answer())
        return effects

    # -- pushes that wait ---------------------------------------------------------------------

    def _try(self, push: Push, now: float) -> list[Effect]:
        """Decide a held push as far as that is possible now."""
        if push.emptied:
            return self._recall(push, now)
        if not push.groups:  # a member may be refused by now
            full = self.capacity.holds_back_all(self.held.least(push))
            if full is not None:
                self.capacity.press(full, now)
                return []
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
        if push.asked:
            return []
        first, asked = push.waiting[0], self.held.asked_samples
        if (full := self.capacity.holds_back_after(asked, first)) is not None:
            self.capacity.press(full, now)
            return []
        self.held.ask(push, now)
        return [PushRecalled(push.producer, push.first_seq)]

    # -- the samples of one push ---------------------------------------------------------------

    def _decide(self, push: Push, now: float, *, in_line: bool) -> None:
        """Decide the samples of a push as far as they may come in.

        in_line: others wait already, so only members of open groups may pass them.
        """
        samples = self.eligibility.plain(push)
        if samples is None:
            self._decide_each(push, now, in_line=in_line)
        elif in_line:
            return  # every one of them waits
        else:
            amount = Amount.of(samples)
            fitting = self.capacity.admits(samples, amount)
            if fitting == amount.samples:
                self._accept(push, samples, amount, now)
                return
            if fitting:
                first = samples.first(fitting)
                self._accept(push, first, Amount.of(first), now)
            self._hold_back(push, now)

    def _accept(self, push: Push, samples: SamplesByField, amount: Amount, now: float) -> None:
        """The first of those that wait, which are plain, come in: this much together."""
        self.capacity.came_in(self._outcomes.accept_all(push, samples, amount, now), now)

    def _hold_back(self, push: Push, now: float) -> None:
        """What waits of a plain push, of which the first does not come in."""
        waiting = push.waiting
        if len({type(sample.payload) for sample in waiting}) > 1:  # of two sizes that differ
            self._decide_each(push, now, in_line=False)
            return
        smallest, largest = (find(waiting, key=_nbytes) for find in (min, max))
        if (full := self.capacity.holds_back(smallest)) is None:
            self._decide_each(push, now, in_line=False)  # what is smaller may come in
            return
        self.capacity.press(full, now)
        if (full := self.capacity.holds_back(largest)) is not None:
            self.capacity.press(full, now)

    def _decide_each(self, push: Push, now: float, *, in_line: bool) -> None:
        """The same, sample by sample."""
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
            if in_line and not self._buffer.is_expected(sample):
                continue
            if (full := self.capacity.holds_back(sample)) is not None:
                self.capacity.press(full, now)
                continue
            if self._buffer.is_grouped(sample):
                sample = self._buffer.sized(sample)
            self.capacity.came_in([self._outcomes.accept(push, index, sample, now)], now)
            accepted.append(sample)
        if accepted:
            self._outcomes.count(accepted)
        # A member that is lost opens its group, or ends it, for those that came before.
        if push.waiting and (lost or any(map(self.eligibility.is_late, push.waiting))):
            self._decide_each(push, now, in_line=in_line)

    def _supersede(self, push: Push) -> None:
        """Drop beginnings of groups whose producers are gone, and that this push begins anew.

        That is certain of a beginning of which all producers have died, and if with this push a
        group would have more members than it may while none of its producers is there.
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
        """Whether its group has lost it for good."""
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
