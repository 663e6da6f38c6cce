"""Times one step's micro-batches: between handing one out and being asked for the next.

    ask | wait for data | hand out ======== one micro-batch ======== ask | wait for data | hand out
                                   forward   backward [blocked]
                                                               ^ where the step's last one ends

The last one ends with its last backward pass, where that is seen: an optimizer's step in the loop's
body is no part of it. `timer` says otherwise what counts, and for what; `waiting`, and probes in
the model, in which part of it the rank was blocked.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from rollout_dispatcher.plan import UPDATE
from rollout_dispatcher.protocol import messages as m
from rollout_workers.client.checked import validated
from rollout_workers.timing import running
from rollout_workers.timing.clocks import Clock, Mark
from rollout_workers.timing.collectives import Collectives
from rollout_workers.timing.passes import FORWARD, Pass, Span

#: Micro-batches less than this share of their step's time were not computed when they seemed to be.
LEAST_SHARE = 0.1
#: Characters of a reason.
MAX_WHY = 200
AHEAD = (
    "micro-batches were asked for before the one before was computed; put the computing of the "
    "step into step.timer('update')"
)
REMEDY = "so nobody sees what is waited for in them; put them into step.waiting()"
GAPS = "it was captured into a CUDA graph"


class StepTimer:
    """Times one step; probes report to it from its first micro-batch to its commit.

    count: its micro-batches. cannot: why waits cannot be told apart, as far as that is known
    beforehand; "" where they can.
    """

    def __init__(
        self, clock: Clock, step: int, count: int, collectives: Collectives, cannot: str = ""
    ) -> None:
        self._clock, self._step, self._count = clock, step, count
        self._collectives, self._cannot = collectives, cannot
        self._passes: list[Pass] = []
        self._closed: list[Span] = []
        self._open: Span | None = None
        #: The micro-batch that was handed out last, until the next is asked for.
        self._at: int | None = None
        #: The pass of `timer`, if one is entered, and of the iteration under way if none is.
        self._named: Pass | None = None
        self._iteration: Pass | None = None
        #: What `timer` times as long as no micro-batch is handed out in it.
        self._whole: Span | None = None
        self._depth = 0
        self._blocked_at: Mark = None
        self._has_waited = False
        #: Whether a backward pass ended after the micro-batches had been asked for.
        self._is_late = False
        self._began = self._paused = self._left_out_s = self._took_s = 0.0

    # -- the training loop

    def hand_out(self, index: int) -> None:
        """A micro-batch is computed from now on."""
        if self._open is not None:
            if self._open is self._whole:
                self._drop()
            self._close()
        if self._closed:
            self._fold()
        now = time.perf_counter()
        if self._paused:
            self._left_out_s += now - self._paused
        self._began = self._began or now
        if index == 0 or self._iteration is None:
            self._iteration = self._pass(None)
        running.listen(self)
        self._at = index
        self._enter(self._named or self._iteration, index)

    def asked(self, index: int) -> None:
        """The training loop asks for the one after that, or for no more."""
        if self._at != index:
            return  # it is a loop that was left, and collected only now
        self._paused, self._at = time.perf_counter(), None
        last = index == self._count - 1
        if self._named is None or not last:  # in a timer the last one lasts until that is left
            self._close(at_backward=last and self._named is None)

    @contextmanager
    def timer(self, key: str) -> Iterator[None]:
        """What is computed in it counts for `key`, and, in a micro-batch, nothing else.

        Raises ConfigError for a key that is no name.
        """
        validated(lambda: m.StepTimes(step=self._step, cost_key=key, busy_s=[0.0]))
        named, around = self._pass(key), self._open
        is_first = around is None and self._at is None
        if is_first:
            self._begin_all(named)
        elif around is not None and around.owner.key is None:
            self._drop()  # what counted by itself does not, as the trainer knows better
            around = None
        elif around is not None:
            named.as_one |= around is self._whole
            self._close()
        if not is_first:
            self._enter(named, self._at or 0)
        try:
            yield
        finally:
            if is_first:
                named.as_one |= self._open is self._whole or named.is_ahead
                self._named = self._whole = None
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

    def finish(self) -> None:
        """The step is committed."""
        self._close(at_backward=True)
        self._took_s = time.perf_counter() - self._began - self._left_out_s
        if running.listener is self:
            running.listen(None)

    # -- probes

    def block(self, forgiven: dist.ProcessGroup | None = None) -> None:
        """See `running.Listener`."""
        if self._depth == 0 and self._open is not None:
            self._open.untimed |= self._collectives.since(forgiven)
            self._blocked_at = self._clock.mark()
        self._depth += 1

    def unblock(self) -> None:
        """See `running.Listener`."""
        if self._depth == 1 and self._open is not None:
            self._open.blocked.append((self._blocked_at, self._clock.mark()))
            self._collectives.look()
        self._depth = max(0, self._depth - 1)  # 0: what was waited for began in another micro-batch

    def will_begin(self) -> None:
        """See `running.Listener`."""
        if self._depth == 0 and self._open is not None:
            self._open.untimed |= self._collectives.since()

    def has_begun(self) -> None:
        """See `running.Listener`."""
        if self._depth == 0:
            self._collectives.look()

    def saw_backward(self) -> None:
        """See `running.Listener`."""
        if self._open is None:
            self._is_late = True
        else:
            self._open.saw_backward(self._clock)

    # -- what is told

    def times(self) -> list[m.StepTimes] | None:
        """Every pass, once what is computed has come to the end of the last; None before."""
        self._fold()
        if self._closed:
            return None
        by_key: dict[str, Pass] = {}
        for one in filter(self._counts, self._passes):
            key = one.key or self._name(one)
            by_key[key] = by_key[key].plus(one) if key in by_key else one
        return [self._told(key, one) for key, one in by_key.items()]

    def _counts(self, one: Pass) -> bool:
        """Whether anything was computed in it, and not only a list made for a timer."""
        if one.key is None and any(other.key for other in self._passes):
            return sum(one.busy_s) >= LEAST_SHARE * self._took_s
        return any(one.busy_s) or one.has_gaps

    def _told(self, key: str, one: Pass) -> m.StepTimes:
        why = self._why(one)
        busy, blocked = one.busy_s, one.blocked_s
        if one.as_one:  # then no other has any: the dispatcher knows that from a time of 0
            rest = [0.0] * (self._count - 1)
            busy, blocked = [sum(busy), *rest], [sum(blocked), *rest]
        return m.StepTimes(
            step=self._step, cost_key=key, busy_s=_rounded(busy),
            collective_s=None if why else _rounded(blocked), why=why[:MAX_WHY],
        )  # fmt: skip

    def _why(self, one: Pass) -> str:
        """Why the waits in a pass cannot be told apart; "" if they can."""
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
        """Whether micro-batches took next to nothing of the step, as those of `list(step)` do."""
        busy = sum(sum(one.busy_s) for one in self._passes)
        return busy < LEAST_SHARE * self._took_s

    def _name(self, one: Pass) -> str:
        seen = any(any(other.backwards) for other in self._passes)
        return FORWARD if seen and not any(one.backwards) else UPDATE

    # -- mechanism

    def _fold(self) -> None:
        while self._closed and self._closed[0].fold(self._clock):
            self._closed.pop(0)

    def _begin_all(self, named: Pass) -> None:
        """Whatever is computed from now on counts for this pass."""
        running.listen(self)
        self._named, self._iteration = named, None
        self._enter(named, 0)
        self._whole = self._open
        self._began = self._began or time.perf_counter()

    def _pass(self, key: str | None) -> Pass:
        found = next((one for one in self._passes if key is not None and one.key == key), None)
        if found is None:
            found = Pass(key, self._count)
            self._passes.append(found)
        return found

    def _enter(self, owner: Pass, index: int) -> None:
        self._depth, self._blocked_at = 0, None
        self._collectives.look()
        self._open = Span(owner, index, self._clock.mark())

    def _close(self, *, at_backward: bool = False) -> None:
        span, self._open = self._open, None
        if span is not None:
            if unseen := self._collectives.since():
                span.untimed |= unseen
            span.close(self._clock, at_backward=at_backward)
            self._closed.append(span)

    def _drop(self) -> None:
        span, self._open = self._open, None
        if span is not None:
            span.drop(self._clock)


def _rounded(seconds: list[float]) -> list[float]:
    """To microseconds, which take half as long to write and read."""
    return [round(value, 6) for value in seconds]
