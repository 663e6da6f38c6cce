"""Measures what a DP rank does with its time: compute, wait for other ranks, reduce, wait for data.

The wait is measured where it happens: DDP calls `before_reduce` when this rank's gradients are
complete, just before it reduces them; there the rank waits at a barrier, so that the time until the
last rank arrives is not mistaken for communication. The model's gradients must fit one bucket,
as then that moment is the end of the rank's own backward pass.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TextIO, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

Item = TypeVar("Item")


@dataclass(slots=True)
class StepTimes:
    """Seconds of one step on one DP rank; they add up to `step_s` but for the optimizer.

    compute_s: forward and backward, wall clock; cpu_s: processor time of the same thread in it.
    wait_s: own backward done, others' not. data_s: waiting for the step or its micro-batches.
    """

    step: int = 0
    tokens: int = 0
    flops: float = 0.0
    loss_sum: float = 0.0
    loss_tokens: int = 0
    compute_s: float = 0.0
    cpu_s: float = 0.0
    wait_s: float = 0.0
    reduce_s: float = 0.0
    data_s: float = 0.0
    step_s: float = 0.0


class Meter:
    """Stopwatch of a training loop; writes one line of JSON a step."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self.begin_step()

    def begin_step(self) -> None:
        """From now on everything belongs to a new step."""
        self.times = StepTimes()
        self._began = self._resumed = time.perf_counter()
        self._cpu = time.thread_time()

    def waited(self, get: Callable[[], Item]) -> Item:
        """Call `get`; the time that it takes counts as waiting for data."""
        self._pause_compute()
        try:
            return get()
        finally:
            self.times.data_s += self._resume_compute()

    def waiting_for(self, items: Iterable[Item]) -> Iterator[Item]:
        """Pass items on; the time until each arrives counts as waiting for data."""
        source = iter(items)
        with contextlib.suppress(StopIteration):
            while True:
                yield self.waited(source.__next__)

    def before_reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's communication hook: wait for all ranks, then average the gradients."""
        assert bucket.is_last()
        self._pause_compute()
        dist.barrier()
        self.times.wait_s += self._resume_compute()
        group = dist.group.WORLD
        assert group is not None
        return allreduce_hook(group, bucket)

    def reduced(self) -> None:
        """The backward pass with the reduction in it has returned."""
        self.times.reduce_s += time.perf_counter() - self._resumed
        self._resumed, self._cpu = time.perf_counter(), time.thread_time()

    def end_step(self) -> StepTimes:
        """Write the step down and return it."""
        done = self.times
        done.step_s = time.perf_counter() - self._began
        self._output.write(json.dumps(asdict(done)) + "\n")
        self._output.flush()
        return done

    def _pause_compute(self) -> None:
        now, cpu = time.perf_counter(), time.thread_time()
        self.times.compute_s += now - self._resumed
        self.times.cpu_s += cpu - self._cpu
        self._resumed = now

    def _resume_compute(self) -> float:
        """Seconds since compute was paused."""
        now = time.perf_counter()
        passed = now - self._resumed
        self._resumed, self._cpu = now, time.thread_time()
        return passed
