"""The nine causes of the ranks' time: one list, and every place has its words."""

import re
from pathlib import Path

import pytest

from rollout_dispatcher.cli.simulate_options import own_setting
from rollout_dispatcher.core.rank_time import LOST, TimeCause
from rollout_dispatcher.record.recording import load_recording
from rollout_dispatcher.service.http.status_page import page as status_page
from rollout_dispatcher.service.reporter import LostTime
from rollout_dispatcher.simulate.page import page as report
from tests.service.conftest import Serve
from tests.support.client import Producer, Trainer
from tests.support.recorded import write_record
from tests.support.server import eventually
from tests.support.source import ROOT

CAUSES = [
    "work", "slow-rank", "lengths", "no-samples", "stale", "journal", "dispatcher", "hung-rank",
    "gone-rank",
]  # fmt: skip


def test_there_are_nine() -> None:
    assert [*TimeCause] == CAUSES
    assert [*LOST] == CAUSES[1:]


def test_metrics_statusz_and_its_page_have_them(serve: Serve) -> None:
    server = serve()
    with Producer(server.endpoint, "p") as producer, Trainer(server.endpoint, 2) as trainer:
        producer.push([3, 9, 4, 17])
        trainer.train()
        status = server.status()
        exposed = re.findall(
            r'rank_time_seconds_total\{cause="([^"]+)"', server.get("/metrics").text
        )
        assert sorted(exposed) == sorted(status["rank_time"]) == sorted(CAUSES)
        assert sorted(status["lost"]["causes"]) == sorted(CAUSES[1:])
    status |= {"rank_time": dict.fromkeys(CAUSES, 1.0)}
    shown = status_page(status, [], "", "")
    assert [
        word for word in re.findall(r"<tr><td>([\w-]+)</td>", shown) if word in CAUSES
    ] == CAUSES


def test_the_line_of_readyz_the_log_and_top_has_them(serve: Serve) -> None:
    line = str(LostTime(dict.fromkeys(TimeCause, 1.0), 60.0))
    assert re.findall(r"11 % ([\w-]+)", line) == CAUSES[1:]
    server = serve(progress_interval="100ms")
    with Producer(server.endpoint, "p") as producer, Trainer(server.endpoint, 2) as trainer:
        producer.push([3, 9, 4, 17])
        trainer.train()
        assert re.search(
            r"^lost: \S+ % of the ranks' time in ", server.get("/readyz").text, re.MULTILINE
        )
        eventually(lambda: "; lost: " in server.log(), "the log's line of progress")
        text = server.get("/statusz", ("Accept", "text/plain")).text
        assert "lost: " in text, "top shows this"


@pytest.mark.parametrize(
    "path",
    [
        "deploy/prometheus/alerts.yml", "deploy/grafana/dashboards/rollout-dispatcher.json",
        "docs/metrics.md", "docs/runbook.md",
    ],
)  # fmt: skip
def test_queries_of_alerts_dashboard_and_documents_have_no_other(path: str) -> None:
    text = (ROOT / path).read_text().replace('\\"', '"')
    asked = re.findall(r'\bcause=~?"([^"]+)"', text) + re.findall(
        r"labels: .*cause: ([\w-]+)", text
    )
    assert asked or path == "docs/runbook.md"
    assert {word for words in asked for word in words.split("|")} <= set(CAUSES)


def test_each_loss_has_an_alert_and_the_table_of_metrics_a_row() -> None:
    alerts = (ROOT / "deploy/prometheus/alerts.yml").read_text()
    named = re.findall(r'cause=~?"([^"]+)"', alerts) + re.findall(
        r"labels: .*cause: ([\w-]+)", alerts
    )
    assert {word for words in named for word in words.split("|")} == set(CAUSES[1:])
    table = (ROOT / "docs/metrics.md").read_text().partition("<!-- causes")[2]
    assert re.findall(r"^\| `([\w-]+)`", table.partition("<!-- /causes")[0], re.MULTILINE) == CAUSES


def test_a_report_has_the_ledger_and_names_what_it_cannot_tell_apart_by_both(
    tmp_path: Path,
) -> None:
    write_record(tmp_path)
    recording = load_recording(tmp_path)
    text = report(recording, own_setting(recording))
    assert re.findall(r"<tr><td>([a-z-]+): [^<]+</td><td>\d+</td><td>11\.1</td>", text) == CAUSES
    of_ranks = re.search(r"<th>DP rank.*?<th>lost", text)
    assert of_ranks is not None
    words = re.findall(r"[a-z]+-[a-z]+|work|lengths", of_ranks[0])
    assert words == ["work", "slow-rank", "lengths"]
