"""A real Prometheus scrapes a real run with the configuration that we ship."""

import json
import shutil
import urllib.parse
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import PATIENCE, finish, producer, running, torchrun
from tests.support.addresses import free_port
from tests.support.server import ServeProcess, eventually
from tests.support.source import ROOT

pytestmark = pytest.mark.e2e


def query(port: int, expression: str) -> list[dict[str, Any]]:
    url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return found
    except OSError:
        return []


def value(port: int, expression: str) -> float | None:
    found = query(port, expression)
    return float(found[0]["value"][1]) if found else None


def answered(port: int, expression: str) -> list[dict[str, Any]]:
    """What it answers, once it does.

    A scrape that takes longer than the time to the next one has failed, and until one succeeds
    Prometheus knows nothing of this run.
    """
    found: list[dict[str, Any]] = []

    def answers() -> bool:
        found[:] = query(port, expression)
        return bool(found)

    eventually(answers, f"{expression} has an answer", PATIENCE)
    return found


def known(port: int, expression: str) -> float:
    """The value that it answers with, once it does."""
    return float(answered(port, expression)[0]["value"][1])


def targets(port: int) -> list[tuple[str, str]]:
    """Of each target whether it is up, and what was wrong with the last scrape."""
    url = f"http://127.0.0.1:{port}/api/v1/targets"
    with urllib.request.urlopen(url, timeout=5) as answer:
        found = json.load(answer)["data"]["activeTargets"]
    return [(each["health"], each["lastError"]) for each in found]


def config_for(target: str, folder: Path) -> Path:
    """The shipped scrape configuration, pointed at this run and scraping every 200 ms."""
    text = (ROOT / "deploy/prometheus/prometheus.yml").read_text()
    assert "127.0.0.1:9471" in text
    text = text.replace("127.0.0.1:9471", target)
    text = text.replace("_interval: 15s", "_interval: 200ms")
    shutil.copy(ROOT / "deploy/prometheus/alerts.yml", folder)
    path = folder / "prometheus.yml"
    path.write_text(text)
    return path


def test_prometheus_sees_what_the_dispatcher_did(
    tmp_path: Path, tool: Callable[[str], str]
) -> None:
    prometheus = tool("prometheus")
    with ExitStack() as stack:
        server = stack.enter_context(
            ServeProcess(
                tmp_path,
                dp_size=2,
                global_batch_size=16,
                micro_batch_tokens=2048,
                on_oversize="alone",
            )
        )
        port = free_port()
        stack.enter_context(
            running(
                prometheus,
                f"--config.file={config_for(server.http, tmp_path)}",
                f"--storage.tsdb.path={tmp_path / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            )
        )
        release = tmp_path / "release"
        diaries = tmp_path / "diaries"
        diaries.mkdir()
        trainers = stack.enter_context(
            torchrun(2, server.endpoint, diaries, "--linger-until", str(release))
        )
        assert query(port, "dispatcher_policy_version") == []
        finish(stack.enter_context(producer(server.endpoint, "q", 16)))
        stall = 'rate(dispatcher_rank_time_seconds_total{cause="no-samples"}[3s])'
        eventually(
            lambda: (value(port, stall) or 0) > 1.6, "a stall shows while it lasts", PATIENCE
        )
        finish(stack.enter_context(producer(server.endpoint, "p", 144)))
        server.post("/v1/stream/end")
        committed = "dispatcher_samples_committed_total"
        eventually(lambda: value(port, committed) == 160, f"{committed} is 160", PATIENCE)

        assert known(port, "dispatcher_steps_committed_total") == 10
        assert known(port, 'dispatcher_samples_received_total{outcome="accepted"}') == 160
        # Its first event is an increase: the series was there before.
        first = 'increase(dispatcher_connections_total{role="producer"}[1m])'
        eventually(lambda: (value(port, first) or 0) > 0, "the producer shows", PATIENCE)
        assert known(port, "dispatcher_buffer_samples") == 0
        assert known(port, "count(dispatcher_rank_last_seen_timestamp_seconds)") == 2
        quantile = "histogram_quantile(0.99, dispatcher_sample_wait_seconds_bucket)"
        assert known(port, quantile) > 0
        assert query(port, '{__name__=~"dispatcher_.*_created"}') == []
        eventually(lambda: targets(port) == [("up", "")], "it is up", PATIENCE)
        release.touch()
        finish(trainers)
        assert server.wait() == 0
