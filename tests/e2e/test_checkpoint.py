"""Training that crashes between checkpoints ends with the weights of one that did not.

The dispatcher is killed as well, and goes on from its journal: the steps after the last checkpoint
come again, identical, and every sample is in the final weights once.
"""

import json
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.harness import (
    Attempt,
    assert_each_exactly_once,
    finish,
    producer,
    read_diaries,
    torchrun,
)
from tests.support.addresses import free_address
from tests.support.server import ServeProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SAMPLES, BATCH, EVERY, FATAL = 330, 16, 5, 13
#: Steps that fill a batch, and one of what is left.
STEPS = 21


def serve(folder: Path, address: str) -> ServeProcess:
    return ServeProcess(
        folder,
        listen=address,
        dp_size=2,
        global_batch_size=BATCH,
        micro_batch_tokens=2048,
        on_oversize="alone",
        window=1,  # so that a step's samples do not depend on the number of ranks
        buffer_capacity=400,  # all of them, so that plans do not depend on the clock
        journal_dir=folder / "journal",
    )


def resumable(address: str, folder: Path, attempt: int, *options: str, ranks: int = 2) -> Any:
    which = ("--attempt", str(attempt), "--every", str(EVERY))
    return torchrun(ranks, address, folder, *which, *options)


def push_everything(stack: ExitStack, server: ServeProcess, address: str) -> None:
    pushing = stack.enter_context(producer(address, "p", SAMPLES))
    assert json.loads(finish(pushing)) == {"accepted": SAMPLES}
    server.post("/v1/stream/end")


def train_without_a_crash(folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    address = free_address()
    with ExitStack() as stack:
        server = stack.enter_context(serve(folder, address))
        push_everything(stack, server, address)
        finish(stack.enter_context(resumable(address, folder, 0)))
        assert server.wait() == 0
    return weights(folder)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(folder / "final.pt", weights_only=True)
    return found


def committed_by_all(ranks: dict[int, Attempt]) -> set[int]:
    return set.intersection(*(set(attempt.committed) for attempt in ranks.values()))


def crash(stack: ExitStack, address: str, folder: Path) -> None:
    """A start that dies in mid-step, three or four steps after its last checkpoint."""
    trainers = stack.enter_context(resumable(address, folder, 0, "--die-at-step", str(FATAL)))
    finish(trainers, code=1)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a run without a crash."""
    return train_without_a_crash(tmp_path_factory.mktemp("calm") / "run")


@pytest.mark.parametrize("ranks", [2, 3])
def test_after_a_crash_the_weights_are_those_of_a_run_without_one(
    ranks: int, tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    """The second start may even have another number of ranks: only the order of sums differs."""
    folder, address = tmp_path / "crashing", free_address()
    folder.mkdir()
    with ExitStack() as stack:
        server = stack.enter_context(serve(folder, address))
        push_everything(stack, server, address)
        crash(stack, address, folder)
        before = server.status()
        assert before["steps_retained"] == before["steps_committed"] - 2 * EVERY
        server.send_signal(signal.SIGKILL)
        server.wait()
        server = stack.enter_context(serve(folder, address))
        trainers = stack.enter_context(resumable(address, folder, 1, ranks=ranks))
        status = server.status()
        finish(trainers)
        assert status["run_id"] == before["run_id"]
        assert status["balanced"]
        assert server.wait() == 0
        log = server.log()
    assert f"{before['steps_retained']} steps of {before['samples_retained']} samples" in log

    diaries = read_diaries(folder)
    first, second = diaries.attempts[0], diaries.attempts[1]
    assert max(committed_by_all(first)) >= FATAL - 2
    assert committed_by_all(second) == set(range(2 * EVERY, STEPS))
    if ranks == 2:
        assert diaries.disagreements() == []  # what came again had the same digests
    for attempt in first.values():  # the timeline that survives
        attempt.committed = {at: x for at, x in attempt.committed.items() if at < 2 * EVERY}
    assert_each_exactly_once(diaries, {f"p-{at}" for at in range(SAMPLES)})
    actual = weights(folder)
    assert actual.keys() == expected.keys()
    tolerance = 0.0 if ranks == 2 else 1e-12
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=tolerance)
