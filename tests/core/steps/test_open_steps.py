"""Open steps, and those that wait behind them: one row of numbers without a gap."""

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.steps.step import MicroBatches, OpenSteps
from tests.support.samples import make_sample


def two_samples() -> MicroBatches:
    a, b = (Entry(make_sample(name), ticket, 0.0) for ticket, name in enumerate("ab"))
    return (((a,),), ((b,),))


def test_steps_that_a_rewind_brings_back_are_unplanned_where_they_are_for_other_ranks() -> None:
    steps = OpenSteps()
    for _ in range(3):
        steps.add(two_samples(), 2, 0.0)
    done = steps.commit(1)
    first, second = two_samples()
    steps.replace(2, ((*first, *second),), 1)
    assert steps.unplanned(1) is None
    steps.rewind(done)
    again = steps.open_waiting()
    assert steps.unplanned(1) is again
