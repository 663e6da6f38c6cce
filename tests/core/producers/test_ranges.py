"""Ranges are a set, and few where numbers are many."""

from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.core.admission.producers import Ranges

_number = st.integers(0, 30)
_span = st.tuples(_number, st.integers(1, 6)).map(lambda pair: range(pair[0], sum(pair)))


def runs(numbers: set[int]) -> int:
    """How many ranges these numbers make at least."""
    return sum(number - 1 not in numbers for number in numbers)


@given(st.lists(_span | _number, max_size=12))
def test_ranges_hold_what_a_set_would_in_as_few_ranges_as_can_be(steps: list[range | int]) -> None:
    ranges, numbers = Ranges(), set[int]()
    for step in steps:
        if isinstance(step, range):
            ranges.add(step.start, step.stop)
            numbers |= {*step}
        else:
            ranges.remove_below(step)
            numbers = {number for number in numbers if number >= step}
        assert [number in ranges for number in range(-1, 40)] == [
            number in numbers for number in range(-1, 40)
        ]
        assert len(ranges) == runs(numbers)
