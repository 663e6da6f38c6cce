"""`examples/fsdp2.py`: a run that was ended goes on as if it had not been."""

import re
from pathlib import Path

import pytest

from tests.examples.run import finish, push, samples, torchrun
from tests.support.server import ServeProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


def test_two_ranks_that_were_ended_in_mid_run_train_as_one_process_that_was_not(
    tmp_path: Path,
) -> None:
    whole = tmp_path / "whole"
    ended = tmp_path / "ended"
    with serve(whole, 1) as server:
        push(server, samples(96))
        expected = losses(train(server, whole, 1))
    with serve(ended, 2) as server:
        push(server, samples(96))
        before = losses(train(server, ended, 2, "--last-step", "2"))
        printed = train(server, ended, 2)
    assert "resumed from step-000001" in printed
    after = losses(printed)
    assert list(before) == [0, 1, 2]
    assert list(after) == [2, 3, 4, 5]  # step 2 was trained after the checkpoint
    assert before | after == pytest.approx(expected, rel=1e-4)
    assert expected[5] < 0.9 * expected[0]


def serve(folder: Path, ranks: int) -> ServeProcess:
    """Steps of the oldest samples, whatever the number of ranks."""
    folder.mkdir()
    return ServeProcess(
        folder, dp_size=ranks, global_batch_size=16, micro_batch_tokens=96, window=1,
        buffer_capacity=96, journal_dir=folder / "journal",
    )  # fmt: skip


def train(server: ServeProcess, folder: Path, ranks: int, *options: str) -> str:
    where = ("--endpoint", server.endpoint, "--folder", folder / "checkpoints")
    with torchrun(folder, ranks, "fsdp2.py", *where, *options) as trainers:
        return finish(trainers)


def losses(printed: str) -> dict[int, float]:
    found = re.findall(r"step (\d+): loss ([\d.]+)", printed)
    return {int(step): float(loss) for step, loss in found}
