"""Clocks that never make anybody wait: the host's, and a GPU's by events on the current stream.

A GPU computes behind the host's back, so what passes between two lines of the training loop is not
what the GPU took between them. An event is reached when the GPU has done all that was issued before
it; its time is read once it is reached, and nobody waits for that.
"""

import time
from functools import cache
from typing import Any, Protocol

import torch

#: A moment: seconds of the host's clock, or a CUDA event.
Mark = Any


class Clock(Protocol):
    """Where moments come from.

    is_instant: whether its moments are seconds, and have passed once they are there.
    """

    is_instant: bool

    def mark(self) -> Mark:
        """This moment, of what is computed; None where there is none (inside a CUDA graph)."""

    def has_passed(self, mark: Mark) -> bool:
        """Whether what is computed has come to it."""

    def seconds(self, start: Mark, stop: Mark) -> float:
        """From one to the other; both have passed."""

    def free(self, mark: Mark) -> None:
        """It is not asked about any more; None is no mark."""


class HostClock:
    """For what is computed where the training loop runs: on the CPU."""

    is_instant = True

    #: Now; the function itself, as it is called twice a micro-batch.
    mark = staticmethod(time.perf_counter)

    def has_passed(self, mark: Mark) -> bool:  # noqa: ARG002
        """It has."""
        return True

    def seconds(self, start: Mark, stop: Mark) -> float:
        """The difference."""
        return float(stop - start)

    def free(self, mark: Mark) -> None:
        """It is only a number."""


class CudaClock:
    """For what is computed on a GPU; events are used again, as each takes the driver to make."""

    is_instant = False

    def __init__(self, device: torch.device) -> None:
        self._device, self._unused = device, list[torch.cuda.Event]()

    def mark(self) -> Mark:
        """An event on the stream that is current in this thread."""
        if torch.cuda.is_current_stream_capturing():
            return None
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def has_passed(self, mark: Mark) -> bool:
        """Whether the GPU has reached it; asks, and does not wait."""
        return bool(mark.query())

    def seconds(self, start: Mark, stop: Mark) -> float:
        """By the GPU's own clock."""
        return float(start.elapsed_time(stop)) / 1e3

    def free(self, mark: Mark) -> None:
        """Record it again some time."""
        if mark is not None:
            self._unused.append(mark)


def clock_for(device: torch.device | None) -> Clock | str:
    """The clock of what is computed there, or why there is none.

    device: None where the stream was not told; then a GPU counts that this process has used.
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
