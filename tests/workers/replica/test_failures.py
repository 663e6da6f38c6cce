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
Told = list[dict[str, Any]]
SCRIPT = str(Path(__file__).parent.parent / "support" / "replica_cases.py")
OPTIONS: dict[str, Any] = {"global_batch_size": 4, "micro_batch_size": 1, "buffer_capacity": 1000}


def told_by(start: str, directory: Path, dead: int | None = None) -> Told:
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
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return told_by("together", tmp_path_factory.mktemp("together"))


def of(told: Told, case: str) -> list[Any]:
    return [rank[case] for rank in told]


@pytest.mark.e2e
def test_what_contradicts_itself_says_what_to_pass(told: Told) -> None:
    complaints = (
        "leave out dp_rank, dp_size, process_group and generation",
        "pass dp_dims='dp', for instance",
        "dp_dims is 'data', and the mesh has the dimensions (dp=2, tp=2)",
        "pass the whole mesh, and dp_dims= for what is data parallel",
        "pass mesh= with the trainer's device mesh",
        "not all 2 DP ranks are among them",
        "pass mesh= with the whole mesh and dp_dims='dp', on every rank",
    )
    for rank in of(told, "contradictions"):
        for (kind, text), complaint in zip(rank, complaints, strict=True):
            assert kind == "ConfigError"
            assert complaint in text


@pytest.mark.e2e
def test_an_error_of_the_leaders_before_they_connect_is_that_of_all(told: Told) -> None:
    for kind, text in of(told, "wrong_address"):
        assert kind == "ConfigError"
        assert "'nowhere' is no address" in text


@pytest.mark.e2e
def test_what_dp_rank_0_is_refused_for_all_ranks_raise(told: Told) -> None:
    found = of(told, "wrong_token")
    assert {kind for kind, _ in found} == {"Unauthorized"}
    assert len({text for _, text in found}) == 1


@pytest.mark.e2e
def test_what_another_leader_is_refused_for_its_replica_raises_and_nobody_waits(told: Told) -> None:
    first, second = (told[0], told[1]), (told[2], told[3])
    assert [rank["second_is_refused"] for rank in first] == [None, None]
    assert {rank["second_is_refused"][0] for rank in second} == {"Unauthorized"}


@pytest.mark.e2e
def test_a_peer_that_trains_otherwise_than_its_leader_is_refused(told: Told) -> None:
    for rank in (1, 3):
        kind, text = told[rank]["losses_differ"]
        assert kind == "ConfigError"
        assert "loss_normalisation is sequence-mean in this process, and token-mean in" in text


@pytest.mark.e2e
def test_a_pause_of_one_rank_for_longer_than_the_keep_alive_harms_nobody(told: Told) -> None:
    assert of(told, "pauses") == [[0, 1]] * RANKS


@pytest.mark.e2e
def test_a_peer_that_closes_early_is_an_error_in_its_leader(told: Told) -> None:
    kind, text = told[0]["peer_closes"]
    assert kind == "PeerLost"
    assert "rank 1, which shares this DP rank's model replica, closed its stream" in text


@pytest.mark.e2e
def test_a_leader_that_closes_early_is_an_error_in_its_peers(told: Told) -> None:
    kind, text = told[1]["leader_closes"]
    assert kind == "PeerLost"
    assert "rank 0, which shares this DP rank's model replica, closed its stream" in text


@pytest.mark.e2e
def test_a_checkpoint_is_loaded_on_every_rank_whoever_is_first(told: Told) -> None:
    found = of(told, "all_load")
    assert all(rank == found[0] for rank in found)
    assert found[0][1] is True


@pytest.mark.e2e
@pytest.mark.parametrize("case", ["leader_loads", "peer_loads"])
def test_a_checkpoint_that_not_all_of_a_replica_load_is_refused(told: Told, case: str) -> None:
    for rank in (1, 3):
        kind, text = told[rank][case]
        assert kind == "CheckpointRefused"
        assert "call load_state_dict with the same state on every rank" in text


@pytest.mark.e2e
def test_a_dispatcher_that_is_gone_is_an_error_on_all(told: Told) -> None:
    for kind, text in of(told, "dispatcher_goes"):
        assert (kind, "no connection to the dispatcher" in text) == ("DispatcherUnreachable", True)


@pytest.mark.e2e
@pytest.mark.parametrize(("start", "dead"), [("leader-dies", 0), ("peer-dies", 3)])
def test_the_others_soon_know_of_a_process_that_died(start: str, dead: int, tmp_path: Path) -> None:
    for rank, found in enumerate(told_by(start, tmp_path, dead)):
        if rank == dead:
            continue
        (kind, text), seconds = found["dies"]
        assert kind == "PeerLost"
        assert "is gone" in text
        assert seconds < PEER_TIMEOUT.total_seconds() / 10  # by its connection, not by silence
