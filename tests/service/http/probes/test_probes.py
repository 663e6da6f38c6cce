"""Probes answer people in text and machines in the format that they ask for."""

import gzip
import http.client
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollout_dispatcher.errors import JournalFull
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.service.planes import http_plane
from tests.service.conftest import SMALL, Serve
from tests.service.durability.test_barrier import SlowLog
from tests.service.durability.test_behind_the_barrier import hub_with
from tests.support.client import PATIENCE_S, Producer, Trainer
from tests.support.server import ServeProcess, eventually

PROMETHEUS = {
    "Accept": "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3",
    "Accept-Encoding": "gzip",
}


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


def ask(
    server: ServeProcess, path: str, headers: dict[str, str]
) -> tuple[int, dict[str, str], bytes]:
    at = Endpoint.parse(server.http)
    connection = http.client.HTTPConnection(at.host, at.port, timeout=PATIENCE_S)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        named = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, named, answer.read()
    finally:
        connection.close()


def test_prometheus_gets_valid_text_in_gzip(
    trained: ServeProcess, tool: Callable[[str], str]
) -> None:
    status, headers, body = ask(trained, "/metrics", PROMETHEUS)
    assert (status, headers["content-encoding"]) == (200, "gzip")
    assert headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert headers["vary"] == "Accept-Encoding"
    assert b"\ndispatcher_samples_committed_total 4.0\n" in gzip.decompress(body)
    _, plain, exposition = ask(trained, "/metrics", {})
    assert "content-encoding" not in plain
    done = subprocess.run(
        [tool("promtool"), "check", "metrics"], input=exposition, capture_output=True,
        check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_a_machine_is_told_in_json_whether_we_are_ready_and_what_is_waited_for(
    trained: ServeProcess,
) -> None:
    status, headers, body = ask(trained, "/readyz", {"Accept": "application/json"})
    assert status == 200
    assert headers["content-type"].startswith("application/json")
    assert "rollout-dispatcher-run-id" in headers
    found: dict[str, Any] = json.loads(body)
    assert (found["is_ready"], found["run_state"]) == (True, "running")
    assert (found["missing_ranks"], found["absent_ranks"]) == ([], [])
    (delay,) = found["delays"]
    assert (delay["cause"], delay["text"]) == ("samples", "0 of 4 samples are ready")
    assert delay["seconds"] >= 0


def test_a_status_is_json_or_in_text_what_a_person_looks_for(trained: ServeProcess) -> None:
    status = trained.status()
    assert (status["is_ready"], status["producers_connected"]) == (True, 1)
    assert [each["cause"] for each in status["delays"]] == ["samples"]
    _, headers, body = ask(trained, "/statusz", {"Accept": "text/plain"})
    assert headers["content-type"].startswith("text/plain")
    lines = re.sub(r" \(\d+ \w+\)", "", body.decode()).splitlines()
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


def test_how_long_it_has_been_so_is_said(serve: Serve) -> None:
    server = serve()
    eventually(lambda: "not joined yet (1 s)" in server.get("/readyz").text, "a second has passed")
    with Trainer(server.endpoint, 2):
        server.await_status(missing_ranks=[])
        found = server.status()["delays"]
        assert [each["cause"] for each in found] == ["samples", "no-producers"]
        assert found[0]["seconds"] >= 1  # also while others came and went


async def test_a_journal_that_fails_makes_it_unready_everywhere_alike(tmp_path: Path) -> None:
    log = SlowLog()
    router = hub_with(log, dp_size=4)
    path = str(tmp_path / "http")
    config = router.config.model_copy(update={"http": Endpoint(path=path)})
    async with http_plane(config, router):
        connector = aiohttp.UnixConnector(path)
        async with aiohttp.ClientSession("http://dispatcher", connector=connector) as session:
            for failure, ready in ((None, True), (JournalFull("no room at all"), False)):
                log.failure = failure
                async with session.get("/readyz", headers={"Accept": "application/json"}) as answer:
                    told = await answer.json()
                async with session.get("/metrics") as scraped:
                    assert f"\ndispatcher_ready {float(ready)}\n" in await scraped.text()
                assert (answer.status, told["is_ready"]) == (200 if ready else 503, ready)
                causes = [each["cause"] for each in told["delays"]]
                assert ("journal" in causes) is not ready
            assert told["code"] == "not-ready"
            assert "no room at all" in told["message"]
            async with session.get("/readyz") as answer:
                assert (answer.status, (await answer.json())["code"]) == (503, "not-ready")
    router.close()
