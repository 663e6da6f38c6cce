"""The main job end to end: producers, the service and torchrun ranks as real processes."""

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import (
    PATIENCE,
    assert_each_exactly_once,
    finish,
    producer,
    read_diaries,
    torchrun,
)
from tests.support.server import ServeProcess, eventually

pytestmark = pytest.mark.e2e


def serve(folder: Path, dp_size: int, **options: Any) -> ServeProcess:
    return ServeProcess(
        folder,
        dp_size=dp_size,
        global_batch_size=16,
        micro_batch_tokens=2048,
        on_oversize="alone",
        **options,
    )


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def names(name: str, count: int) -> set[str]:
    return {f"{name}-{number}" for number in range(count)}


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_sample_is_trained_on_once_and_all_ranks_agree(
    ranks: int, tmp_path: Path, stack: ExitStack
) -> None:
    server = stack.enter_context(serve(tmp_path, ranks))
    trainers = stack.enter_context(torchrun(ranks, server.endpoint, tmp_path))
    producers = [
        stack.enter_context(producer(server.endpoint, name, 420, "--seed", str(seed)))
        for seed, name in enumerate(("p0", "p1"))
    ]
    for process in producers:
        assert json.loads(finish(process)) == {"accepted": 420}
    server.post("/v1/stream/end")
    finish(trainers)
    assert server.wait() == 0

    diaries = read_diaries(tmp_path)
    assert diaries.disagreements() == []
    assert_each_exactly_once(diaries, names("p0", 420) | names("p1", 420))
    numbers = [list(attempt.taken) for attempt in diaries.attempts[0].values()]
    assert len(numbers) == ranks
    assert numbers == [list(range(53))] * ranks  # 840 samples in steps of 16, the last one of 8


def test_ranks_that_restart_after_a_kill_get_the_same_uncommitted_step_again(
    tmp_path: Path, stack: ExitStack
) -> None:
    server = stack.enter_context(serve(tmp_path, 2))
    fatal = 12
    trainers = stack.enter_context(
        torchrun(2, server.endpoint, tmp_path, "--die-at-step", str(fatal), max_restarts=1)
    )
    pushing = stack.enter_context(producer(server.endpoint, "p", 400))
    assert json.loads(finish(pushing)) == {"accepted": 400}
    server.post("/v1/stream/end")
    finish(trainers)
    assert server.wait() == 0

    diaries = read_diaries(tmp_path)
    before, after = diaries.attempts[0], diaries.attempts[1]
    assert list(before[1].taken)[-1] == fatal
    assert list(before[1].committed)[-1] == fatal - 1
    # The kill may catch the other rank before it has applied the step before, too.
    open_step = max(before[0].committed.keys() & before[1].committed.keys()) + 1
    assert fatal - 1 <= open_step <= fatal
    assert [next(iter(attempt.taken)) for attempt in after.values()] == [open_step] * 2
    assert after[1].taken[fatal]["generation"] == before[1].taken[fatal]["generation"] + 1
    assert diaries.disagreements() == []  # the step that came again had the same digest
    assert_each_exactly_once(diaries, names("p", 400))


def test_a_producer_faster_than_the_trainer_is_held_back_and_memory_stays_flat(
    tmp_path: Path, stack: ExitStack
) -> None:
    server = stack.enter_context(serve(tmp_path, 2))
    ballast, count = 200_000, 960  # 190 MB go through a buffer of 24 samples
    trainers = stack.enter_context(torchrun(2, server.endpoint, tmp_path, "--step-seconds", "0.02"))
    pushing = stack.enter_context(
        producer(server.endpoint, "p", count, "--extra-bytes", str(ballast))
    )
    resident: list[float] = []
    held: list[float] = []
    pressed = 0.0
    while pushing.poll() is None:  # each scrape is a real request, so this is no busy loop
        at = server.scrape()
        if at["steps_committed_total"] >= 5:  # everything is allocated by then
            resident.append(at["process_resident_memory_bytes"])
        held.append(at["buffer_samples"])
        pressed = at["backpressure_seconds_total"]
    assert json.loads(finish(pushing)) == {"accepted": count}
    server.post("/v1/stream/end")
    finish(trainers)
    assert server.wait() == 0
    assert_each_exactly_once(read_diaries(tmp_path), names("p", count))
    assert pressed > 0
    assert max(held) <= 24
    # Open steps, the window, frames on their way: some 20 MB, whatever the producer pushes.
    assert max(resident) - min(resident) < 40e6


def test_sigterm_drains_what_was_accepted_and_ends_the_ranks(
    tmp_path: Path, stack: ExitStack
) -> None:
    server = stack.enter_context(serve(tmp_path, 2))
    trainers = stack.enter_context(torchrun(2, server.endpoint, tmp_path, "--step-seconds", "0.05"))
    pushing = stack.enter_context(producer(server.endpoint, "p", 100_000))
    eventually(lambda: server.status()["steps_committed"] >= 5, "5 steps committed", PATIENCE)
    server.send_signal(signal.SIGTERM)
    outcomes = json.loads(finish(pushing))
    finish(trainers)
    assert server.wait() == 0
    assert set(outcomes) == {"accepted", "shutting-down"}
    assert_each_exactly_once(read_diaries(tmp_path), names("p", outcomes["accepted"]))
