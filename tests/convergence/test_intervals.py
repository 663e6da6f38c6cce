"""Claims about intervals, and that the test of convergence can fail in each of its parts."""

import pytest

from tests.convergence.intervals import Interval, Verdict, judge, student_t

FIRST = 0.5
FIFO = [0.80, 0.81, 0.79, 0.80, 0.82, 0.78, 0.80, 0.81]
LESS = [value - 0.05 for value in FIFO]
NOISE = [0.002, -0.001, 0.001, -0.002, 0.0, 0.001, -0.001, 0.002]
SAME = [value + noise for value, noise in zip(FIFO, NOISE, strict=True)]


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (2, 4.303), (4, 2.776), (9, 2.262), (29, 2.045)]
)
def test_quantiles_of_student_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_t(freedom) == pytest.approx(quantile, abs=6e-4)


def test_within_and_beyond_are_about_the_whole_interval() -> None:
    assert Interval(-0.1, 0.1).is_within(0.2)
    assert not Interval(-0.3, 0.1).is_within(0.2)
    assert Interval(-0.4, -0.3).is_beyond(0.2)
    assert not Interval(-0.4, -0.1).is_beyond(0.2)


def judged(window: list[float], control: list[float], fifo: list[float] = FIFO) -> Verdict:
    return judge(FIRST, fifo, {"window": window, "control": control})


def shown(verdict: Verdict) -> bool:
    return verdict.shown(["window"], "control")


def test_the_same_rewards_and_a_worse_control_are_shown() -> None:
    found = judged(SAME, LESS)
    assert found.learns
    assert found.differences["window"].same
    assert found.differences["control"].detected
    assert shown(found)
    assert found.margin == pytest.approx(0.05 * found.gain)


def test_a_window_that_loses_a_tenth_of_the_gain_is_not_the_same() -> None:
    found = judged([value - 0.03 for value in SAME], LESS)
    assert not found.differences["window"].same
    assert not shown(found)
    assert found.shown([], "control"), "where nothing is claimed of it"


def test_few_and_scattered_seeds_show_nothing_though_their_mean_is_right() -> None:
    scattered = [value + 40 * noise for value, noise in zip(FIFO, NOISE, strict=True)]
    found = judged(scattered[:4], LESS[:4], FIFO[:4])
    assert abs(found.differences["window"].mean) < found.margin
    assert not found.differences["window"].same


def test_a_control_that_does_no_worse_is_not_detected_and_so_nothing_is_shown() -> None:
    found = judged(SAME, SAME)
    assert found.differences["window"].same
    assert not found.differences["control"].detected
    assert not shown(found)


def test_where_fifo_does_not_learn_nothing_is_shown() -> None:
    assert not judged(SAME, LESS, [0.5 + noise for noise in NOISE]).learns
