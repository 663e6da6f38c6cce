"""The report: one self-contained page, well formed, with every figure that the table has."""

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from rollout_dispatcher.cli.main import main
from rollout_dispatcher.simulate.figures import summary
from rollout_dispatcher.simulate.page import RANK_TIME, page
from rollout_dispatcher.simulate.result import Result
from rollout_dispatcher.simulate.run import Scenario, simulate
from rollout_dispatcher.simulate.table import columns_for, recommend, table
from rollout_planner.types import Strategy
from tests.simulate.bench import make_setting, make_trace

TRACE = make_trace(
    [int(tokens) for tokens in np.geomspace(20, 20_000, 150)],
    arrival=[float(at) for at in range(150)],
)
OPTIONS = {
    "dp_size": 2,
    "global_batch_size": 8,
    "micro_batch_size": 1,
    "micro_batch_tokens": None,
    "layout": "packed",
    "sync": "micro-step",
    "arrivals": "steady",
    "cost": "quadratic:1,24576,0",
    "seed": 0,
}
VOID = {"meta", "br"}


def made(*, timed: bool = False, strategies: tuple[Strategy, ...] = tuple(Strategy)) -> Result:
    settings = [make_setting(1, strategy) for strategy in strategies]
    if Strategy.WINDOW in strategies:
        settings += [make_setting(1.25), make_setting(2)]
    scenario = Scenario(load=0.9) if timed else Scenario(steps=10)
    runs = simulate(TRACE, settings, scenario)
    advice = recommend(runs) if Strategy.WINDOW in strategies else None
    return Result(replace(summary(TRACE), name="<trace> & co"), OPTIONS, runs, advice)


class Wellformed(HTMLParser):
    """Fails on a tag that is closed out of turn; collects what is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        assert attrs is not None
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        """Nothing stays open."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


Make = Callable[[], Result]


@pytest.mark.parametrize(
    "make",
    [
        made,
        lambda: made(timed=True),
        lambda: made(strategies=(Strategy.KK,)),
        lambda: made(strategies=(Strategy.WINDOW,)),
    ],
    ids=["steady", "timed", "no window", "no baseline"],
)
def test_the_page_is_well_formed_and_needs_no_other_file(make: Make) -> None:
    result = make()
    text = page(result)
    parser = Wellformed()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    assert "<trace> & co" in parser.text
    assert "<trace>" not in text
    assert not re.search(r"(src|href)=|url\(|@import|<script", text)
    assert "nan" not in text
    assert "color-scheme: light dark" in text


def test_bars_are_shares_of_rank_time_where_time_passes_and_else_excess_beside_the_largest() -> (
    None
):
    timed = made(timed=True)
    (kinds,) = re.findall(r"<p class='legend'>(.+?)</p>", page(timed))
    assert re.sub("<.*?>", "|", kinds).strip("|").split("||") == list(RANK_TIME)
    bars = [list(map(float, re.findall("width:(.*?)%", bar))) for bar in bars_of(page(timed))]
    assert [bar[0] for bar in bars] == [
        pytest.approx(100 * run.timing.busy, abs=0.01) for run in timed.runs if run.timing
    ]
    assert all(sum(bar) == pytest.approx(100, abs=0.05) for bar in bars)
    steady = made()
    largest = max(run.excess for run in steady.runs)
    assert [
        float(width) for bar in bars_of(page(steady)) for width in re.findall("width:(.*?)%", bar)
    ] == [pytest.approx(100 * run.excess / largest, abs=0.01) for run in steady.runs]


def bars_of(text: str) -> list[str]:
    return re.findall(r"<td class='bar'>(.*?)</td>", text)


def test_the_page_shows_what_the_table_shows() -> None:
    result = made()
    text = page(result)
    for _, _, show in columns_for(result):
        for run in result.runs:
            assert f"<td>{show(run)}</td>" in text


def test_the_table_is_aligned_and_says_what_its_columns_mean() -> None:
    lines = table(made()).splitlines()
    ruler = next(at for at, line in enumerate(lines) if set(line) == {"-"})
    rows = lines[ruler + 1 : ruler + 7]
    assert [row.split()[0] for row in rows] == [*map(str, Strategy), "window", "window"]
    assert len({len(row) for row in rows}) == 1
    assert len(lines[ruler]) == max(map(len, rows))
    assert any(line.startswith("excess:") for line in lines)


def test_a_padded_layout_shows_its_padding_and_timed_arrivals_their_waits() -> None:
    result = made()
    padded = replace(result, options=OPTIONS | {"layout": "padded"})
    assert "padding" in table(padded)
    assert "padding" not in table(result)
    multiple = replace(result, options=OPTIONS | {"sample_length_multiple": 1024})
    assert "padding" in table(multiple)
    assert "samples padded to multiples of 1,024" in table(multiple)
    assert "p50 s" in table(made(timed=True))


def test_a_saved_result_gives_the_same_page(tmp_path: Path) -> None:
    result = made()
    saved, shown = tmp_path / "result.json", tmp_path / "report.html"
    saved.write_text(result.to_json())
    assert main(["report", str(saved), "-o", str(shown)]) == 0
    assert shown.read_text() == page(result)


@pytest.mark.parametrize(
    ("text", "fact"),
    [("{", "not a result"), (None, "cannot be read"), ("\udcff", "UTF-8")],
)
def test_a_report_of_something_else_is_a_usage_error(
    tmp_path: Path, text: str | None, fact: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "result.json"
    if text is not None:
        saved.write_bytes(text.encode(errors="surrogateescape"))
    assert main(["report", str(saved), "-o", str(tmp_path / "r.html")]) == 2
    assert fact in capsys.readouterr().err
