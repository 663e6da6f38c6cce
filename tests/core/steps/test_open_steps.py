"""Open steps, and those that wait behind them: one row of numbers without a gap."""

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.steps.step import MicroBatches, OpenStep, OpenSteps, StepState
from tests.support.samples import make_sample


def two_samples() -> MicroBatches:
    a, b = (Entry(make_sample(name), ticket, 0.0) for ticket, name in enumerate("ab"))
    return (((a,),), ((b,),))


def opened(count: int) -> OpenSteps:
    steps = OpenSteps()
    for _ in range(count):
        steps.add(two_samples(), 2, 0.0)
    return steps


def numbers(steps: list[OpenStep]) -> list[int]:
    return [step.number for step in steps]


def test_steps_are_numbered_in_the_order_of_their_plans() -> None:
    steps = opened(3)
    assert (list(steps), steps.next_number) == ([0, 1, 2], 3)
    assert (steps.committed, steps.last_opened, steps.in_flight) == (-1, 2, 6)
    assert numbers(steps.commit(1)) == [0, 1]
    assert (steps.committed, steps.last_opened, steps.in_flight) == (1, 2, 2)


def test_a_rewind_puts_committed_steps_before_the_open_ones_and_all_of_them_wait() -> None:
    steps = opened(4)
    steps.rewind(steps.commit(1))
    assert (list(steps), steps.waiting, steps.num_uncommitted) == ([], 4, 4)
    assert numbers(steps.uncommitted()) == [0, 1, 2, 3]
    assert (steps.committed, steps.last_opened) == (-1, -1)
    assert {step.state for step in steps.uncommitted()} == {StepState.PLANNED}


def test_steps_that_wait_are_opened_one_by_one_and_the_next_plan_waits_behind_them() -> None:
    steps = opened(2)
    steps.rewind(steps.commit(0))
    assert steps.open_waiting().number == 0
    assert steps.add(two_samples(), 2, 0.0).number == 2
    assert (list(steps), steps.waiting, steps.last_opened) == ([0], 2, 0)
    assert [steps.open_waiting().number, steps.open_waiting().number] == [1, 2]
    assert (list(steps), steps.waiting, steps.last_opened) == ([0, 1, 2], 0, 2)


def test_a_checkpoint_commits_open_steps_and_those_that_wait() -> None:
    steps = opened(4)
    steps.rewind(steps.commit(2))
    steps.open_waiting()
    assert numbers(steps.commit(1)) == [0, 1]
    assert (list(steps), numbers(steps.uncommitted())) == ([], [2, 3])


def test_the_first_open_step_for_other_ranks_is_unplanned_until_it_is_replaced() -> None:
    steps = opened(2)
    assert steps.unplanned(2) is None
    assert steps.unplanned(1) is steps[0]
    before = steps[0].digest
    first, second = two_samples()
    steps.replace(0, ((*first, *second),), 1)
    assert steps.unplanned(1) is steps[1]
    assert steps[0].digest != before


def test_steps_that_a_rewind_brings_back_are_unplanned_where_they_are_for_other_ranks() -> None:
    steps = opened(3)
    done = steps.commit(1)
    first, second = two_samples()
    steps.replace(2, ((*first, *second),), 1)
    assert steps.unplanned(1) is None
    steps.rewind(done)
    again = steps.open_waiting()
    assert steps.unplanned(1) is again


def test_what_an_earlier_process_had_open_is_open_as_far_as_there_is_room() -> None:
    earlier = opened(2)
    for room, is_open, waiting in ((4, [0, 1], 0), (1, [0], 1), (0, [], 2)):
        steps = OpenSteps()
        steps.restore(earlier.uncommitted(), earlier.next_number, {}, room=room)
        assert (list(steps), steps.waiting, steps.next_number) == (is_open, waiting, 2)
        assert steps.committed == -1
