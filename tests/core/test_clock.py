"""The core's clock never goes back, and time goes on after a jump as it did before."""

from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.core.config import SteadyClock


@given(st.floats(-1e6, 1e6), st.lists(st.floats(-1e5, 1e5)))
def test_it_advances_by_every_step_ahead_and_by_no_step_back(
    reading: float, steps: list[float]
) -> None:
    clock = SteadyClock(lambda: reading)
    for step in steps:
        before, now = reading, clock()
        reading += step
        assert clock() == now + max(0.0, reading - before)
