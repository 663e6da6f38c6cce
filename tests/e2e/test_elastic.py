"""Process groups come and go under torchrun: other sizes, and a stopped one that comes back."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.harness import (
    PATIENCE,
    Attempt,
    Diaries,
    assert_each_exactly_once,
    finish,
    producer,
    read_diaries,
    signal_family,
    torchrun,
)
from tests.support.server import ServeProcess, eventually

pytestmark = pytest.mark.e2e

#: Divides over two, three and four ranks with micro-batches of two.
BATCH = 24


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def serve(folder: Path) -> ServeProcess:
    return ServeProcess(folder, dp_size=2, global_batch_size=BATCH, micro_batch_size=2)


def start(
    stack: ExitStack, server: ServeProcess, ranks: int, out: Path, *options: str
) -> "subprocess.Popen[str]":
    """A torchrun with diaries of its own."""
    out.mkdir()
    process: subprocess.Popen[str] = stack.enter_context(
        torchrun(ranks, server.endpoint, out, *options)
    )
    return process


def diary(out: Path) -> dict[int, Attempt]:
    """What the ranks of a torchrun wrote."""
    return read_diaries(out).attempts.get(0, {})


def await_held(out: Path, ranks: int, step: int) -> None:
    """Wait until all ranks have trained a step and stay before its commit."""

    def holds() -> bool:
        found = diary(out).values()
        return sum(step in attempt.held for attempt in found) == ranks

    eventually(holds, f"{ranks} ranks hold step {step}", PATIENCE)


def held_samples(out: Path, step: int) -> list[str]:
    """The samples of a step that is held, over all ranks."""
    parts = [part for attempt in diary(out).values() for part in attempt.held[step]]
    return sorted(name for part in parts for name in part)


def test_torchrun_comes_back_with_more_ranks_and_then_with_fewer(
    tmp_path: Path, stack: ExitStack
) -> None:
    server = stack.enter_context(serve(tmp_path))
    steps = 9
    pushing = stack.enter_context(producer(server.endpoint, "p", steps * BATCH))
    never = str(tmp_path / "never")
    held: dict[int, list[str]] = {}
    for ranks, step in ((2, 3), (4, 6)):
        out = tmp_path / f"{ranks}"
        options = ("--hold-at-step", str(step), "--hold-until", never)
        trainers = start(stack, server, ranks, out, *options)
        await_held(out, ranks, step)
        # Nothing is under way any more: the step that is held, and the one that is prefetched.
        server.await_status(steps_committed=step, open_steps=2, dp_size=ranks)
        signal_family(trainers, signal.SIGKILL)
        held[step] = held_samples(out, step)
    assert json.loads(finish(pushing)) == {"accepted": steps * BATCH}
    server.post("/v1/stream/end")
    trainers = start(stack, server, 3, tmp_path / "3")
    finish(trainers)
    assert server.wait() == 0

    runs = [diary(tmp_path / name) for name in "243"]
    for ranks, run, first in zip((2, 4, 3), runs, (0, 3, 6), strict=True):
        assert Diaries({0: run}).disagreements() == []
        assert [next(iter(attempt.taken)) for attempt in run.values()] == [first] * ranks
    diaries = Diaries(dict(enumerate(runs)))
    for step, names in held.items():
        assert sorted(diaries.committed()[step]) == names
    # Plans for other ranks are other plans: this test would see it if nothing was planned again.
    assert sorted(held) == [step for step in diaries.disagreements() if step in held]
    assert_each_exactly_once(diaries, {f"p-{number}" for number in range(steps * BATCH)})


def test_a_stopped_group_that_wakes_behind_its_successor_is_fenced_and_changes_nothing(
    tmp_path: Path, stack: ExitStack
) -> None:
    server = stack.enter_context(serve(tmp_path))
    steps, fatal = 5, 2
    pushing = stack.enter_context(producer(server.endpoint, "p", steps * BATCH))
    groups = {}
    for name in ("old", "new"):
        options = ("--hold-at-step", str(fatal), "--hold-until", str(tmp_path / f"wake-{name}"))
        groups[name] = start(stack, server, 2, tmp_path / name, *options)
        await_held(tmp_path / name, 2, fatal)
        if name == "old":
            server.await_status(steps_committed=fatal)
            signal_family(groups[name], signal.SIGSTOP)

    # Both groups have trained the same step now, and neither has committed it.
    (tmp_path / "wake-old").touch()
    signal_family(groups["old"], signal.SIGCONT)
    output = finish(groups["old"], code=1)
    assert "GenerationFenced" in output
    assert "newer process group" in output
    at = server.status()
    assert (at["steps_committed"], at["generation"], at["ranks_connected"]) == (fatal, 2, 2)

    (tmp_path / "wake-new").touch()
    assert json.loads(finish(pushing)) == {"accepted": steps * BATCH}
    server.post("/v1/stream/end")
    finish(groups["new"])
    assert server.wait() == 0
    old, new = diary(tmp_path / "old"), diary(tmp_path / "new")
    assert Diaries({0: old, 1: new}).disagreements() == []
    for attempt in old.values():  # that they called commit() for it is no commit
        attempt.committed.pop(fatal, None)
    assert [list(attempt.committed) for attempt in new.values()] == [list(range(fatal, steps))] * 2
    diaries = Diaries({0: old, 1: new})
    assert_each_exactly_once(diaries, {f"p-{number}" for number in range(steps * BATCH)})
