"""A stream's timing of its steps: a timer for each, and what it found told once it is known.

A GPU is behind: what a step took is known some time after its commit, and told with a later one.
Nothing waits for that, and what cannot be told (no connection, the end of the stream) is dropped.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import nn

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.protocol import messages as m
from rollout_workers.timing import probes
from rollout_workers.timing.clocks import Clock, HostClock, clock_for
from rollout_workers.timing.collectives import Collectives
from rollout_workers.timing.step_timer import REMEDY, StepTimer

log = logging.getLogger(__name__)

#: Steps that a GPU may be behind; of those before nothing is told.
BEHIND = 8
#: Before which steps of the stream to look for models, as long as there is reason to: a look takes
#: 0.2 s for a million objects.
LOOKS = (0, 1, 4, 16)
#: Steps in a row of which something could not be told before that is logged: the first are odd.
PATIENCE = 3


class Timer(Protocol):
    """What a step tells of its micro-batches."""

    def hand_out(self, index: int) -> None:
        """One is computed from now on."""

    def asked(self, index: int) -> None:
        """The training loop is done with it."""

    def timer(self, key: str, index: int | None = None) -> AbstractContextManager[None]:
        """See `Step.timer`."""

    def waiting(self) -> AbstractContextManager[None]:
        """See `Step.waiting`."""


class Untimed:
    """Times nothing."""

    def hand_out(self, index: int) -> None:
        """Nothing."""

    def asked(self, index: int) -> None:
        """Nothing."""

    def timer(
        self,
        key: str,  # noqa: ARG002
        index: int | None = None,  # noqa: ARG002
    ) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def waiting(self) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()


class Timing:
    """Times the steps of one stream.

    tell: takes what each pass of a step took. dp_size, dp_ranks: how many DP ranks there are, and
    their global ranks, if others are in process groups too. device: where micro-batches go.
    says_why: whether this process logs why nothing can be told.
    """

    def __init__(
        self,
        tell: Callable[[m.StepTimes], None],
        *,
        dp_size: int,
        dp_ranks: Iterable[int] | None,
        device: torch.device | None,
        says_why: bool,
    ) -> None:
        self._tell, self._dp_size, self._device, self._says_why = tell, dp_size, device, says_why
        self._collectives = Collectives(None if dp_ranks is None else frozenset(dp_ranks))
        self._clock: Clock | None = None
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

    def begin(self, step: int, count: int) -> Timer:
        """A step begins; count: its micro-batches, of which no more are timed than can be told."""
        if count > m.MAX_TIMED:
            return Untimed()
        looks = self._dp_size > 1 and (self._puzzles or not self._is_probed)
        if looks and self._steps in LOOKS:
            self._is_probed |= probes.probe_all()
        self._steps += 1
        self._collectives.find_groups()
        clock = clock_for(self._device)
        cannot = clock if isinstance(clock, str) else ""
        if self._dp_size > 1 and not cannot:
            unseen = self._collectives.cannot_be_seen(probed=self._is_probed)
            cannot = unseen and f"{unseen}, {REMEDY}"
        return StepTimer(self._clock_like(clock), step, count, self._collectives, cannot)

    def finish(self, timer: Timer, at: float | None = None) -> None:
        """A step is committed, at this time: tell what is known by now. See `StepTimer.finish`."""
        if isinstance(timer, StepTimer):
            timer.finish(at)
            self._waiting.append(timer)
        self.flush()

    def flush(self) -> None:
        """Tell what is known by now."""
        while self._waiting:
            try:
                times = self._waiting[0].times()
            except RuntimeError:  # of the GPU's driver; whoever computes there will hear of it
                log.warning("the times of a step cannot be read", exc_info=True)
                times = []
            if times is None:
                return
            self._waiting.popleft()
            for one in times:
                self._say_why(one)
                self._tell(one)

    def _say_why(self, times: m.StepTimes) -> None:
        self._puzzles = self._puzzles + 1 if times.why else 0
        if self._puzzles == PATIENCE and self._says_why:
            self._says_why = False
            log.warning(
                "what DP ranks lose by waiting for each other is not measured (%s): %s",
                times.cost_key, times.why,
            )  # fmt: skip

    def _clock_like(self, clock: Clock | str) -> Clock:
        """The clock so far, with the events that it keeps, if it is of the same kind."""
        wanted = HostClock() if isinstance(clock, str) else clock
        if type(self._clock) is not type(wanted):
            self._clock = wanted
        assert self._clock is not None
        return self._clock
