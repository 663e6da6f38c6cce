"""Phases and the stream end: when producers agree, and what follows then.

Facts are noted when something is decided, so that a restart stands by it.

`Presence`: producers come and go, and leave behind pushes that wait, and beginnings of groups,
which are given up when their time is over (`OpenGroups`). Producers close groups, and withdraw
members of them: a group is whole sooner, or never.

`Ends`: a phase, or the stream, ends when everybody who contributed has said so, or a controller
has.

    asked for --everybody is done, or gone, or it is forced--> decided
    decided --what waited for room before that has come in--> ended

From the decision on, what comes and belongs to it is refused; what was blocked before is let in
first. Invariant: an end is decided once and ended once, phases in the order of their versions.
"""

from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING

from rollout_dispatcher.core.effects import Advised, Effect
from rollout_dispatcher.core.facts import EndsReported, PhaseEnded, RecoveredState, StreamEnded
from rollout_dispatcher.ends import EndReason
from rollout_dispatcher.errors import ProtocolError, RunFinished, SampleRefused

if TYPE_CHECKING:
    from rollout_dispatcher.core.parts import Parts

CLOSED = "it was closed without all of its members"
UNKNOWN = (
    "group {} is not known, so closing it changes nothing: none of its members has come, or it "
    "ended so long ago that --set sample-id-horizon has it forgotten. Close a group under the "
    "group_id of its samples and after they are pushed, or before with size="
)


class Presence:
    """Who is there, and what follows when somebody is not."""

    def __init__(self, parts: "Parts") -> None:
        self._buffer, self._groups = parts.buffer, parts.buffer.groups
        self._producers, self._admission, self._dropping = (
            parts.producers, parts.admission, parts.dropping,
        )  # fmt: skip
        self._closed_groups, self._memory = parts.closed_groups, parts.memory

    def disconnected(self, producer: str, now: float, *, for_good: bool) -> None:
        """A producer's connection is lost, `for_good` if it said goodbye."""
        self._admission.producer_gone(producer)
        gone = self._producers.disconnected(producer, now, for_good=for_good)
        self._gone(gone, left=producer if for_good else "")

    def tick(self, now: float) -> None:
        """Expire producers that are away for too long, and abandon overdue groups."""
        self._gone(self._producers.expire(now))
        why = (
            f"no member had come for {self._groups.timeout:g} s (--set group-timeout), and none of "
            "its producers was there"
        )
        for group in self._groups.overdue(now):
            self._dropping.abandon(group, why)

    def next_deadline(self) -> float | None:
        """When `tick` is wanted next; None if nothing is waited for."""
        overdue, expired = self._groups.next_deadline(), self._producers.next_deadline()
        if overdue is None or expired is None:
            return expired if overdue is None else overdue
        return min(overdue, expired)

    def connected(self, producer: str, incarnation: str) -> None:
        """A producer is there; incarnation: tells its process from others, empty if it does not."""
        if self._producers.connected(producer, incarnation):
            self._groups.producer_replaced(producer)

    def _gone(self, producers: list[str], left: str = "") -> None:
        for producer in producers:
            self._groups.producer_gone(producer, left=producer == left)

    # -- what they say of groups -----------------------------------------------------------------

    def close(
        self,
        group_id: str,
        size: int | None,
        keep: bool | None,
        now: float,
        *,
        request: tuple[str, int] | None,
    ) -> list[Effect]:
        """No member beyond `size` will come, or none but those that are blocked.

        An incomplete group is then dropped whole, or trained on as it is: with `keep`, or if its
        size was to be told now. request: by which producer, and the number that it gave to this: it
        is heard once. A group of which nothing is known cannot be closed, and that is told.
        """
        if request is not None and not self._memory.is_new_close(*request):
            return []
        groups, waiting = self._buffer.groups, self._admission.blocked.members(group_id)
        keep = self._dropping.keep if keep is None else keep
        group, limits = groups.get(group_id), self._buffer.limits
        if group is None:
            if group_id in self._closed_groups:
                return []
            if size is not None and groups.may_open_empty:
                group = groups.open(group_id, size, now)
        elif size is None and (keep or group.size is None):
            size = len(group.entries) + group.lost + waiting
        if group is None:
            if not waiting:
                return [Advised(UNKNOWN.format(group_id), "" if request is None else request[0])]
            self._closed_groups.lack(group_id, CLOSED, waiting)
        elif size is None:
            self._dropping.abandon(group, CLOSED, keep=False)
        elif too_large := limits.too_large(size):
            why = f"it has {size} samples, and {too_large}"
            self._dropping.abandon(group, why)
        else:
            self._dropping.resize(group, size)
        return []

    def withdraw(
        self, group_id: str, size: int | None, producer: str, numbers: Iterable[int], now: float
    ) -> None:
        """A producer withdraws samples of a group, which loses each of them, once."""
        for seq in numbers:
            if self._memory.refuse(producer, seq):
                why = "a member was withdrawn by its producer"
                self._dropping.lost_member(group_id, size, why, now)


#: Ends that may be asked for and not have come: a trainer is a few versions behind at the most.
MAX_ENDS = 1024

#: An end: the policy version of a phase, or None for the stream.
End = int | None


class Ends:
    """Hears that producers are done; changes the buffer only through `dropping`."""

    def __init__(self, parts: "Parts") -> None:
        self._admission, self._departures = parts.admission, parts.rank_departures
        self._eligibility, self._producers = parts.eligibility, parts.producers
        self._dropping, self._phases = parts.dropping, parts.phases
        self._lifecycle, self._append = parts.lifecycle, parts.append_fact
        #: Which were asked for, and whether each is decided.
        self._asked: dict[End, bool] = {}
        self._forced: set[End] = set()

    def restore(self, memory: RecoveredState) -> None:
        """What was decided before stands, and what was asked for is asked for still."""
        for version in memory.phases:
            self._eligibility.bar(version)
            self._end_phase(version, untracked=False)
        if memory.ended:
            self._eligibility.closed = STREAM_ENDED
            self.stream_over()
        for phase, ended in memory.ends.values():  # what was asked for and not agreed to yet
            if phase > self._eligibility.oldest_version:
                self._ask(phase)
            if ended and self._producers.begun and not memory.ended:
                self._ask(None)  # before that, others who are there are heard first

    def end_phase(self, version: int, producer: str, *, force: bool) -> None:
        """A producer pushes nothing older than `version`; with `force` nobody does."""
        if version > self._eligibility.oldest_version:
            self._check(version)
            self._producers.ends(producer, version)
            self._append_ends(producer)
            self._ask(version, force=force)

    def end_stream(self, producer: str, *, force: bool) -> None:
        """A producer pushes nothing more; with `force` nobody does."""
        if not self._lifecycle.ended:
            self._producers.ends(producer, None)
            self._append_ends(producer)
            self._ask(None, force=force)

    def end_agreed(self) -> list[Effect]:
        """Carry out the ends that all producers have announced, once the samples that were blocked
        before are decided.

        If the trainer has left, samples that the end of the stream waits for are refused.
        """
        if not self._asked:
            return []
        self._end_agreed()
        blocked = self._admission.blocked
        if not (blocked and self.is_decided(None) and self._departures.deserted):
            return []
        answers = self._admission.refuse_blocked(SampleRefused(RunFinished.code, TRAINER_LEFT))
        self._end_agreed()
        return answers

    def stream_over(self, reason: EndReason = EndReason.ENDED) -> None:
        """The stream has ended: abandon its open groups."""
        self._lifecycle.end(reason)
        self._dropping.abandon_all()

    def _append_ends(self, producer: str) -> None:
        self._admission.blocked.exempt_from_end(producer)  # it has pushed that before
        phase, ended = self._producers.ends_of(producer)
        self._append(EndsReported(producer, phase, ended))

    def _decided(self, end: End) -> None:
        """Refuse later samples that belong before this end."""
        if end is None:
            self._append(StreamEnded())
            self._eligibility.closed = STREAM_ENDED
        else:
            self._append(PhaseEnded(end))
            self._eligibility.bar(end)

    def _end_phase(self, version: int, *, untracked: bool) -> None:
        """End the phase, and abandon its open groups. untracked: those without a version, too."""
        self._dropping.abandon_before(version, untracked=untracked)
        self._phases.end(version)

    # -- which were asked for --------------------------------------------------------------------

    @property
    def num_pending(self) -> int:
        """How many ends were asked for and have not come."""
        return len(self._asked)

    def pending(self, limit: int) -> list[End]:
        """The first of them, phases in the order of their versions before the stream's."""
        return sorted(self._asked, key=_order)[:limit]

    def is_decided(self, end: End) -> bool:
        """Whether it is decided, or forced, and waits for what was blocked before."""
        return end in self._forced or self._asked.get(end, False)

    def _check(self, end: End) -> None:
        """Raise ProtocolError if no more ends may be asked for."""
        if len(self._asked) >= MAX_ENDS and end is not None and end not in self._asked:
            raise ProtocolError(
                f"the ends of {MAX_ENDS} phases were asked for and wait for other producers; ask "
                f"for that of policy version {end} when some of them have come"
            )

    def _ask(self, end: End, *, force: bool = False) -> None:
        """A producer requests this end; with `force` for all producers, and all earlier ends
        too.
        """
        self._asked.setdefault(end, False)
        if force:
            self._forced |= {asked for asked in self._asked if _order(asked) <= _order(end)}

    def waits_for(self, end: End) -> list[str]:
        """Producers that have not announced this end, for messages; scans all of them."""
        return list(self._producers.before(end))

    def pending_waits(self, end: End) -> list[str]:
        """The same of an end that was asked for and is not decided; nobody otherwise."""
        pending = end in self._asked and not self.is_decided(end)
        return self.waits_for(end) if pending else []

    def _end_agreed(self) -> None:
        """Decide the ends that all producers have announced, and carry out those that no blocked
        sample precedes.
        """
        while self._asked:
            end = min(self._asked, key=_order)
            if not self._asked[end]:
                if end not in self._forced and self._producers.is_waited_for(end):
                    return
                self._asked[end] = True
                self._admission.blocked.exempt_from_end()
                self._decided(end)
            if self._admission.blocked.waits(end):
                return
            del self._asked[end]
            self._forced.discard(end)
            # Carry out this end: no sample that belongs before it is blocked any more.
            if end is None:
                self.stream_over()
            else:
                self._end_phase(end, untracked=True)


def _order(end: End) -> float:
    """Phases in the order of their versions, then the stream."""
    return inf if end is None else end


TRAINER_LEFT = (
    "the stream has ended, and every DP rank has left: what waited for room is trained on no more"
)
STREAM_ENDED = "the stream has ended: its producers, or a controller, have ended it"
