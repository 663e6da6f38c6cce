"""Feedback to producers: outcomes of their pushes, the trainer's progress, dropped samples.

A producer with `feedback` in its hello gets changes of the trainer's progress in the answers to its
pushes and, for those that push nothing, in messages of their own. Invariant: beside answers and
dropped samples a producer gets at most one message in `SEND_INTERVAL_S`, and none while it does not
read those before.
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

#: Seconds; far below the time of a step.
SEND_INTERVAL_S = 0.1
#: Producers that are sent to in one turn of the event loop: a write takes some ten microseconds.
PRODUCERS_A_TURN = 64


class Feedback:
    """Sends feedback. run: makes a call of the event loop, so that an error ends the service."""

    def __init__(
        self,
        core: DispatcherCore,
        connections: Connections,
        run: Callable[[Callable[[], None]], None],
    ) -> None:
        self._core, self._connections, self._run = core, connections, run
        self._timer: asyncio.Handle | None = None
        #: Whether progress has changed since the current round began, and the producers left in it.
        self._news = False
        self._to_send: deque[Peer] = deque()

    def close(self) -> None:
        """Send nothing more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def answer(self, effect: PushAnswered) -> None:
        """Send the outcomes of a push; a plain dictionary, as there are many."""
        if (peer := self._connections.producers.get(effect.producer)) is None:
            return
        header: dict[str, object] = {
            "first_seq": effect.first_seq,
            "outcomes": _shortest(effect.outcomes),
        }
        if effect.errors:
            header["errors"] = {str(index): text for index, text in effect.errors.items()}
            header["reasons"] = {str(index): word for index, word in effect.reasons.items()}
        if peer.wants_feedback:
            progress = self._core.trainer_progress
            header |= _news(peer.progress_sent, progress)
            peer.progress_sent = progress
            oldest = effect.oldest
            if oldest is not None and (staleness := progress.staleness(oldest)) is not None:
                header["staleness"] = staleness
        peer.write(codec.encode_checked(m.Pushed, header, 0))

    def welcome(self, peer: Peer) -> None:
        """Send the trainer's whole progress to a new connection."""
        peer.progress_sent = None
        if peer.wants_feedback:
            self._send([peer])

    def changed(self) -> None:
        """The trainer's progress has changed: send it to all producers within `SEND_INTERVAL_S`."""
        self._news = True
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(SEND_INTERVAL_S, self._run, self._send_all)

    def _send_all(self) -> None:
        self._news = False
        self._to_send.extend(self._connections.producers.values())
        self._send_some()

    def _send_some(self) -> None:
        """Send to the next producers; there may be thousands, and ranks wait meanwhile."""
        some = [self._to_send.popleft() for _ in range(min(PRODUCERS_A_TURN, len(self._to_send)))]
        self._send([peer for peer in some if peer.wants_feedback])
        if self._to_send:
            self._timer = asyncio.get_running_loop().call_soon(self._run, self._send_some)
            return
        self._timer = None
        if self._news:
            self.changed()

    def _send(self, peers: Sequence[Peer]) -> None:
        """Send what has changed; a frame is encoded once for all peers with the same progress."""
        progress = self._core.trainer_progress
        frames: dict[TrainerProgress | None, bytes] = {progress: b""}
        for peer in peers:
            if peer.is_behind:
                self._news = True
                continue
            if (frame := frames.get(peer.progress_sent)) is None:
                news = _news(peer.progress_sent, progress)
                frame = codec.encode_checked(m.Feedback, news, 0) if news else b""
                frames[peer.progress_sent] = frame
            peer.progress_sent = progress
            if frame:
                peer.write(frame)

    def dropped(self, effect: SamplesDropped) -> None:
        """Report accepted samples that will not be trained on to their connected producers."""
        self.changed()
        for reason, entries in effect.dropped.items():
            lost: dict[str, list[Entry]] = defaultdict(list)
            for entry in entries:
                lost[entry.producer].append(entry)
            for producer, its in lost.items():
                peer = self._connections.producers.get(producer)
                if peer is not None and peer.wants_feedback:
                    peer.send(*_dropped(reason, its))


def _news(sent: TrainerProgress | None, progress: TrainerProgress) -> dict[str, object]:
    """The changes of the progress since it was sent last."""
    found: dict[str, object] = {}
    if sent is None or sent.remaining != progress.remaining:
        found["remaining"] = progress.remaining
    if progress.policy_version is None:
        return found
    if sent is None or sent.policy_version != progress.policy_version:
        found["policy_version"] = progress.policy_version
    if sent is None or sent.expected_version != progress.expected_version:
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
    """The outcomes of a `Pushed`: a single one where all are the same."""
    same = outcomes[:1]
    return same if outcomes == same * len(outcomes) else outcomes
