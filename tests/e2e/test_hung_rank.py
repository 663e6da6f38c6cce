"""A rank of four hangs while its heartbeats go on: it is named, and not those that wait for it."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import finish, producer, running
from tests.support.server import ServeProcess, eventually
from tests.support.torchrun import torchrun_command

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

HERE = Path(__file__).parent
RANKS, BATCH, STEPS = 4, 16, 4


@pytest.mark.parametrize("model", ["ddp", "fsdp2"])
def test_the_hung_rank_is_named_and_a_pause_of_all_is_none(model: str, tmp_path: Path) -> None:
    with (
        ServeProcess(
            tmp_path, module="tests.e2e.impatient", dp_size=RANKS, global_batch_size=BATCH,
            micro_batch_size=2, heartbeat_interval="500ms", rank_timeout="30s",
        ) as server,
        running(
            *torchrun_command(RANKS, tmp_path), str(HERE / "hanging_trainer.py"),
            "--model", model, "--endpoint", server.endpoint, "--out", str(tmp_path),
        ) as training,
        producer(server.endpoint, "p", STEPS * BATCH) as pushing,
    ):  # fmt: skip
        finish(pushing)
        eventually(lambda: "paused-ranks" in causes(server), "all ranks are paused", 60)
        assert server.status()["hung_ranks"] == []
        assert "all DP ranks stand still at the same place of step 1" in server.get("/readyz").text
        (tmp_path / "go").touch()

        eventually(lambda: server.status()["hung_ranks"] == [1], "the hung rank is named", 60)
        ready = server.get("/readyz")
        assert ready.status == 200
        assert "DP rank 1 hangs in step 2, before a collective" in ready.text
        assert "not committed by" not in ready.text
        hung = {rank: server.scrape()[f"rank_hung{{dp_rank={rank}}}"] for rank in range(RANKS)}
        assert hung == {0: 0, 1: 1, 2: 0, 3: 0}
        hangs = "training stands still: DP rank 1 hangs"
        eventually(lambda: hangs in server.log(), "the log says so at its next look")
        (tmp_path / "wake").touch()

        eventually(lambda: server.status()["steps_committed"] > 2, "it goes on", 60)
        assert server.status()["hung_ranks"] == []
        server.post("/v1/stream/end")
        finish(training)
        assert server.wait() == 0


def causes(server: ServeProcess) -> list[Any]:
    return [delay["cause"] for delay in server.status()["delays"]]
