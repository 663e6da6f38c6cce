"""Clocks that never block: the host's, and a GPU's by events on the current stream.

A GPU computes asynchronously, so the time between two lines of the training loop is not what the
GPU took between them. An event is reached when the GPU has done all that was issued before it; its
time is read once it is reached, without waiting.

A step is iterated once or several times: old log-probs, then an epoch or more of updates. All that
counts for one key is one *pass*: the times of its repeats are added up. A *span* is a stretch of
time in one micro-batch, with the parts of it in which the rank was blocked.
"""

import time
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from operator import add
from typing import Any, Protocol

import torch

#: A moment: seconds of the host's clock, or a CUDA event.
Mark = Any


class Clock(Protocol):
    """Where moments come from."""

    def mark(self) -> Mark:
        """This moment, of what is computed; None where there is none (inside a CUDA graph)."""

    def has_passed(self, mark: Mark) -> bool:
        """Whether what is computed has come to it."""

    def seconds(self, start: Mark, stop: Mark) -> float:
        """From one to the other; both have passed."""


class HostClock:
    """For what is computed where the training loop runs: on the CPU."""

    #: Now; the function itself, as it is called twice a micro-batch.
    mark = staticmethod(time.perf_counter)

    def has_passed(self, mark: Mark) -> bool:  # noqa: ARG002
        """It has."""
        return True

    def seconds(self, start: Mark, stop: Mark) -> float:
        """The difference."""
        return float(stop - start)


class CudaClock:
    """For what is computed on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Mark:
        """An event on the stream that is current in this thread."""
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def has_passed(self, mark: Mark) -> bool:
        """Whether the GPU has reached it; asks, and does not wait."""
        return bool(mark.query())

    def seconds(self, start: Mark, stop: Mark) -> float:
        """By the GPU's own clock."""
        return float(start.elapsed_time(stop)) / 1e3


def clock_for(device: torch.device | None) -> Clock | str:
    """The clock of what is computed there, or why there is none.

    device: None where the stream has none; then a GPU counts that this process has used.
    """
    if device is not None and device.type not in ("cpu", "cuda"):
        return f"times on {device.type} are not measured"
    if device is not None and device.type == "cuda":
        return CudaClock(device)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return CudaClock(torch.device("cuda", torch.cuda.current_device()))
    other = _other_accelerator() if device is None else None
    return HostClock() if other is None else f"times on {other} are not measured"


@cache  # of each step, and it stays as it is
def _other_accelerator() -> str | None:
    accelerator = getattr(torch, "accelerator", None)  # torch 2.6
    if accelerator is None or not accelerator.is_available():
        return None
    kind = str(accelerator.current_accelerator().type)
    return None if kind == "cuda" else kind


#: Key of a pass that the trainer has not named, without a backward pass; with one, `UPDATE`.
FORWARD = "forward"


@dataclass(slots=True, eq=False)
class Pass:
    """Sums over spans.

    key: None until it is named. as_one: its times are of the step and not of single micro-batches;
    the report has all of them at the first.
    """

    key: str | None
    count: int
    as_one: bool = False
    busy_s: list[float] = field(init=False)
    blocked_s: list[float] = field(init=False)
    backwards: list[int] = field(init=False)
    #: Names of groups in which there were collectives that were not timed.
    untimed: set[str] = field(default_factory=set)
    #: Whether a part of it has no times: it was captured into a CUDA graph.
    has_gaps: bool = False

    def __post_init__(self) -> None:
        self.busy_s, self.blocked_s = [0.0] * self.count, [0.0] * self.count
        self.backwards = [0] * self.count

    @property
    def is_ahead(self) -> bool:
        """Whether micro-batches were computed after the next had been asked for."""
        return min(self.backwards) == 0 and max(self.backwards) > 1

    def add(self, other: "Pass") -> None:
        """Add another pass of the same key."""
        self.busy_s = list(map(add, self.busy_s, other.busy_s))
        self.blocked_s = list(map(add, self.blocked_s, other.blocked_s))
        self.backwards = list(map(add, self.backwards, other.backwards))
        self.untimed |= other.untimed
        self.as_one |= other.as_one
        self.has_gaps |= other.has_gaps


@dataclass(slots=True, eq=False)
class Span:
    """A stretch of time in one micro-batch.

    blocked: parts of it. untimed: as in `Pass`, so far. backward: when the last backward pass in it
    ended, with the number of blocked parts and `untimed` by then.
    """

    owner: Pass
    index: int
    begin: Mark = None
    end: Mark = None
    blocked: list[tuple[Mark, Mark]] = field(default_factory=list)
    untimed: frozenset[str] = frozenset()
    backward: tuple[Mark, int, frozenset[str]] | None = None

    def saw_backward(self, clock: Clock) -> None:
        """A backward pass has ended."""
        end = clock.mark()
        self.backward = None if end is None else (end, len(self.blocked), self.untimed)
        self.owner.backwards[self.index] += 1

    def close(self, clock: Clock, *, at_backward: bool) -> None:
        """It ends: now, or when its last backward pass did, if there was one."""
        if at_backward and self.backward is not None:
            self.end, blocked, self.untimed = self.backward
            del self.blocked[blocked:]
        else:
            self.end = clock.mark()
        if self.untimed:
            self.owner.untimed |= self.untimed

    def fold(self, clock: Clock) -> bool:
        """Add it to its pass, if what is computed has come to its end."""
        owner, begin, end = self.owner, self.begin, self.end
        if begin is None or end is None or (self.blocked and None in chain(*self.blocked)):
            owner.has_gaps = True
            return True
        if not clock.has_passed(end):
            return False
        owner.busy_s[self.index] += clock.seconds(begin, end)
        for pair in self.blocked:
            owner.blocked_s[self.index] += clock.seconds(*pair)
        return True
