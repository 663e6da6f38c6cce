"""On a GPU: by events on the stream that computes, read once they are reached; nobody waits for it.

Work is a kernel that spins for so many cycles, and a slow collective is such a kernel on FSDP2's
stream of collectives: how long each takes is known, and the host goes on meanwhile.
"""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rollout_dispatcher.protocol.messages import StepTimes
from rollout_workers.timing.clocks import CudaClock, clock_for
from rollout_workers.timing.timing import Timing
from tests.workers.timing.ranks import computed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
#: Of a spinning kernel.
WORK_S = 0.05


@pytest.fixture(scope="module")
def cycles() -> int:
    """Cycles that take `WORK_S` on this GPU."""
    for _ in range(2):  # the first ones run before its clock has risen
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        spin(100_000_000)
        stop.record()
        torch.cuda.synchronize()
    return int(100_000_000 * WORK_S / (start.elapsed_time(stop) / 1e3))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """An NCCL group of one."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever would make the host wait for the GPU is an error."""
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it does not find everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def spin(cycles: int) -> None:
    """A kernel that takes so long."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def timing(reports: list[StepTimes], device: str | None = "cuda", dp_size: int = 1) -> Timing:
    where = None if device is None else torch.device(device)
    return Timing(reports.append, dp_size=dp_size, dp_ranks=None, device=where, logs_why=False)


def test_a_micro_batch_takes_what_the_gpu_takes_and_the_host_waits_for_none(cycles: int) -> None:
    reports: list[StepTimes] = []
    timed = timing(reports)
    with no_waiting():
        began = time.perf_counter()
        timed.finish(computed(timed, 0, 3, lambda index: spin(cycles * (index + 1))))
        assert time.perf_counter() - began < WORK_S
        assert reports == []  # the GPU has not come to it
    torch.cuda.synchronize()
    timed.flush()
    (times,) = reports
    assert times.busy_s == pytest.approx([WORK_S, 2 * WORK_S, 3 * WORK_S], rel=0.05)
    assert times.collective_s == [0.0, 0.0, 0.0]


def test_a_stream_without_a_device_times_the_gpu_that_is_used(cycles: int) -> None:
    reports: list[StepTimes] = []
    assert isinstance(clock_for(None), CudaClock)
    timed = timing(reports, device=None)
    timed.finish(computed(timed, 0, 1, lambda _: spin(cycles)))
    torch.cuda.synchronize()
    timed.flush()
    assert reports[0].busy_s == pytest.approx([WORK_S], rel=0.05)


def test_a_step_is_reported_after_a_later_one(cycles: int) -> None:
    reports: list[StepTimes] = []
    timed = timing(reports)
    for step in range(20):
        timed.finish(computed(timed, step, 2, lambda _: spin(cycles // 10)))
        if step % 4 == 3:
            torch.cuda.synchronize()
    timed.flush()
    assert [times.step for times in reports] == list(range(20))


@pytest.mark.usefixtures("alone")
def test_ddp_on_nccl_is_timed_without_waiting_for_the_gpu(cycles: int) -> None:
    model = DistributedDataParallel(Spins(cycles // 3).cuda())
    reports: list[StepTimes] = []
    timed = timing(reports)
    timed.measure([model])
    inputs = torch.randn(4, 64, device="cuda", requires_grad=True)
    for _ in range(2):  # the second backward pass makes the buckets anew
        model(inputs).sum().backward()
    with no_waiting():
        timer = computed(timed, 0, 2, lambda _: model(inputs).sum().backward())
        spin(cycles)  # an optimizer
        timed.finish(timer)
    torch.cuda.synchronize()
    timed.flush()
    (times,) = reports
    assert times.busy_s == pytest.approx([WORK_S, WORK_S], rel=0.15)
    assert times.collective_s is not None
    assert all(0 < seconds < WORK_S / 10 for seconds in times.collective_s)


def test_fsdp2_reports_the_waits_of_its_stream_for_parameters(cycles: int) -> None:
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp.FSDPModule, "set_custom_all_gather"):
        pytest.skip("this torch's FSDP2 has no all-gather of one's own")
    dist.init_process_group("fake", rank=0, world_size=2, store=fake.FakeStore())
    try:
        model: Any = Spins(cycles // 6).cuda()
        fsdp.fully_shard(model)
        model.set_custom_all_gather(Slow(cycles))
        reports: list[StepTimes] = []
        timed = timing(reports, dp_size=2)
        inputs = torch.randn(4, 64, device="cuda", requires_grad=True)
        model(inputs).sum().backward()
        with no_waiting():
            timed.finish(computed(timed, 0, 2, lambda _: model(inputs).sum().backward()))
        torch.cuda.synchronize()
        timed.flush()
    finally:
        dist.destroy_process_group()
    (times,) = reports
    assert times.why == ""
    assert times.collective_s is not None
    # The outermost module's parameters stay for the backward pass: one all-gather a micro-batch.
    for busy, blocked in zip(times.busy_s, times.collective_s, strict=True):
        assert blocked == pytest.approx(WORK_S, rel=0.15)
        assert busy - blocked == pytest.approx(WORK_S / 2, rel=0.25)


class Spins(nn.Module):
    """A linear layer behind a kernel that spins, once forward and twice as long backward."""

    def __init__(self, cycles: int) -> None:
        super().__init__()
        self.cycles, self.layer = cycles, nn.Linear(64, 64)

    def forward(self, hidden: Tensor) -> Tensor:
        spun: Tensor = _Spin.apply(hidden, self.cycles)  # type: ignore[no-untyped-call]
        out: Tensor = self.layer(spun)
        return out


class _Spin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, cycles: int) -> Tensor:
        ctx.cycles = cycles
        spin(cycles)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        spin(2 * ctx.cycles)
        return *grads, None


class Slow:
    """An all-gather that takes its time on the stream that it is given."""

    def __init__(self, cycles: int) -> None:
        self._cycles = cycles

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_how: Any) -> None:
        spin(self._cycles)
        output_tensor.zero_()
        output_tensor[: input_tensor.numel()] = input_tensor
