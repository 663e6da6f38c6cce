"""Every plot of every page, from its SVG: no text meets another, or leaves the picture."""

import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rollout_dispatcher.cli.main import main
from rollout_dispatcher.cli.recorded import own_setting
from rollout_dispatcher.record.recording import load_recording
from rollout_dispatcher.simulate.recorded.page import recorded_page
from rollout_dispatcher.simulate.report.page import page
from rollout_dispatcher.simulate.report.parts import NARROW, WIDE
from rollout_dispatcher.simulate.report.svg import Box, Plot, overlap, text_width
from rollout_planner.types import Strategy
from tests.simulate.test_report import made
from tests.support.recorded import write_record

#: Letters of a narrow page are as high as on a wide one: pictures are hardly scaled at 500 pixels.
LEAST_SCALE = (500 - 2 * (12 + 12)) / NARROW


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("made") / "record"
    write_record(folder)
    recording = load_recording(folder)
    return {
        "steady": page(made()),
        "timed": page(made(timed=True)),
        "no window": page(made(strategies=(Strategy.KK,))),
        "recorded": recorded_page(recording, own_setting(recording)),
    }


def plots(text: str) -> Iterator[ElementTree.Element]:
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        yield ElementTree.fromstring(svg)


def boxes(svg: ElementTree.Element) -> list[tuple[str, Box]]:
    """What each text takes, as it is drawn; 12 pixels high, its base line at y."""
    found = []
    for text in svg.iter("text"):
        words, width = text.text or "", text_width(text.text or "")
        moved = re.fullmatch(
            r"translate\(([\d.]+) ([\d.]+)\) rotate\(-90\)", text.get("transform", "")
        )
        if moved:
            x, y = map(float, moved.groups())
            found.append((words, (x - 10, y - width / 2, 13.0, width)))
            continue
        x, y = float(text.get("x", "")), float(text.get("y", ""))
        start = x - {"start": 0.0, "middle": width / 2, "end": width}[text.get("text-anchor", "")]
        found.append((words, (start, y - 10, width, 12.0)))
    return found


@pytest.mark.parametrize("name", ["steady", "timed", "no window", "recorded"])
def test_texts_have_room_of_their_own(pages: dict[str, str], name: str) -> None:
    for svg in plots(pages[name]):
        _, _, width, height = map(float, svg.get("viewBox", "").split())
        assert width in {WIDE, NARROW}
        taken = boxes(svg)
        for words, (x, y, w, h) in taken:
            assert x >= -1, words
            assert y >= -1, words
            assert x + w <= width + 1, words
            assert y + h <= height + 1, words
        for (one, here), (other, there) in combinations(taken, 2):
            assert not overlap(here, there), (svg.get("aria-label"), one, other)


@pytest.mark.parametrize("name", ["steady", "timed", "recorded"])
def test_labels_of_an_axis_do_not_cross_it(pages: dict[str, str], name: str) -> None:
    for svg in plots(pages[name]):
        base = max(
            _points(line)[0][1] for line in svg.iter("polyline") if line.get("class") == "axis"
        )
        grid = [_points(line) for line in svg.iter("polyline") if line.get("class") == "grid"]
        left = min((points[0][0] for points in grid), default=0.0)
        for text in svg.iter("text"):
            x, y = float(text.get("x", "0")), float(text.get("y", "0"))
            if text.get("class") == "tick" and text.get("text-anchor") == "end":
                assert x < left
            if text.get("class") == "tick" and text.get("text-anchor") == "middle":
                assert y - 10 > base


def test_logarithmic_axes_say_so(pages: dict[str, str]) -> None:
    assert "share of samples, logarithmic" in pages["steady"]
    assert "tokens of a sample, logarithmic" in pages["steady"]


def test_letters_can_be_read_on_a_narrow_page() -> None:
    assert LEAST_SCALE * 12 >= 11


def test_a_note_with_no_place_is_left_out() -> None:
    plot = Plot("crowd", 300, 100)
    for _ in range(20):
        plot.note(150, 50, "the same words")
    svg = ElementTree.fromstring(plot.render())
    taken = boxes(svg)
    assert 0 < len(taken) < 20
    assert not any(overlap(a, b) for (_, a), (_, b) in combinations(taken, 2))


def test_a_page_of_many_ranks_and_windows_is_no_exception(tmp_path: Path) -> None:
    command = (
        "simulate reasoning-gym --dp-size 64 --dispatch-batch-size 128 --micro-batch-size 1 "
        "--steps 3 --window-multiple 1 1.05 1.1 1.15 2 4 --html"
    )
    assert main([*command.split(), str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    for svg in plots(text):
        for (one, here), (other, there) in combinations(boxes(svg), 2):
            assert not overlap(here, there), (svg.get("aria-label"), one, other)


def _lines(svg: ElementTree.Element, kind: str) -> list[list[tuple[float, float]]]:
    return [_points(line) for line in svg.iter("polyline") if line.get("class") == kind]


def _points(line: ElementTree.Element) -> list[tuple[float, float]]:
    pairs = (point.split(",") for point in line.get("points", "").split())
    return [(float(x), float(y)) for x, y in pairs]
