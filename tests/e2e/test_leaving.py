"""Ranks that leave or die while others go on: these are told by whom, in time."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import finish, running
from tests.support.addresses import free_address
from tests.support.client import Producer
from tests.support.server import ServeProcess

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).parent / "leaving.py"
#: Seconds that a rank which loses its connection has to come back.
RANK_TIMEOUT = 3


def serve(folder: Path, **options: Any) -> ServeProcess:
    few = {"dp_size": 2, "global_batch_size": 4, "micro_batch_tokens": 64, "window": 1}
    quick = {"rank_timeout": f"{RANK_TIMEOUT}s", "heartbeat_interval": "500ms"}
    defaults: dict[str, Any] = {"buffer_capacity": 64} | few | quick
    return ServeProcess(folder, **defaults | options)


@contextmanager
def ranks(endpoint: str, *options: list[str]) -> Iterator[list["subprocess.Popen[str]"]]:
    """Processes of one gloo group, without torchrun; options: of each."""
    host, _, port = free_address().rpartition(":")
    where = {"MASTER_ADDR": host, "MASTER_PORT": port, "WORLD_SIZE": str(len(options))}
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                running(sys.executable, str(SCRIPT), endpoint, *own, **where, RANK=str(rank))
            )
            for rank, own in enumerate(options)
        ]


def said(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """What a rank that ended by itself has printed last."""
    found: dict[str, Any] = json.loads(finish(process).splitlines()[-1])
    return found


@pytest.mark.parametrize("then", ["close", "exit", "kill", "raise", "raise-in-with"])
def test_who_goes_on_alone_is_told_who_left(tmp_path: Path, then: str) -> None:
    with serve(tmp_path) as server:
        Producer(server.endpoint, "p").push([3] * 16)
        with ranks(server.endpoint, [], ["--steps", "2", "--then", then]) as (first, _):
            found = said(first)
        assert found["error"] == "PeerLost"
        lost = sum(
            count for name, count in server.scrape().items()
            if name.startswith("connection_errors_total{")
            and "role=rank" in name
            and "peer-lost" not in name  # rank 0, which is sent away
        )  # fmt: skip
        if then not in ("close", "exit"):  # it said no goodbye, and may come back until then
            assert lost == 1
            assert "DP rank 1 (" in server.log()
            assert "DP rank 1 was lost after step" in found["text"]
            assert f"no connection for {RANK_TIMEOUT} s (--rank-timeout)" in found["text"]
            if then != "kill":  # its last words may have died with it
                assert server.status()["steps_committed"] == 2
        else:
            assert lost == 0
            assert "DP rank 1 closed its stream after step 1" in found["text"]
            # It may have begun a step that was released before the goodbye, which nobody commits.
            assert found["steps"] in (2, 3)
            assert server.status()["steps_committed"] == 2


def test_all_may_leave_early_and_a_new_generation_of_another_size_goes_on(tmp_path: Path) -> None:
    with serve(tmp_path, allow_dp_resize=True) as server:
        producer = Producer(server.endpoint, "p")
        producer.push([3] * 16)
        with ranks(server.endpoint, *[["--steps", "2"]] * 2) as processes:
            assert [said(process) for process in processes] == [{"steps": 2, "reason": None}] * 2
        producer.end_stream()
        with ranks(server.endpoint, []) as (alone,):
            assert said(alone)["steps"] == 2
        assert server.wait() == 0


def test_a_wait_has_the_bound_that_the_trainer_sets_and_says_for_what(tmp_path: Path) -> None:
    with serve(tmp_path, dp_size=1, heartbeat_interval="30s", rank_timeout="100s") as server:
        Producer(server.endpoint, "p").push([3] * 3)
        with ranks(server.endpoint, ["--timeout", "2"]) as (alone,):
            found = said(alone)
    assert found["error"] == "StepTimeout"
    assert "no step within 2 s; it waits for: 3 of 4 samples are ready" in found["text"]
