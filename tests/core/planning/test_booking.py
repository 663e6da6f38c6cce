"""A plan is used: its samples leave the buffer, and whoever stays was passed over."""

from tests.support.core.cores import Bench
from tests.support.samples import make_sample


def test_each_sample_of_a_window_that_is_not_chosen_was_passed_over_the_oldest_too() -> None:
    bench = Bench(batch=2, window=4, capacity=8)
    bench.push(*[make_sample(f"{at}", tokens) for at, tokens in enumerate([100, 7, 50, 7])])
    bench.join()
    assert bench.trained(0) == {"1", "2"}, "as 7 7 has less than three quarters of a mean step"
    left = {entry.sample.sample_id: entry.skips for entry in bench.core._buffer.entries()}
    assert left == {"0": 1, "3": 1}
