"""The page for people shows the state of the run, and nothing that a client could slip into it."""

import re
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from typing import Any

from rollout_dispatcher.service.http.status_page import ELSEWHERE, page, rank_state
from tests.service.conftest import SMALL, Serve
from tests.support.client import Producer, Trainer

EVIL = "<script>alert('&')</script>"
RANK = {"connected": True, "taken": 3, "last_seen": "2026-01-01T00:00:00+00:00", "client_id": EVIL}
STATUS: dict[str, Any] = {
    "run_id": EVIL, "run_state": "running", "version": "1", "dp_size": 4, "now": "now",
    "ranks": {"0": RANK, "1": RANK, "2": RANK | {"connected": False}},
    "hung_ranks": [1], "absent_ranks": [2],
    "lost": {"share": 0.25, "causes": {"lengths": 0.25, "journal": 0.0}},
    "rank_time": {"work": 30.0, "lengths": 10.0, "journal": 0.0},
    "measured": {"last_step": {"ranks": [
        {"dp_rank": 1, "compute_s": 2.5, "wait_s": None, "slowness": 1.25},
    ]}},
    "dropped": {"stale": 7, "oversize": 0}, "steps_planned": {},
}  # fmt: skip
CLIENTS: list[dict[str, Any]] = [
    {"client_id": "here", "role": "rank", "dp_rank": 0, "host": "", "connected": True,
     "samples_accepted": 0, "samples_per_second": 0.0, "last_error": ""},
    {"client_id": EVIL, "role": "producer", "dp_rank": None, "host": EVIL, "connected": False,
     "samples_accepted": 12, "samples_per_second": 0.25, "last_error": EVIL},
]  # fmt: skip


class Read(HTMLParser):
    """Tags, the rows of each table by its heading, and what is outside of tables."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.preformatted = ""
        self._open: list[str] = []
        self._rows: list[list[str]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(value) for name, value in attrs if name in {"href", "src", "action"}]
        if tag not in {"meta", "html"}:
            self._open.append(tag)
        if tag == "tr":
            self._rows.append([])

    def handle_endtag(self, tag: str) -> None:
        if tag != "html":
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        match self._open[-1:]:
            case ["h2"]:
                self._rows = self.tables[data] = []
            case ["td" | "th"]:
                self._rows[-1].append(data)
            case ["pre"]:
                self.preformatted += data


def test_what_clients_say_is_text() -> None:
    html = page(STATUS, CLIENTS, f"waits for {EVIL}", "now")
    assert "<script" not in html
    read = Read(html)
    assert read.preformatted == f"waits for {EVIL}"
    assert read.tables["Clients"][1:] == [
        [EVIL, "producer", EVIL, "no", "12", "0.2", EVIL],
        ["here", "rank 0", "-", "yes", "0", "0.0", "-"],
    ]
    assert set(read.tags) & {"script", "link", "img", "iframe", "form"} == set()
    assert read.links == list(ELSEWHERE)


def test_each_rank_and_each_second_is_shown() -> None:
    read = Read(page(STATUS, CLIENTS, "", "now"))
    rows = read.tables["DP ranks"][1:]
    assert [row[:6] for row in rows] == [
        ["0", "connected", "3", "-", "-", "-"],
        ["1", "hangs", "3", "2.5 s", "-", "1.25"],
        ["2", "absent", "3", "-", "-", "-"],
        ["3", "missing", "-", "-", "-", "-"],
    ]
    assert read.tables["Time of DP ranks"][1:] == [
        ["work", "75.0%", "75.0%, 30 s"],
        ["lengths", "25.0%", "25.0%, 10 s"],
    ]
    assert read.tables["Dropped samples"][1:] == [["stale", "7"]]
    assert read.tables["Steps planned"] == []
    assert rank_state(STATUS | {"absent_ranks": []}, 2) == "left"


def test_it_is_served_beside_times_of_day(serve: Serve) -> None:
    server = serve()
    with Producer(server.endpoint, "p<1>") as producer, Trainer(server.endpoint, 2) as trainer:
        producer.push([3, 4, 5, 6])
        trainer.train()
        answer, status = server.get("/"), server.status()
        assert [server.get(path).status for path in ELSEWHERE] == [200] * len(ELSEWHERE)
        producer.push([7])
        waiting = server.status()
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
    read = Read(answer.text)
    assert re.search(r"ranks: 2 of 2 connected", read.preformatted)
    assert "p<1>" in [row[0] for row in read.tables["Clients"]]
    assert [row[1] for row in read.tables["DP ranks"][1:]] == ["connected"] * SMALL["dp_size"]
    times = [status["now"], waiting["oldest_arrival"], status["ranks"]["0"]["last_seen"]]
    for text in times:
        moment = datetime.fromisoformat(text)
        assert moment.utcoffset() == timedelta(0)
        assert abs(datetime.now(UTC) - moment) < timedelta(minutes=1)
