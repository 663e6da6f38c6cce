"""A stream's timing of its steps: a timer for each, whose times go to the dispatcher.

A GPU is behind: a step's times are known some time after its commit, and go with a later one.
Nothing waits for them, and times that cannot be sent (no connection, the end of the stream) are
dropped.

A micro-batch is timed between handing it out and being asked for the next:

    ask | wait for data | hand out ======== one micro-batch ======== ask | wait for data | hand out
                                   forward   backward [blocked]
                                                               ^ where the step's last one ends

The last one ends with its last backward pass, where a probe reports that: an optimizer's step in
the loop's body is no part of it. A trainer may choose what counts, and for which pass, by `timer`.
`waiting`, and probes in the model, mark the parts in which the rank was blocked.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.protocol import messages as m
from rollout_planner.types import UPDATE
from rollout_workers.client.process import validated
from rollout_workers.timing import probes
from rollout_workers.timing.clocks import (
    FORWARD,
    Clock,
    HostClock,
    Mark,
    Pass,
    Span,
    clock_for,
)
from rollout_workers.timing.probes import Collectives

log = logging.getLogger(__name__)


#: Micro-batches less than this share of their step's time were not computed when they seemed to be.
LEAST_SHARE = 0.1
#: Spans that are kept before they are added up, all at once.
FOLDED_AT_ONCE = 64
#: Characters of a reason.
MAX_WHY = 200
AHEAD = (
    "micro-batches were asked for before the one before was computed; put the computing of the "
    "step into step.timer('update')"
)
REMEDY = "so their waiting is not measured; put them into step.waiting()"
GAPS = "it was captured into a CUDA graph"


class StepTimer:
    """Times one step; probes report to it from its first micro-batch to its commit.

    count: its micro-batches. cannot: why waits cannot be measured, as far as that is known
    beforehand; "" where they can.

    `hand_out` and `asked` run once a micro-batch, with cold caches: they record two moments, and
    leave what can be done for all micro-batches at once for the end.
    """

    def __init__(
        self, clock: Clock, step: int, count: int, collectives: Collectives, cannot: str = ""
    ) -> None:
        self._clock, self._mark = clock, clock.mark
        self._step, self._count = step, count
        self._collectives, self._cannot = collectives, cannot
        self._passes: list[Pass] = []
        #: What is timed now, if anything is, and what was.
        self._span: Span | None = None
        self._spans: deque[Span] = deque()
        #: The micro-batch that was handed out last, until the next is asked for.
        self._at: int | None = None
        #: The pass of `timer`, if one is entered, and of the iteration under way if none is.
        self._named: Pass | None = None
        self._iteration: Pass | None = None
        #: Whether all that `timer` has in it is timed, until a micro-batch is handed out there.
        self._is_whole = False
        self._depth = 0
        self._blocked_at: Mark = None
        self._has_waited = False
        #: Whether a backward pass ended after the micro-batches had been asked for.
        self._is_late = False
        self._began = self._paused = self._left_out_s = self._took_s = 0.0

    # -- the training loop

    def hand_out(self, index: int) -> None:
        """A micro-batch is computed from now on."""
        if self._is_whole:  # it was no time of micro-batches
            self._is_whole, self._span = False, None
        self._close()
        now = perf_counter()
        if self._paused:
            self._left_out_s += now - self._paused
        if index == 0 or self._iteration is None:
            self._iteration = self._pass(None)
            self._began = self._began or now
        if probes.listener is not self:
            probes.listen(self)
        self._at = index
        self._enter(self._named or self._iteration, index)

    def asked(self, index: int) -> None:
        """The training loop asks for the one after that, or for no more."""
        if self._at != index:
            return  # it is a loop that was left, and collected only now
        self._paused, self._at = perf_counter(), None
        last = index == self._count - 1
        if self._named is None or not last:  # in a timer the last one lasts until that is left
            self._close(at_backward=last and self._named is None)

    @contextmanager
    def timer(self, key: str, index: int | None = None) -> Iterator[None]:
        """What is computed in it counts for `key`, and, in a micro-batch, nothing else.

        Raises ConfigError for a key that is no name, and for an index of no micro-batch.
        """
        validated(lambda: m.StepTimes(step=self._step, cost_key=key, busy_s=[0.0]))
        if index is not None:
            self._begin_one(self._pass(key), index)
            try:
                yield
            finally:
                self._close()
            return
        named, around = self._pass(key), self._span
        is_first = around is None and self._at is None
        if is_first:
            self._begin_all(named)
        elif around is not None and around.owner.key is None:
            # What counted by itself does not, as the trainer knows better.
            self._span = around = None
        elif around is not None:
            named.as_one |= self._is_whole
            self._is_whole = False
            self._close()
        if not is_first:
            self._enter(named, self._at or 0)
        try:
            yield
        finally:
            if is_first:
                named.as_one |= self._is_whole or named.is_ahead
                self._named, self._is_whole = None, False
            self._close()
            if around is not None:
                around.owner.as_one |= named.as_one
                self._enter(around.owner, around.index)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The rank waits for others, in collectives of the trainer's own."""
        self._has_waited = True
        self.block()
        try:
            yield
        finally:
            self.unblock()

    def finish(self, at: float | None = None) -> None:
        """The step is committed. at: when, in seconds of `time.perf_counter`; None: now.

        The commit itself may take longer than a step that computes nothing.
        """
        self._close(at_backward=True)
        self._took_s = (perf_counter() if at is None else at) - self._began - self._left_out_s
        if probes.listener is self:
            probes.listen(None)

    # -- probes

    def block(self, forgiven: dist.ProcessGroup | None = None) -> None:
        """The rank waits for others from now on.

        forgiven: a group whose collectives until now were begun by the code that waits here.
        """
        if self._depth == 0 and (span := self._span) is not None:
            span.untimed |= self._collectives.since(forgiven)
            self._blocked_at = self._mark()
        self._depth += 1

    def unblock(self) -> None:
        """The wait is over; pairs may be nested."""
        if self._depth == 1 and (span := self._span) is not None:
            span.blocked.append((self._blocked_at, self._mark()))
            self._collectives.mark()
        self._depth = max(0, self._depth - 1)  # 0: the wait began in another micro-batch

    def will_begin(self) -> None:
        """Collectives begin from now on that are waited for later, in `block` ..."""
        if self._depth == 0 and (span := self._span) is not None:
            span.untimed |= self._collectives.since()

    def has_begun(self) -> None:
        """... up to now."""
        if self._depth == 0:
            self._collectives.mark()

    def saw_backward(self) -> None:
        """A backward pass has ended."""
        if (span := self._span) is None:
            self._is_late = True
        else:
            span.saw_backward(self._clock)

    # -- the report

    def times(self) -> list[m.StepTimes] | None:
        """Every pass, once the clock has come to the end of the last; None before. Call it once."""
        if not self._fold():
            return None
        by_key: dict[str, Pass] = {}
        for one in [one for one in self._passes if self._counts(one)]:
            key = one.key or self._name(one)
            if by_key.setdefault(key, one) is not one:
                by_key[key].add(one)
                self._passes.remove(one)
        return [self._report(key, one) for key, one in by_key.items()]

    def _counts(self, one: Pass) -> bool:
        """Whether anything was computed in it: the loop may have made a list for a timer."""
        if one.key is None and any(other.key for other in self._passes):
            return sum(one.busy_s) >= LEAST_SHARE * self._took_s
        return any(one.busy_s) or one.has_gaps

    def _report(self, key: str, one: Pass) -> m.StepTimes:
        why = self._why(one)
        busy, blocked = one.busy_s, one.blocked_s
        if why in {GAPS, AHEAD}:  # the times are not those of the work
            busy = [0.0] * len(busy)
        if one.as_one:  # the dispatcher takes the times of 0 as unknown
            rest = [0.0] * (self._count - 1)
            busy, blocked = [sum(busy), *rest], [sum(blocked), *rest]
        return m.StepTimes(
            step=self._step, cost_key=key, busy_s=_rounded(busy),
            collective_s=None if why else _rounded(blocked), why=why[:MAX_WHY],
        )  # fmt: skip

    def _why(self, one: Pass) -> str:
        """Why the waits in a pass are unknown; "" if they are known."""
        if one.has_gaps:
            return GAPS
        if one.key is None and (one.is_ahead or self._is_late or self._is_short):
            return AHEAD
        if one.untimed:
            names = ", ".join(sorted(one.untimed))
            return f"collectives of {names} in micro-batches are not timed, {REMEDY}"
        return "" if self._has_waited else self._cannot

    @property
    def _is_short(self) -> bool:
        """Whether micro-batches took next to nothing of the step, as those of `list(step)` do.

        Not where each had its backward pass: then an evaluation or a checkpoint before the commit
        takes so long.
        """
        if any(min(one.backwards) for one in self._passes):
            return False
        busy = sum(sum(one.busy_s) for one in self._passes)
        return busy < LEAST_SHARE * self._took_s

    def _name(self, one: Pass) -> str:
        if any(one.backwards):
            return UPDATE
        return FORWARD if any(any(other.backwards) for other in self._passes) else UPDATE

    # -- mechanism

    def _fold(self) -> bool:
        """Add up the spans that have ended; returns whether the clock has come to all of them."""
        while self._spans and self._spans[0].fold(self._clock):
            self._spans.popleft()
        return not self._spans

    def _begin_all(self, named: Pass) -> None:
        """Whatever is computed from now on counts for this pass."""
        probes.listen(self)
        self._named, self._iteration = named, None
        self._enter(named, 0)
        self._is_whole = True
        self._began = self._began or perf_counter()

    def _begin_one(self, named: Pass, index: int) -> None:
        """One micro-batch is computed, whichever was handed out last."""
        if not 0 <= index < self._count:
            raise ConfigError(f"step {self._step} has {self._count} micro-batches, and no {index}")
        if probes.listener is not self:
            probes.listen(self)
        self._began = self._began or perf_counter()
        self._enter(named, index)

    def _pass(self, key: str | None) -> Pass:
        found = next((one for one in self._passes if key is not None and one.key == key), None)
        if found is None:
            found = Pass(key, self._count)
            self._passes.append(found)
        return found

    def _enter(self, owner: Pass, index: int) -> None:
        self._depth = 0
        if self._collectives.groups:
            self._collectives.mark()
        self._span = span = Span(owner, index)
        span.begin = self._mark()

    def _close(self, *, at_backward: bool = False) -> None:
        if (span := self._span) is None:
            return
        span.untimed |= self._collectives.since()
        span.close(self._clock, at_backward=at_backward)
        self._span = None
        self._spans.append(span)
        if len(self._spans) >= FOLDED_AT_ONCE:
            self._fold()


def _rounded(seconds: list[float]) -> list[float]:
    """To microseconds, which take half as long to write and read.

    A GPU may come to events of two streams in another order than they were recorded in.
    """
    return [int(1e6 * value + 0.5) / 1e6 if value > 0 else 0.0 for value in seconds]


#: Steps that a GPU may be behind; times of earlier ones are dropped.
BEHIND = 8
#: Steps of the stream before which it searches for models, as long as there is reason to: a search
#: takes 0.2 s for a million objects.
SEARCHES = (0, 1, 4, 16)
#: Steps in a row whose waits are unknown before that is logged: the first steps are odd.
PATIENCE = 3


class Timing:
    """Times the steps of one stream.

    report: takes the times of each pass of a step. dp_size, dp_ranks: how many DP ranks there are,
    and their global ranks, if others are in process groups too. device: where micro-batches go.
    logs_why: whether this process logs why waits are unknown.
    """

    def __init__(
        self,
        report: Callable[[m.StepTimes], None],
        *,
        dp_size: int,
        dp_ranks: Iterable[int] | None,
        device: torch.device | None,
        logs_why: bool,
    ) -> None:
        self._report, self._dp_size, self._device, self._logs_why = (
            report,
            dp_size,
            device,
            logs_why,
        )
        self._collectives = Collectives(None if dp_ranks is None else frozenset(dp_ranks))
        self._waiting: deque[StepTimer] = deque(maxlen=BEHIND)
        self._steps = self._puzzles = 0
        self._is_probed = False

    def measure(self, modules: Iterable[nn.Module]) -> None:
        """Put probes into these; raises ConfigError if none of them waits for other ranks."""
        if probes.probe(modules):
            self._is_probed = True
        else:
            raise ConfigError(
                "there is no DistributedDataParallel in this model and no FSDP2 module of a kind "
                "known here; put what waits for other ranks into step.waiting()"
            )

    def collectives_begun(self) -> int:
        """In process groups of all DP ranks, so far; from any thread."""
        return self._collectives.begun()

    def begin(self, step: int, count: int) -> StepTimer | None:
        """Begin a step of `count` micro-batches; None where a message cannot have so many times."""
        if count > m.MAX_TIMED:
            return None
        searches = self._dp_size > 1 and (self._puzzles or not self._is_probed)
        if searches and self._steps in SEARCHES:
            self._is_probed |= probes.probe_all()
        self._steps += 1
        self._collectives.find_groups()
        clock = clock_for(self._device)
        cannot = clock if isinstance(clock, str) else ""
        if self._dp_size > 1 and not cannot:
            unseen = self._collectives.cannot_be_seen(probed=self._is_probed)
            cannot = unseen and f"{unseen}, {REMEDY}"
        used = HostClock() if isinstance(clock, str) else clock
        return StepTimer(used, step, count, self._collectives, cannot)

    def finish(self, timer: StepTimer | None, at: float | None = None) -> None:
        """A step is committed, at this time: report what is known. See `StepTimer.finish`."""
        if timer is not None:
            timer.finish(at)
            self._waiting.append(timer)
        self.flush()

    def flush(self) -> None:
        """Report the times that are known by now."""
        while self._waiting:
            try:
                times = self._waiting[0].times()
            except RuntimeError:  # of the GPU's driver, which the training loop gets too
                log.warning("the times of a step cannot be read", exc_info=True)
                times = []
            if times is None:
                return
            self._waiting.popleft()
            for one in times:
                self._log_why(one)
                self._report(one)

    def _log_why(self, times: m.StepTimes) -> None:
        self._puzzles = self._puzzles + 1 if times.why else 0
        if self._puzzles == PATIENCE and self._logs_why:
            self._logs_why = False
            log.warning(
                "what DP ranks lose by waiting for each other is not measured (%s): %s",
                times.cost_key, times.why,
            )  # fmt: skip
