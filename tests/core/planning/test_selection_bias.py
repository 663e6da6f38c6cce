"""Selection bias separates chance from what is none, over the last dispatches."""

import numpy as np
import pytest

from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.core.totals import DISPATCHES, LEVEL, LengthCounts, SelectionBias, Totals
from tests.support.core.cores import Bench
from tests.support.samples import make_sample


def steps(bias: SelectionBias, totals: Totals, count: int, *, longest_go: bool = True) -> None:
    """Batches of 64 lognormal lengths, of which the longest tenth may be dropped."""
    chance = np.random.default_rng(3)
    for _ in range(count):
        lengths = sorted((chance.lognormal(6, 1, 64).astype(int) + 1).tolist())
        totals.arrived.add(lengths)
        kept = len(lengths) if longest_go else 58
        totals.dropped_lengths.add(lengths[kept:])
        planned(bias, totals, lengths[:kept])


def planned(bias: SelectionBias, totals: Totals, lengths: list[int], work: float = 1.0) -> None:
    """A step of these samples, whose loss counts all tokens but the first."""
    tokens = np.array(lengths)
    totals.dispatched.add(lengths)
    bias.dispatched(tokens, tokens - 1, work)


def test_before_anything_is_dispatched_everything_may_be_chance() -> None:
    bias = SelectionBias(Totals())
    assert (bias.distance, bias.chance, bias.mix) == (0.0, 1.0, None)


def test_what_is_all_dispatched_is_not_biased() -> None:
    totals = Totals()
    bias = SelectionBias(totals)
    steps(bias, totals, 3)
    assert bias.distance == 0
    assert bias.chance == pytest.approx(LEVEL / (3 * 64) ** 0.5)
    steps(bias, totals, 50)
    assert bias.chance == pytest.approx(LEVEL / (DISPATCHES * 64) ** 0.5), "windowed"


def test_dropping_the_longest_is_no_chance_while_it_lasts() -> None:
    totals = Totals()
    bias = SelectionBias(totals)
    steps(bias, totals, 200)
    steps(bias, totals, DISPATCHES, longest_go=False)
    assert bias.distance == pytest.approx(6 / 64, abs=0.02)
    assert bias.distance > 2 * bias.chance
    steps(bias, totals, DISPATCHES)
    assert bias.distance == 0, "it is over"


def test_a_random_choice_is_within_chance() -> None:
    chance = np.random.default_rng(5)
    lengths = chance.lognormal(6, 1, 40 * 64).astype(int) + 1
    over = 0
    for _ in range(200):
        totals = Totals()
        bias = SelectionBias(totals)
        totals.arrived.add(lengths.tolist())
        totals.dispatched.add(chance.choice(lengths, 20 * 64, replace=False).tolist())
        over += bias.distance > bias.chance
    assert over <= 0.05 * 200


def test_a_core_counts_what_was_buffered_before_and_what_it_drops() -> None:
    bench = Bench(drop_above=500)
    bench.join()
    for _ in range(3):
        bench.push_plain(3)
        bench.push(make_sample(f"long/{bench.now}", 900))
        bench.push_plain(1)
        bench.hungry()
        bench.pass_time(2.0)
        bench.train(bench.core.statistics().steps_committed)
    assert bench.dropped(DropReason.OVERSIZE) == 3
    at = bench.core.statistics()
    assert at.selection_bias == pytest.approx(3 / 15)


def test_after_a_restart_the_window_begins_with_what_is_buffered() -> None:
    totals = Totals()
    totals.arrived.add([10] * 6 + [1000] * 4)
    totals.dispatched.add([10] * 5)
    bias, held = SelectionBias(totals), LengthCounts()
    held.add([10, 1000, 1000])
    bias.restore(held)
    assert (bias.distance, bias.chance) == (0.0, 1.0)
    planned(bias, totals, [10])
    assert bias.distance == pytest.approx(2 / 3), "of the three that were there"


def test_the_longest_weigh_less_where_they_leave_together() -> None:
    totals = Totals()
    bias = SelectionBias(totals)
    totals.arrived.add([100] * 990 + [5000] * 10)
    for _ in range(9):
        planned(bias, totals, [100] * 100, work=1.0)
    planned(bias, totals, [100] * 90 + [5000] * 10, work=6.0)
    mix = bias.mix
    assert mix is not None
    together, apart = 90 * 99 + 10 * 4999, 100 * 99
    assert mix.long_weight == pytest.approx((9 * apart + together) / 10 / together)
    assert mix.without_long == pytest.approx(0.9)
    assert mix.work_variation == pytest.approx(1.0), "1.5 around 1.5"
    assert mix.ks_step == pytest.approx(0.9 * 0.01 + 0.1 * 0.09)


def test_steps_alike_weigh_all_the_same() -> None:
    totals = Totals()
    bias = SelectionBias(totals)
    totals.arrived.add([100] * 990 + [5000] * 10)
    for _ in range(10):
        planned(bias, totals, [100] * 99 + [5000])
    mix = bias.mix
    assert mix is not None
    assert (mix.long_weight, mix.without_long) == pytest.approx((1.0, 0.0))
    assert (mix.work_variation, mix.ks_step) == pytest.approx((0.0, 0.0))
