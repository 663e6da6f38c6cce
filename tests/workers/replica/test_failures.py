"""What goes wrong on one rank of a model replica is an error on all of them, and nobody hangs.

Real processes over gloo, four a start.
"""

import json
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rollout_workers import Credentials, RolloutProducer
from rollout_workers.replica.channel import PEER_TIMEOUT
from tests.e2e.harness import finish, running
from tests.support.server import ServeProcess, eventually

RANKS = 4
Results = list[dict[str, Any]]
SCRIPT = str(Path(__file__).parent.parent / "support" / "replica_cases.py")
OPTIONS: dict[str, Any] = {"global_batch_size": 4, "micro_batch_size": 1, "buffer_capacity": 1000}


def results_of(start: str, directory: Path, dead: int | None = None) -> Results:
    """What each rank wrote down; nothing for one that was killed."""
    token = directory / "token"
    token.write_text("yes" * 6)
    token.chmod(0o600)
    server = ServeProcess(
        directory, dp_size=1 if dead is not None else 2, token_file=token, **OPTIONS
    )
    with ExitStack() as stack:
        stack.enter_context(server)
        push(server.endpoint, token)
        ranks = [
            stack.enter_context(
                running(
                    sys.executable, SCRIPT, str(rank), str(directory), start, server.endpoint,
                    DISPATCHER_TOKEN_FILE=str(token),
                )
            )
            for rank in range(RANKS)
        ]  # fmt: skip
        if dead is None:
            ready = [directory / f"ready-{rank}" for rank in range(RANKS)]
            eventually(lambda: all(path.exists() for path in ready), "the last case", within=150)
            server.send_signal(signal.SIGKILL)
        for rank, process in enumerate(ranks):
            finish(process, code=-9 if rank == dead else 0)
    files = [directory / f"{rank}.json" for rank in range(RANKS)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def push(endpoint: str, token: Path) -> None:
    with RolloutProducer(endpoint, credentials=Credentials(token_file=token)) as producer:
        for index in range(80):
            producer.push({"input_ids": [index] * 3})


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of("together", tmp_path_factory.mktemp("together"))


def of(results: Results, case: str) -> list[Any]:
    return [rank[case] for rank in results]


@pytest.mark.e2e
def test_what_contradicts_itself_says_what_to_pass(results: Results) -> None:
    complaints = (
        "leave out dp_rank, dp_size, process_group and generation",
        "pass dp_dims='dp', for instance",
        "dp_dims is 'data', and the mesh has the dimensions (dp=2, tp=2)",
        "pass the whole mesh, and dp_dims= for what is data parallel",
        "pass mesh= with the trainer's device mesh",
        "not all 2 DP ranks are among them",
        "pass mesh= with the whole mesh and dp_dims='dp', on every rank",
    )
    for rank in of(results, "contradictions"):
        for (kind, text), complaint in zip(rank, complaints, strict=True):
            assert kind == "ConfigError"
            assert complaint in text


#: By case, the ranks that get an error, its class, and words of it.
TOLD: dict[str, tuple[tuple[int, ...], str, str]] = {
    "wrong_address": ((0, 1, 2, 3), "ConfigError", "'nowhere' is no address"),
    "wrong_token": ((0, 1, 2, 3), "Unauthorized", "the token is not this dispatcher's"),
    "second_is_refused": ((2, 3), "Unauthorized", "the token is not this dispatcher's"),
    "losses_differ": (
        (1, 3),
        "ConfigError",
        "loss_normalisation is sequence-mean in this process, and token-mean in",
    ),
    "peer_closes": (
        (0,),
        "PeerLost",
        "rank 1, which shares this DP rank's model replica, closed its stream",
    ),
    "leader_closes": (
        (1,),
        "PeerLost",
        "rank 0, which shares this DP rank's model replica, closed its stream",
    ),
    "leader_loads": ((1, 3), "CheckpointRefused", "with the same state on every rank"),
    "peer_loads": ((1, 3), "CheckpointRefused", "with the same state on every rank"),
    "dispatcher_goes": (
        (0, 1, 2, 3),
        "DispatcherUnreachable",
        "no connection to the dispatcher",
    ),
}


@pytest.mark.e2e
@pytest.mark.parametrize("case", TOLD)
def test_ranks_that_would_wait_for_a_failed_one_get_its_error(results: Results, case: str) -> None:
    ranks, kind, words = TOLD[case]
    for rank in ranks:
        assert results[rank][case][0] == kind
        assert words in results[rank][case][1]


@pytest.mark.e2e
def test_what_another_leader_is_refused_for_is_no_error_of_the_first_replica(
    results: Results,
) -> None:
    assert [results[rank]["second_is_refused"] for rank in (0, 1)] == [None, None]


@pytest.mark.e2e
def test_a_pause_of_one_rank_for_longer_than_the_keep_alive_harms_nobody(results: Results) -> None:
    assert of(results, "pauses") == [[0, 1]] * RANKS


@pytest.mark.e2e
def test_a_checkpoint_is_loaded_on_every_rank_whoever_is_first(results: Results) -> None:
    found = of(results, "all_load")
    assert all(rank == found[0] for rank in found)
    assert found[0][1] is True


@pytest.mark.e2e
@pytest.mark.parametrize(("start", "dead"), [("leader-dies", 0), ("peer-dies", 3)])
def test_the_others_soon_know_of_a_process_that_died(start: str, dead: int, tmp_path: Path) -> None:
    for rank, found in enumerate(results_of(start, tmp_path, dead)):
        if rank == dead:
            continue
        (kind, text), seconds = found["dies"]
        assert kind == "PeerLost"
        assert "is gone" in text
        assert seconds < PEER_TIMEOUT.total_seconds() / 10  # by its connection, not by silence
