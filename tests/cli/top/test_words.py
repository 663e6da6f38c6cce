"""Numbers, bars, charts and lists as an operator reads them."""

import pytest

from rollout_dispatcher.cli.top.words import (
    ASCII,
    UNICODE,
    bar,
    chart,
    count,
    duration,
    nbytes,
    percent,
    ranges,
    wrapped,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (7, "7"), (0.5, "0.50"), (999, "999"), (1500, "1.50k"), (21_300_000, "21.3M")],
)
def test_counts_are_short(value: float, text: str) -> None:
    assert count(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(12, "12 B"), (187_400, "183 KiB"), (2**31, "2.00 GiB")]
)
def test_bytes_have_a_unit(value: float, text: str) -> None:
    assert nbytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0 %"),
        (0.0013, "0.13 %"),
        (0.0123, "1.2 %"),
        (0.27, "27 %"),
        (1.04, "104 %"),
    ],
)
def test_shares_are_percent(value: float | None, text: str) -> None:
    assert percent(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.4, "3 s"), (119, "119 s"), (720, "12 min"), (18_720, "5.2 h"), (864_000, "10 d")],
)
def test_durations_are_in_the_unit_that_matters(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_bar_shows_its_part_and_a_mark_on_it() -> None:
    assert bar(5, 10, 10, ASCII) == "#####....."
    assert bar(5, 10, 10, ASCII, mark=8) == "#####...|."
    assert bar(50, 10, 4, UNICODE) == "████"
    assert bar(1, 0, 4, UNICODE) == "░░░░"


def test_a_chart_is_of_as_many_rows_as_it_is_given() -> None:
    assert chart([0, 0.5, 1], 1, 4, 1, UNICODE) == [" ▁▅█"]
    assert chart([0, 0.5, 1], 1, 3, 2, UNICODE) == [" ▁█", "▁██"]
    assert chart([], 0, 3, 2, UNICODE) == ["   ", "   "]
    assert chart([1, 2, 3, 4], 4, 2, 1, ASCII)[0][-1] == ASCII.levels[-1]


def test_a_text_that_is_too_long_shows_that_it_is_cut() -> None:
    assert wrapped("one two three", 7, 2) == ["one two", "three"]
    assert wrapped("one two three four", 7, 2) == ["one two", "thre..."]
    assert wrapped("", 7, 2) == [""]


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([4], "4"), ([0, 1, 2, 3, 7], "0-3, 7"), ([9, 3], "3, 9")]
)
def test_ranks_are_named_as_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text
