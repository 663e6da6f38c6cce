"""Hands micro-batches out to DP ranks in turn, for a slice of time at once.

    Deliver --> header, at once --> in turn --> a frame a micro-batch, when its peer has room for it

A delivery is for one connection of a rank and one attempt of a step: when its turn comes and either
is over, nothing is sent.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from rollout_dispatcher.core import effects as e
from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import Decision
from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.core.steps.rank_state import Unresolved
from rollout_dispatcher.core.steps.step import GroupTotals, OpenStep
from rollout_dispatcher.errors import JournalCorrupt
from rollout_dispatcher.protocol.assemble import step_header
from rollout_dispatcher.protocol.outbox import Buffer
from rollout_dispatcher.service.completion import Failure
from rollout_dispatcher.service.connections.connections import Connections, RankConnection
from rollout_dispatcher.service.delivery.frames import Frames
from rollout_dispatcher.service.metrics.registry import Metrics

#: How long micro-batches are handed out before others get their turn on the event loop.
DELIVERY_SLICE_SECONDS = 0.005
#: Micro-batches between two readings of the clock.
CLOCK_EVERY = 4
#: Micro-batches of a step that is handed out whole with its headers; of a larger one every rank
#: gets the header before any rank gets micro-batches.
HANDED_OUT_AT_ONCE = 8


class Deliveries:
    """Hands steps out. later: calls in a later turn of the event loop.

    perform: carries out what the core decides where the journal cannot read a sample back.
    """

    def __init__(
        self,
        core: DispatcherCore,
        connections: Connections,
        frames: Frames,
        failure: Failure,
        *,
        metrics: Metrics,
        clock: Callable[[], float],
        later: Callable[[Callable[[], None]], None],
        perform: Callable[[Decision], None],
    ) -> None:
        self._core, self._connections = core, connections
        self._frames, self._failure = frames, failure
        self._metrics = metrics
        self._clock, self._later, self._perform = clock, later, perform
        #: By step until it is committed: the plan's digest, its header and the totals of groups.
        self._announced: dict[int, tuple[str, bytes, GroupTotals | None]] = {}
        #: Ranks, their step, the totals of its groups, and the next micro-batch.
        self._line: deque[tuple[RankConnection, OpenStep, GroupTotals | None, int]] = deque()

    def deliver(self, effect: e.Deliver) -> None:
        """Announce a step to a rank, and have its micro-batches follow."""
        rank = self._connections.welcomed_rank(self._core.client_of(effect.dp_rank))
        step = self._core.step(effect.step)
        if rank is None or step is None or step.attempt != effect.attempt:
            return  # the rank is away and gets it when it comes back, or the step is planned again
        header, groups = self._announcement(step)
        rank.peer.write(header)
        if not self._are_readable(rank, step, effect.first_micro_batch):
            return  # it is planned again
        self._line.append((rank, step, groups, effect.first_micro_batch))
        if len(self._line) > 1:
            return  # in turn
        if len(step.micro_batches) * len(step.micro_batches[0]) <= HANDED_OUT_AT_ONCE:
            self._hand_out()
        else:
            self._later(self._hand_out)

    def forget(self, step: int) -> None:
        """The step is committed: forget its header."""
        self._announced.pop(step, None)

    def _announcement(self, step: OpenStep) -> tuple[bytes, GroupTotals | None]:
        """The header of a step and the totals of its groups; made once a plan, for all ranks."""
        found = self._announced.get(step.number)
        if found is None or found[0] != step.digest:
            groups = GroupTotals.of(step.micro_batches)
            header = step_header(
                step.number, step.digest, len(step.micro_batches[0]), step.samples(),
                group_loss_tokens=None if groups is None else groups.loss_tokens,
                expected_loss_tokens=step.expected_loss_tokens, attempt=step.attempt,
            )  # fmt: skip
            found = self._announced[step.number] = step.digest, header, groups
        return found[1:]

    def _are_readable(self, rank: RankConnection, step: OpenStep, first: int) -> bool:
        """Whether the journal can read this rank's samples back; drops those that it cannot."""
        if not (lost := self._frames.unreadable(rank.dp_rank, step, first)):
            return True
        unresolved = Unresolved(
            step.number, step.attempt, tuple(lost), next(iter(lost.values())), DropReason.UNREADABLE
        )
        self._perform(self._core.unreadable(rank.dp_rank, unresolved))
        self._later(self._act_on_it)
        return False

    def _act_on_it(self) -> None:
        self._perform(self._core.tick(self._clock()))

    def _hand_out(self) -> None:
        """Hand micro-batches to the peers, for a slice of time."""
        until = self._clock() + DELIVERY_SLICE_SECONDS
        while self._line:
            rank, step, groups, index = self._line.popleft()
            if not self._connections.is_attached(rank):  # after another hello it gets them anew
                continue
            for at in range(index, len(step.micro_batches[rank.dp_rank])):
                if at > index and at % CLOCK_EVERY == 0 and self._clock() > until:
                    self._line.appendleft((rank, step, groups, at))
                    break
                rank.peer.enqueue(partial(self._bulk, rank, step, groups, at))
            if self._line and self._clock() > until:
                self._later(self._hand_out)
                return

    def _bulk(
        self, rank: RankConnection, step: OpenStep, groups: GroupTotals | None, index: int
    ) -> Sequence[Buffer] | None:
        """The frame of one micro-batch; None once the step is over, or planned again."""
        if self._core.step(step.number) is not step:
            return None
        if index == len(step.micro_batches[rank.dp_rank]) - 1:
            self._metrics.delivery_duration.observe(self._clock() - step.planned_at)
        try:
            return self._frames.of(rank.dp_rank, step, groups, index, rank.peer.slicing)
        except JournalCorrupt:  # since the header was sent
            self._are_readable(rank, step, index)
            return None
        except Exception as error:  # a payload cannot be read back, or a bug of ours
            self._failure.fail(error)
            return None
