"""The report of a record is one self-contained page, well formed; the table says what it shows."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from rollout_dispatcher.cli.main import main
from rollout_dispatcher.cli.simulate_options import own_setting
from rollout_dispatcher.record.recording import load_recording
from rollout_dispatcher.simulate.figures import summary
from rollout_dispatcher.simulate.page import RANK_TIME, page
from rollout_dispatcher.simulate.recorded import Course, rank_shares
from rollout_dispatcher.simulate.result import Result
from rollout_dispatcher.simulate.run import Scenario, simulate
from rollout_dispatcher.simulate.table import table
from rollout_planner.types import Strategy
from tests.simulate.bench import make_setting, make_trace
from tests.support.recorded import write_record

TRACE = make_trace(
    [int(tokens) for tokens in np.geomspace(20, 20_000, 150)],
    arrival=[float(at) for at in range(150)],
)
OPTIONS = {
    "dp_size": 2,
    "global_batch_size": 8,
    "global_batch_groups": None,
    "micro_batch_size": 1,
    "micro_batch_tokens": None,
    "layout": "packed",
    "sync": "micro-step",
    "arrivals": "steady",
    "cost": "quadratic:1,24576,0",
    "seed": 0,
    "pipeline_stages": 1,
    "sample_length_multiple": 1,
}
VOID = {"meta", "br"}


def made(*, timed: bool = False) -> Result:
    settings = [make_setting(1, strategy) for strategy in Strategy]
    settings += [make_setting(1.25), make_setting(2)]
    scenario = Scenario(load=0.9) if timed else Scenario(steps=10)
    return Result(summary(TRACE), OPTIONS, simulate(TRACE, settings, scenario))


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


def test_the_page_is_well_formed_and_needs_no_other_file(tmp_path: Path) -> None:
    write_record(tmp_path / "<a> & b")
    recording = load_recording(tmp_path / "<a> & b")
    text = page(recording, own_setting(recording))
    parser = Wellformed()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    assert "<a> & b" in parser.text
    assert "<a>" not in text
    assert not re.search(r"(src|href)=|url\(|@import|<script", text)
    assert "nan" not in text
    assert "color-scheme: light dark" in text


def test_bars_are_shares_of_each_rank_s_time(tmp_path: Path) -> None:
    write_record(tmp_path)
    recording = load_recording(tmp_path)
    setting = own_setting(recording)
    text = page(recording, setting)
    *_, kinds, _ = re.findall(r"<p class='legend'>(.*?)</p>", text)
    assert re.sub("<.*?>", "|", kinds).strip("|").split("||") == list(RANK_TIME)
    bars = re.findall(r"<td class='bar'>(.*?)</td>", text)
    ranks = rank_shares(recording, recording.trained(), setting)
    for bar, rank in zip(bars, ranks, strict=True):
        widths = list(map(float, re.findall("width:(.*?)%", bar)))
        assert widths == pytest.approx([100 * share for share in rank.shares], abs=0.01)


def test_a_window_that_is_counted_in_groups_is_full_by_its_samples(tmp_path: Path) -> None:
    write_record(tmp_path)
    recording = load_recording(tmp_path)
    setting = own_setting(recording)
    trigger = replace(setting.core.trigger, batch=2, window=3)  # groups of four samples
    setting = replace(setting, core=replace(setting.core, trigger=trigger))
    assert Course.of(recording.trained(), setting).fill == pytest.approx(8 / 12)


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


@pytest.mark.parametrize(
    ("name", "fact"), [("nowhere", "cannot be read"), ("result.json", "cannot be read")]
)
def test_a_report_of_something_else_is_a_usage_error(
    tmp_path: Path, name: str, fact: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "result.json").write_text("{}")
    assert main(["report", str(tmp_path / name), "-o", str(tmp_path / "r.html")]) == 2
    assert fact in capsys.readouterr().err
