"""Deciding on the samples of one push: duplicate, refused, accepted, or held back for now.

Most pushes are of new and valid samples without a group: as many of these as there is capacity for,
from the first on, are decided as a whole. Others are decided sample by sample, which comes to the
same and takes longer.
"""

from collections import Counter
from operator import attrgetter

from rollout_dispatcher.core.admission.capacity import Capacity
from rollout_dispatcher.core.admission.eligibility import Eligibility
from rollout_dispatcher.core.admission.outcomes import Outcomes
from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.dropping import Dropping
from rollout_dispatcher.core.buffer.entry import Amount
from rollout_dispatcher.core.producers.push import Push
from rollout_dispatcher.errors import SampleRefused
from rollout_dispatcher.sample import SIZE_AT_CLOSE, Outcome, Sample, SamplesByField

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


class Deciding:
    """Lets samples into the buffer.

    dropping: of groups whose members are refused, or pushed anew.
    """

    def __init__(
        self,
        buffer: SampleBuffer,
        eligibility: Eligibility,
        capacity: Capacity,
        outcomes: Outcomes,
        *,
        dropping: Dropping,
    ) -> None:
        self._buffer, self._eligibility, self._capacity = buffer, eligibility, capacity
        self._outcomes, self._dropping = outcomes, dropping

    def decide(self, push: Push, now: float, *, in_line: bool) -> None:
        """Decide the samples of a push as far as they may come in.

        in_line: others wait already, so only members of open groups may pass them.
        """
        samples = self._eligibility.plain(push)
        if samples is None:
            self.decide_each(push, now, in_line=in_line)
        elif in_line:
            return  # every one of them waits
        else:
            amount = Amount.of(samples)
            fitting = self._capacity.admits(samples, amount)
            if fitting == amount.samples:
                self._accept(push, samples, amount, now)
                return
            if fitting:
                first = samples.first(fitting)
                self._accept(push, first, Amount.of(first), now)
            self._hold_back(push, now)

    def _accept(self, push: Push, samples: SamplesByField, amount: Amount, now: float) -> None:
        """The first of those that wait, which are plain, come in: this much together."""
        self._capacity.came_in(self._outcomes.accept_all(push, samples, amount, now), now)

    def _hold_back(self, push: Push, now: float) -> None:
        """What waits of a plain push, of which the first does not come in."""
        waiting = push.waiting
        if len({type(sample.payload) for sample in waiting}) > 1:  # of two sizes that differ
            self.decide_each(push, now, in_line=False)
            return
        smallest, largest = (find(waiting, key=_nbytes) for find in (min, max))
        if (full := self._capacity.holds_back(smallest)) is None:
            self.decide_each(push, now, in_line=False)  # what is smaller may come in
            return
        self._capacity.press(full, now)
        if (full := self._capacity.holds_back(largest)) is not None:
            self._capacity.press(full, now)

    def decide_each(self, push: Push, now: float, *, in_line: bool) -> None:
        """The same, sample by sample."""
        self._supersede(push)
        accepted: list[Sample] = []
        lost = False
        for index in push.undecided:
            sample, seq = push.samples[index], push.first_seq + index
            given_id = sample.sample_id if push.named else None
            if self._eligibility.memory.seen(push.producer, seq, given_id):
                self._outcomes.repeat(push, index)
                continue
            try:
                self._eligibility.check(push, sample)
            except SampleRefused as error:
                lost |= self._refuse(push, index, error, now)
                continue
            if in_line and not self._buffer.is_expected(sample):
                continue
            if (full := self._capacity.holds_back(sample)) is not None:
                self._capacity.press(full, now)
                continue
            if self._buffer.is_grouped(sample):
                sample = self._buffer.sized(sample)
            self._capacity.came_in([self._outcomes.accept(push, index, sample, now)], now)
            accepted.append(sample)
        if accepted:
            self._outcomes.count(accepted)
        # A member that is lost opens its group, or ends it, for those that came before.
        if push.waiting and (lost or any(map(self._eligibility.is_late, push.waiting))):
            self.decide_each(push, now, in_line=in_line)

    def _supersede(self, push: Push) -> None:
        """Drop beginnings of groups whose producers are gone, and that this push begins anew.

        That is certain of a beginning of which all producers have died, and if with this push a
        group would have more members than it may while none of its producers is there.
        """
        memory, groups = self._eligibility.memory, self._buffer.groups
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
            if group is not None and self._eligibility.is_begun_anew(group, count):
                self._dropping.supersede(group)

    def fill(self, push: Push) -> None:
        """What is not decided of a push finds no capacity, and cannot wait for any."""
        for index in push.undecided:
            self._outcomes.settle(push, index, Outcome.FULL)

    def refuse_rest(self, push: Push, why: SampleRefused) -> None:
        """What is not decided of a push will not come in any more."""
        for index in push.undecided:
            self._outcomes.refuse(push, index, why)

    def _refuse(self, push: Push, index: int, error: SampleRefused, now: float) -> bool:
        """Whether its group has lost it for good."""
        self._outcomes.refuse(push, index, error)
        sample, seq = push.samples[index], push.first_seq + index
        if not (error.reason in MEMBER_LOST and self._buffer.is_grouped(sample)):
            return False
        lost = self._eligibility.memory.refuse(push.producer, seq)
        if lost:
            size = None if sample.group_size == SIZE_AT_CLOSE else sample.group_size
            why = f"a member was refused ({error})"
            self._dropping.lost_member(str(sample.group_id), size, why, now)
        return lost
