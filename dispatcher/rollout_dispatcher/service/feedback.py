"""What producers hear: outcomes of their pushes, where the trainer is, and what was dropped.

Who has the capability `feedback` is told what has changed since it was told last, with its answers
and, as changes come, for who waits and pushes nothing. Invariant: whatever happens is told with at
most one message to a producer a `TOLD_EVERY_SECONDS`, besides its answers and its dropped samples.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.dispatch import Dispatch
from rollout_dispatcher.core.effects import PushAnswered, SamplesDropped
from rollout_dispatcher.core.producers.standing import Standing
from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.versions import FEEDBACK
from rollout_dispatcher.sample import Outcome
from rollout_dispatcher.service.connections.connections import Connections
from rollout_dispatcher.service.connections.peer import Peer

#: Far below the time of a step, and above what it takes to tell thousands of producers.
TOLD_EVERY_SECONDS = 0.1


class Feedback:
    """Tells producers. run: calls for the event loop, so that what fails is known."""

    def __init__(
        self, core: Dispatch, connections: Connections, run: Callable[[Callable[[], None]], None]
    ) -> None:
        self._core, self._connections, self._run = core, connections, run
        self._timer: asyncio.TimerHandle | None = None
        #: Rises with all that may have made room for pushes.
        self.moves = 0
        self._watching: set[asyncio.Future[None]] = set()

    def close(self) -> None:
        """Tell nobody anything more."""
        self.wake()
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
        if peer.hears_feedback:
            standing = self._core.standing
            _add_news(header, peer, standing)
            oldest = effect.oldest
            if oldest is not None and (staleness := standing.staleness(oldest)) is not None:
                header["staleness"] = staleness
        peer.write(codec.encode_checked(m.Pushed, header, 0))

    def welcome(self, peer: Peer) -> None:
        """Say all that there is to know to who has just come."""
        peer.hears_feedback = FEEDBACK in peer.terms.capabilities
        peer.told = None
        if peer.hears_feedback:
            self._tell(peer)

    def changed(self) -> None:
        """The trainer has moved: tell everybody soon, and of what follows at once."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(TOLD_EVERY_SECONDS, self._run, self._tell_all)

    async def next_move(self, after: int) -> None:
        """Wait until there were more moves than that, for who tries to push again then."""
        if self.moves == after:
            move: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._watching.add(move)
            try:
                await move
            finally:
                self._watching.discard(move)

    def wake(self) -> None:
        """Have those who wait look again, now."""
        self.moves += 1
        for move in self._watching:
            if not move.done():
                move.set_result(None)

    def _tell_all(self) -> None:
        self._timer = None
        self.wake()
        for peer in self._connections.producers.values():
            if peer.hears_feedback:
                self._tell(peer)

    def _tell(self, peer: Peer) -> None:
        header: dict[str, object] = {}
        _add_news(header, peer, self._core.standing)
        if header:
            peer.write(codec.encode_checked(m.Feedback, header, 0))

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


def _add_news(header: dict[str, object], peer: Peer, standing: Standing) -> None:
    """What this producer was not told of where the trainer is."""
    told, peer.told = peer.told, standing
    if told is None or told.remaining != standing.remaining:
        header["remaining"] = standing.remaining
    if standing.policy_version is None:
        return
    if told is None or told.policy_version != standing.policy_version:
        header["policy_version"] = standing.policy_version
    if told is None or told.expected_version != standing.expected_version:
        header["expected_version"] = standing.expected_version


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
