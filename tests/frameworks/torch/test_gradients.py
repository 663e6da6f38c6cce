"""The examples for plain PyTorch train with the gradients of one process on one big batch."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.examples.gradients import measure, record
from tests.examples.run import samples

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
Record = Callable[[str, object], None]


def test_fsdp2(tmp_path: Path, record_property: Record) -> None:
    where = ("--endpoint", "ENDPOINT", "--folder", str(tmp_path / "none"), "--every", "100")
    difference = measure(tmp_path, "fsdp2.py", *where, pushed=samples(24))
    record(record_property, "FSDP2", "fsdp2.py", difference)
    assert difference < 1e-9


def test_ddp_grpo(tmp_path: Path, record_property: Record) -> None:
    rollouts = [
        {
            **fields,
            "input_ids": fields["input_ids"] % 5,
            "advantage": (-1.0) ** index,
            "reward": 0.0,
        }
        for index, fields in enumerate(samples(24))
    ]
    where = ("train", "--endpoint", "ENDPOINT", "--weights", str(tmp_path / "weights.pt"))
    difference = measure(tmp_path, "ddp_grpo.py", *where, pushed=rollouts)
    record(record_property, "DDP, GRPO", "ddp_grpo.py", difference)
    assert difference < 1e-9
