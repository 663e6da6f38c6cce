"""The core's clock never goes back, and time goes on after a jump as it did before."""

from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.core.config import SteadyClock


class Source:
    """A clock that says what it is told."""

    reading = 0.0

    def __call__(self) -> float:
        return self.reading


@given(st.floats(-1e6, 1e6), st.lists(st.floats(-1e5, 1e5)))
def test_it_advances_by_every_step_ahead_and_by_no_step_back(
    start: float, steps: list[float]
) -> None:
    source = Source()
    source.reading = start
    clock = SteadyClock(source)
    for step in steps:
        before, said = source.reading, clock()
        source.reading += step
        assert clock() == said + max(0.0, source.reading - before)


def test_without_jumps_it_says_what_its_source_says() -> None:
    source = Source()
    clock = SteadyClock(source)
    for reading in (0.5, 0.5, 2.0, 1e9):
        source.reading = reading
        assert clock() == reading


def test_after_a_jump_back_a_second_is_a_second() -> None:
    source = Source()
    source.reading = 10_000.0
    clock = SteadyClock(source)
    source.reading = 7.0
    assert clock() == 10_000
    source.reading = 8.0
    assert clock() == 10_001
