"""Probes answer people in text and machines in the format that they ask for."""

import gzip
import re
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rollout_dispatcher.errors import JournalFull
from tests.service.conftest import SMALL
from tests.service.wires import SlowLog, http_client, make_router
from tests.support.client import PATIENCE_S, Producer, Trainer
from tests.support.server import ServeProcess

PROMETHEUS = [
    ("Accept", "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"),
    ("Accept-Encoding", "gzip"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A dispatcher that has committed one step."""
    folder = tmp_path_factory.mktemp("trained")
    with (
        ServeProcess(folder, warm=True, journal_dir=folder / "journal", **SMALL) as server,
        Producer(server.endpoint, "p") as producer,
        Trainer(server.endpoint, 2) as trainer,
    ):
        producer.push([3, 4, 5, 6])
        trainer.train()
        for rank in trainer.ranks:
            rank.settle()
        yield server


def test_prometheus_gets_valid_text_in_gzip(
    trained: ServeProcess, tool: Callable[[str], str]
) -> None:
    answer = trained.get("/metrics", *PROMETHEUS)
    assert (answer.status, answer.headers["Content-Encoding"]) == (200, "gzip")
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert answer.headers["Vary"] == "Accept-Encoding"
    assert b"\ndispatcher_samples_committed_total 4.0\n" in gzip.decompress(answer.content)
    plain = trained.get("/metrics")
    assert "Content-Encoding" not in plain.headers
    done = subprocess.run(
        [tool("promtool"), "check", "metrics"], input=plain.content, capture_output=True,
        check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_a_machine_is_told_in_json_whether_we_are_ready_and_what_is_waited_for(
    trained: ServeProcess,
) -> None:
    answer = trained.get("/readyz", ("Accept", "application/json"))
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("application/json")
    assert "Rollout-Dispatcher-Run-Id" in answer.headers
    found: dict[str, Any] = answer.json
    assert (found["is_ready"], found["run_state"]) == (True, "running")
    assert (found["missing_ranks"], found["absent_ranks"]) == ([], [])
    (delay,) = found["delays"]
    assert (delay["cause"], delay["text"]) == ("samples", "0 of 4 samples are ready")
    assert delay["seconds"] >= 0


def test_a_status_is_json_or_in_text_what_a_person_looks_for(trained: ServeProcess) -> None:
    status = trained.status()
    assert (status["is_ready"], status["producers_connected"]) == (True, 1)
    assert [each["cause"] for each in status["delays"]] == ["samples"]
    assert (status["partial_steps"], status["steps_lost"]) == (0, 0), "named as their metrics are"
    answer = trained.get("/statusz", ("Accept", "text/plain"))
    assert answer.headers["Content-Type"].startswith("text/plain")
    lines = re.sub(r" \(\d+ \w+\)", "", answer.text).splitlines()
    assert lines == [
        f"run {status['run_id']} is running, ready",
        "ranks: 2 of 2 connected, generation 1",
        "producers: 1 connected, 0 pushes wait",
        "buffer: 0 samples, 0 ready of a window of 4, 0 open groups",
        "steps: 1 committed, 0 open with 0 samples",
        "dropped: 0 of 4 accepted samples",
        next(
            line
            for line in lines
            if re.match(r"lost: [\d.e+-]+ % of the ranks' time in \d+ s", line)
        ),
        "the next step waits for:",
        "  0 of 4 samples are ready",
    ]


async def test_a_journal_that_fails_makes_it_unready_everywhere_alike() -> None:
    log = SlowLog()
    router = make_router(log, dp_size=4, global_batch_size=4)
    async with http_client(router) as client:
        for failure, ready in ((None, True), (JournalFull("no room at all"), False)):
            log.failure = failure
            async with client.get("/readyz", headers={"Accept": "application/json"}) as answer:
                told = await answer.json()
            async with client.get("/metrics") as scraped:
                assert f"\ndispatcher_ready {float(ready)}\n" in await scraped.text()
            assert (answer.status, told["is_ready"]) == (200 if ready else 503, ready)
            causes = [each["cause"] for each in told["delays"]]
            assert ("journal" in causes) is not ready
        assert told["code"] == "not-ready"
        assert "no room at all" in told["message"]
        async with client.get("/readyz") as answer:
            assert (answer.status, (await answer.json())["code"]) == (503, "not-ready")
    router.close()
