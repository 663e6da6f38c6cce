"""What producers hear: outcomes of their pushes, where the trainer is, and what was dropped.

Who has said `feedback` is told what has changed since it was told last, with its answers
and, as changes come, for who waits and pushes nothing. Invariant: whatever happens is told with at
most one message to a producer a `TOLD_EVERY_SECONDS`, besides its answers and its dropped samples;
who does not read is told nothing more until it has.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import PushAnswered, SamplesDropped
from rollout_dispatcher.core.waiting import TrainerProgress
from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import Outcome
from rollout_dispatcher.service.connections.connections import Connections
from rollout_dispatcher.service.connections.peer import Peer

#: Far below the time of a step.
TOLD_EVERY_SECONDS = 0.1
#: Producers that are told in one turn of the event loop: a write takes some ten microseconds.
TOLD_AT_ONCE = 64


class Feedback:
    """Tells producers. run: calls for the event loop, so that what fails is known."""

    def __init__(
        self,
        core: DispatcherCore,
        connections: Connections,
        run: Callable[[Callable[[], None]], None],
    ) -> None:
        self._core, self._connections, self._run = core, connections, run
        self._timer: asyncio.Handle | None = None
        #: Whether anything has changed since it was begun to tell everybody, and who is left.
        self._news = False
        self._to_send: deque[Peer] = deque()

    def close(self) -> None:
        """Tell nobody anything more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def answer(self, effect: PushAnswered) -> None:
        """Say what became of a push, to who pushed it; a plain dictionary, as there are many."""
        if (peer := self._connections.producers.get(effect.producer)) is None:
            return
        header: dict[str, object] = {
            "first_seq": effect.first_seq,
            "outcomes": _shortest(effect.outcomes),
        }
        if effect.errors:
            header["errors"] = {str(index): text for index, text in effect.errors.items()}
            header["reasons"] = {str(index): word for index, word in effect.reasons.items()}
        if peer.hears_feedback:
            progress = self._core.trainer_progress
            header |= _news(peer.told, progress)
            peer.told = progress
            oldest = effect.oldest
            if oldest is not None and (staleness := progress.staleness(oldest)) is not None:
                header["staleness"] = staleness
        peer.write(codec.encode_checked(m.Pushed, header, 0))

    def welcome(self, peer: Peer) -> None:
        """Say all that there is to know to who has just come."""
        peer.told = None
        if peer.hears_feedback:
            self._send([peer])

    def changed(self) -> None:
        """The trainer has moved: tell everybody soon, and of what follows at once."""
        self._news = True
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(TOLD_EVERY_SECONDS, self._run, self._send_all)

    def _send_all(self) -> None:
        self._news = False
        self._to_send.extend(self._connections.producers.values())
        self._send_some()

    def _send_some(self) -> None:
        """Tell those whose turn it is; there may be thousands, and ranks wait meanwhile."""
        some = [self._to_send.popleft() for _ in range(min(TOLD_AT_ONCE, len(self._to_send)))]
        self._send([peer for peer in some if peer.hears_feedback])
        if self._to_send:
            self._timer = asyncio.get_running_loop().call_soon(self._run, self._send_some)
            return
        self._timer = None
        if self._news:
            self.changed()

    def _send(self, peers: Sequence[Peer]) -> None:
        """Tell these what they do not know; of as many as know the same it is written once."""
        progress = self._core.trainer_progress
        frames: dict[TrainerProgress | None, bytes] = {progress: b""}
        for peer in peers:
            if peer.is_behind:
                self._news = True
                continue
            if (frame := frames.get(peer.told)) is None:
                news = _news(peer.told, progress)
                frame = codec.encode_checked(m.Feedback, news, 0) if news else b""
                frames[peer.told] = frame
            peer.told = progress
            if frame:
                peer.write(frame)

    def dropped(self, effect: SamplesDropped) -> None:
        """Say which accepted samples will not be trained on, to who pushed them and is there."""
        self.changed()
        for reason, entries in effect.dropped.items():
            lost: dict[str, list[Entry]] = defaultdict(list)
            for entry in entries:
                lost[entry.producer].append(entry)
            for producer, its in lost.items():
                peer = self._connections.producers.get(producer)
                if peer is not None and peer.hears_feedback:
                    peer.send(*_dropped(reason, its))


def _news(told: TrainerProgress | None, progress: TrainerProgress) -> dict[str, object]:
    """What a producer does not know that was told that of where the trainer is."""
    found: dict[str, object] = {}
    if told is None or told.remaining != progress.remaining:
        found["remaining"] = progress.remaining
    if progress.policy_version is None:
        return found
    if told is None or told.policy_version != progress.policy_version:
        found["policy_version"] = progress.policy_version
    if told is None or told.expected_version != progress.expected_version:
        found["expected_version"] = progress.expected_version
    return found


def _dropped(reason: str, entries: Sequence[Entry]) -> Iterator[m.Dropped]:
    """As many at a time as a message takes."""
    for first in range(0, len(entries), m.MAX_SAMPLES):
        samples = [entry.sample for entry in entries[first : first + m.MAX_SAMPLES]]
        groups = [sample.group_id for sample in samples]
        yield m.Dropped(
            reason=reason,
            sample_ids=[sample.sample_id for sample in samples],
            group_ids=groups if any(groups) else None,
        )


def _shortest(outcomes: tuple[Outcome, ...]) -> tuple[Outcome, ...]:
    """How `Pushed` says these outcomes: one for all where they are all the same."""
    same = outcomes[:1]
    return same if outcomes == same * len(outcomes) else outcomes
