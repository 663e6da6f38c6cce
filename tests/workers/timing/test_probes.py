"""Probes report where models wait: with a trainer's own hook, compiled, copied; in one process.

A slow collective is one of the test's own: DDP's communication hook, and FSDP2's all-gather.
"""

import copy
import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from rollout_dispatcher.protocol.messages import StepTimes
from rollout_workers.timing.timing import Timing
from tests.workers.timing.ranks import computed

SLOW_S = 0.1


class Net(nn.Module):
    """A layer, and a buffer, which DDP broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.layer(hidden)
        return out


def slowly(_state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook whose gradients come late."""
    future = torch.futures.Future[Tensor]()
    threading.Timer(SLOW_S, future.set_result, [bucket.buffer()]).start()
    return future


@contextmanager
def group(backend: str, **options: Any) -> Iterator[None]:
    dist.init_process_group(backend, rank=0, **options)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    with group("gloo", init_method=f"file://{tmp_path}/store", world_size=1):
        yield


def ddp() -> DistributedDataParallel:
    model = DistributedDataParallel(Net())
    model.register_comm_hook(None, slowly)
    return model


def measured(model: Callable[..., Tensor], named: nn.Module | None = None) -> StepTimes:
    """Of the second step: models make themselves ready in the first.

    named: what the trainer names; without it models are found, of two DP ranks.
    """
    reports: list[StepTimes] = []
    ranks = 2 if named is None else 1
    timing = Timing(reports.append, dp_size=ranks, dp_ranks=None, device=None, logs_why=False)
    if named is not None:
        timing.measure(named.modules())

    def work(index: int) -> None:
        model(torch.ones(2, 8, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]
        if index == 1:
            time.sleep(SLOW_S)  # an optimizer

    for step in range(2):
        timing.finish(computed(timing, step, 2, work))
    return reports[-1]


def assert_waits_are_known(times: StepTimes) -> None:
    assert times.why == ""
    assert times.collective_s is not None
    for busy, blocked in zip(times.busy_s, times.collective_s, strict=True):
        assert SLOW_S * 0.9 < blocked < busy
        assert busy - blocked < SLOW_S / 2


@pytest.mark.usefixtures("alone")
def test_ddp_waits_for_what_the_trainers_own_communication_hook_returns() -> None:
    model = ddp()
    assert_waits_are_known(measured(model, nn.ModuleDict({"actor": model})))


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_ddp_model_has_the_same_waits() -> None:
    model = ddp()
    assert_waits_are_known(measured(torch.compile(model, backend="eager"), model))


@pytest.mark.usefixtures("alone")
def test_a_model_with_probes_is_copied_and_saved_as_before() -> None:
    model = DistributedDataParallel(Net())
    measured(model, model)
    torch.save(model, io.BytesIO())
    copied = copy.deepcopy(model)
    copied.register_comm_hook(None, slowly)
    assert_waits_are_known(measured(copied, copied))


def test_fsdp2_waits_for_parameters() -> None:
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp.FSDPModule, "set_custom_all_gather"):
        pytest.skip("this torch's FSDP2 has no all-gather of one's own")
    with group("fake", world_size=2, store=fake.FakeStore()):
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        model: Any = nn.Sequential(nn.Linear(8, 8))
        fsdp.fully_shard(model, mesh=mesh)
        model.set_custom_all_gather(SlowAllGather())
        assert_waits_are_known(measured(model))


class SlowAllGather:
    """Gives every rank's part the values of this one's, late."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_how: Any) -> None:
        time.sleep(SLOW_S)
        output_tensor.view(2, -1).copy_(input_tensor.clone().expand(2, -1))
