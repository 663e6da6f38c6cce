"""What producers say, and what follows for groups, phases and the stream.

Producers come and go, close groups, end phases and the stream. Groups whose producers are gone are
given up when their time is over; phases and the stream end when producers agree (agreement.py).
Facts are noted when something is decided, so that a restart stands by it.
"""

from collections.abc import Iterable

from rollout_dispatcher.core.buffer.admission import Admission
from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.closed_groups import ClosedGroups
from rollout_dispatcher.core.buffer.dropping import Dropping
from rollout_dispatcher.core.buffer.freshness import Freshness, before_phase
from rollout_dispatcher.core.effects import DropReason
from rollout_dispatcher.core.facts import Note, PhaseEnded, ProducerSaid, Remembered, StreamEnded
from rollout_dispatcher.core.lifecycle import Lifecycle
from rollout_dispatcher.core.producers.agreement import Agreement, End
from rollout_dispatcher.core.producers.producers import Producers

STREAM_ENDED = "the stream has ended: its producers, or a controller, have ended it"


class Intake:
    """Knows the producers; changes the buffer only through `dropping`."""

    def __init__(
        self,
        producers: Producers,
        buffer: SampleBuffer,
        *,
        admission: Admission,
        closed_groups: ClosedGroups,
        dropping: Dropping,
        freshness: Freshness,
        lifecycle: Lifecycle,
        note: Note,
    ) -> None:
        self._producers, self._buffer, self._admission = producers, buffer, admission
        self._closed_groups, self._dropping = closed_groups, dropping
        self._freshness, self._lifecycle, self._note = freshness, lifecycle, note
        self.agreement = Agreement(producers, admission)

    def restore(self, memory: Remembered, now: float) -> None:
        """Go on where an earlier process stopped: all who had contributed may still come back."""
        said = {name: memory.words.get(name, (0, False)) for name in memory.producers}
        accepted = {name for name, (floor, seqs) in memory.producers.items() if floor or seqs}
        self._producers.restore(said, now, contributed=accepted)
        self._admission.memory.restore(memory.producers, memory.given_ids)
        self._buffer.restore(memory.entries, memory.next_ticket, now)
        for version in memory.phases:
            self._bar(version)
            self._end_phase(version, now, untracked=False)
        if memory.ended:
            self._admission.closed = STREAM_ENDED
            self.stream_over()
        for phase, ended in memory.words.values():  # what was asked for and not agreed to yet
            if phase > self._admission.oldest_version:
                self.agreement.ask(phase)
            if ended and self._producers.begun and not memory.ended:
                self.agreement.ask(None)  # before that, others who are there are to be heard first

    # -- they come and go -------------------------------------------------------------------

    def lost(self, producer: str, now: float, *, for_good: bool) -> None:
        """A producer's connection is lost, `for_good` if it said goodbye."""
        self._admission.producer_gone(producer)
        self._gone(self._producers.lost(producer, now, for_good=for_good))

    def tick(self, now: float) -> None:
        """Give up producers that are away for too long, and groups that nobody contributes to."""
        self._gone(self._producers.expire(now))
        for group in self._buffer.groups.overdue(now):
            self._dropping.give_up(group)

    def next_deadline(self) -> float | None:
        """When `tick` is wanted next; None if nothing is waited for."""
        deadlines = (self._buffer.groups.next_deadline(), self._producers.next_deadline())
        return min((at for at in deadlines if at is not None), default=None)

    def _gone(self, producers: list[str]) -> None:
        for producer in producers:
            self._buffer.groups.producer_gone(producer)

    # -- groups -----------------------------------------------------------------------------

    def close_group(
        self, group_id: str, size: int | None, keep: bool | None, now: float, *, numbered: bool
    ) -> None:
        """No member beyond `size` will come, or none but those that are held back.

        An incomplete group is then dropped whole, or trained on as it is: with `keep`, or if its
        size was to be told now. numbered: it is certain that this is not said again; else nothing
        comes of it for a group that was whole already.
        """
        groups, waiting = self._buffer.groups, self._admission.held.members(group_id)
        keep = self._dropping.keep if keep is None else keep
        group, limit = groups.get(group_id), self._buffer.limits.group
        if group is None:
            known = self._closed_groups.closed(group_id, now, for_good=size is None)
            if known or (groups.completed(group_id) and not numbered):
                return
            if size is not None and groups.has_room_for_empty:
                group = groups.open(group_id, size, now)
        elif size is None and (keep or group.size is None):
            size = len(group.entries) + group.lost + waiting
        if group is None:
            if waiting:
                self._closed_groups.close(group_id, "it was closed", waiting, now)
        elif size is None:
            self._dropping.give_up(group, keep=False)
            self._closed_groups.close(group_id, "it was closed", waiting, now)
        elif limit is not None and size > limit:
            why = f"it has {size} samples, and a step takes at most {limit}"
            self._dropping.forbid(group, why, DropReason.INCOMPLETE_GROUP, now)
        else:
            self._dropping.resize(group, size)

    def withdraw(
        self, group_id: str, size: int | None, producer: str, numbers: Iterable[int], now: float
    ) -> None:
        """A producer gives up these samples of a group, which will lack each of them, once."""
        for seq in numbers:
            if self._admission.memory.refuse(producer, seq):
                why = "a member was withdrawn by its producer"
                self._dropping.lost_member(group_id, size, why, now)

    # -- phases and the stream --------------------------------------------------------------

    def end_phase(self, version: int, producer: str, *, force: bool) -> None:
        """A producer pushes nothing older than `version`; with `force` nobody does."""
        if version > self._admission.oldest_version:
            self._producers.ends_phase(producer, version)
            self._note_word(producer)
            self.agreement.ask(version, force=force)

    def end_stream(self, producer: str, *, force: bool) -> None:
        """A producer pushes nothing more; with `force` nobody does."""
        if not self._lifecycle.ended:
            self._producers.ends_stream(producer)
            self._note_word(producer)
            self.agreement.ask(None, force=force)

    def settle(self, now: float) -> None:
        """End what producers agree on, once what it waits for has come in."""
        self.agreement.settle(self._decided, lambda end: self._ended(end, now))

    def stream_over(self) -> None:
        """Nothing comes any more: groups that lack members never will have them."""
        self._lifecycle.ended = True
        for group in list(self._buffer.groups):
            self._dropping.give_up(group)

    def _note_word(self, producer: str) -> None:
        phase, ended = self._producers.word(producer)
        self._note(ProducerSaid(producer, phase, ended))

    def _decided(self, end: End) -> None:
        """From now on nothing comes that belongs before this end."""
        if end is None:
            self._note(StreamEnded())
            self._admission.closed = STREAM_ENDED
        else:
            self._note(PhaseEnded(end))
            self._bar(end)

    def _bar(self, version: int) -> None:
        self._admission.oldest_version = max(self._admission.oldest_version, version)

    def _ended(self, end: End, now: float) -> None:
        """What belongs before this end is here, as far as it will ever be."""
        if end is None:
            self.stream_over()
        else:
            self._end_phase(end, now, untracked=True)

    def _end_phase(self, version: int, now: float, *, untracked: bool) -> None:
        """Groups that it leaves behind are given up; untracked: those without a version, too."""
        belongs = before_phase(version)
        why = f"the phase before policy version {version} has ended without all of its members"
        for group in [group for group in self._buffer.groups if group.entries]:
            if belongs(group.oldest) and (untracked or group.oldest is not None):
                self._dropping.forbid(group, why, DropReason.INCOMPLETE_GROUP, now)
        self._freshness.end_phase(version, self._buffer.next_ticket)
