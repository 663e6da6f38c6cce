"""What counts as a micro-batch's time, and for which pass, on a clock that a test sets."""

import itertools
import time
from collections.abc import Iterator

import pytest

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.protocol.messages import StepTimes
from rollout_workers.timing import probes
from rollout_workers.timing.clocks import FORWARD, Mark
from rollout_workers.timing.probes import Collectives
from rollout_workers.timing.timing import AHEAD, GAPS, StepTimer


class Clock:
    """Seconds that a test lets pass. behind: what is computed is so late."""

    def __init__(self) -> None:
        self.now, self.behind, self.captures = 0.0, 0.0, False

    def mark(self) -> Mark:
        return None if self.captures else self.now

    def has_passed(self, mark: Mark) -> bool:
        return bool(mark <= self.now - self.behind)

    def seconds(self, start: Mark, stop: Mark) -> float:
        return float(stop - start)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def timer_on(clock: Clock, count: int = 2, cannot: str = "") -> StepTimer:
    return StepTimer(clock, 7, count, Collectives(None), cannot)


def computed(clock: Clock, timer: StepTimer, *seconds: float, backward: bool = True) -> None:
    """A loop over the step: each micro-batch takes so long, and then there is a wait for data."""
    for index, took in enumerate(seconds):
        timer.hand_out(index)
        clock.now += took
        if backward:
            timer.saw_backward()
        timer.asked(index)
        clock.now += 100


def reported(timer: StepTimer) -> dict[str, StepTimes]:
    timer.finish()
    times = timer.times()
    assert times is not None
    return {one.cost_key: one for one in times}


def test_micro_batches_that_were_asked_for_at_once_are_timed_one_by_one_where_they_are_named(
    clock: Clock,
) -> None:
    timer = timer_on(clock)
    computed(clock, timer, 0, 0, backward=False)
    for index, took in enumerate((3.0, 5.0)):
        with timer.timer("update", index):
            clock.now += took - 1
            timer.saw_backward()
            with timer.waiting():
                clock.now += 1
        clock.now += 50
    timer.finish()
    (found,) = reported(timer).values()
    assert (found.cost_key, found.busy_s, found.collective_s) == ("update", [3, 5], [1, 1])
    with pytest.raises(ConfigError, match="step 7 has 2 micro-batches, and no 2"):
        timer.timer("update", 2).__enter__()


def test_a_micro_batch_lasts_until_the_next_is_asked_for(clock: Clock) -> None:
    timer = timer_on(clock)
    computed(clock, timer, 3, 5)
    assert reported(timer) == {
        "update": StepTimes(step=7, cost_key="update", busy_s=[3, 5], collective_s=[0, 0])
    }


def test_epochs_are_added_up_and_a_pass_without_backward_is_another(clock: Clock) -> None:
    timer = timer_on(clock)
    computed(clock, timer, 1, 2, backward=False)
    computed(clock, timer, 3, 5)
    computed(clock, timer, 3, 6)
    times = reported(timer)
    assert times[FORWARD].busy_s == [1, 2]
    assert times["update"].busy_s == [6, 11]


def test_where_no_backward_is_seen_at_all_it_is_the_update(clock: Clock) -> None:
    timer = timer_on(clock)
    computed(clock, timer, 1, 2, backward=False)
    assert list(reported(timer)) == ["update"]


def test_an_optimizer_in_the_body_of_the_loop_is_no_part_of_the_last_micro_batch(
    clock: Clock,
) -> None:
    timer = timer_on(clock)
    for index in range(2):
        timer.hand_out(index)
        clock.now += 3
        timer.saw_backward()
        clock.now += 2  # what is logged of each, and an optimizer in the last
        with timer.waiting():
            clock.now += 4
        timer.asked(index)
    times = reported(timer)["update"]
    assert times.busy_s == [9, 3]
    assert times.collective_s == [4, 0]


def test_a_loop_that_never_asks_again_ends_with_its_last_backward_pass(clock: Clock) -> None:
    timer = timer_on(clock, 1)
    timer.hand_out(0)
    clock.now += 3
    timer.saw_backward()
    clock.now += 50
    assert reported(timer)["update"].busy_s == [3]


def test_waits_in_waits_count_once(clock: Clock) -> None:
    timer = timer_on(clock, 1)
    timer.hand_out(0)
    clock.now += 1
    timer.block()
    clock.now += 2
    with timer.waiting():
        clock.now += 4
    timer.unblock()
    clock.now += 8
    timer.asked(0)
    times = reported(timer)["update"]
    assert (times.busy_s, times.collective_s) == ([15], [6])


def test_a_wait_that_an_error_left_open_does_not_reach_into_the_next_micro_batch(
    clock: Clock,
) -> None:
    timer = timer_on(clock)
    timer.hand_out(0)
    timer.block()
    clock.now += 2
    timer.asked(0)
    timer.hand_out(1)
    timer.unblock()
    clock.now += 3
    timer.block()
    clock.now += 1
    timer.unblock()
    timer.asked(1)
    assert reported(timer)["update"].collective_s == [0, 1]


def test_a_timer_round_an_iteration_names_its_pass(clock: Clock) -> None:
    timer = timer_on(clock)
    with timer.timer("log-prob"):
        clock.now += 100  # the first one is waited for
        computed(clock, timer, 1, 2, backward=False)
        clock.now -= 100
    computed(clock, timer, 3, 5)
    times = reported(timer)
    assert times["log-prob"].busy_s == [1, 2]
    assert times["update"].busy_s == [3, 5]


def test_in_a_micro_batch_only_what_is_timed_counts(clock: Clock) -> None:
    timer = timer_on(clock)
    for index in range(2):
        timer.hand_out(index)
        clock.now += 50
        for key, took in (("critic", 1), ("update", 2), ("critic", 1)):
            with timer.timer(key):
                clock.now += took
            clock.now += 50
        timer.asked(index)
    times = reported(timer)
    assert {key: one.busy_s for key, one in times.items()} == {"critic": [2, 2], "update": [2, 2]}


@pytest.mark.parametrize("key", ["", "x" * 1000])
def test_a_key_that_is_no_name_is_refused_where_it_is_given(key: str, clock: Clock) -> None:
    with pytest.raises(ConfigError, match="cost_key"), timer_on(clock).timer(key):
        pass


def test_what_is_computed_for_a_list_counts_for_the_first(clock: Clock) -> None:
    timer = timer_on(clock, 3)
    computed(clock, timer, 0, 0, 0, backward=False)
    with timer.timer("update"):
        clock.now += 6
        with timer.waiting():
            clock.now += 1
    times = reported(timer)["update"]
    assert (times.busy_s, times.collective_s) == ([7, 0, 0], [1, 0, 0])


@pytest.mark.parametrize("count", [1, 3])
def test_micro_batches_that_are_computed_after_they_are_asked_for_have_a_reason(
    count: int, clock: Clock
) -> None:
    timer = timer_on(clock, count)
    computed(clock, timer, *itertools.repeat(1e-9, count), backward=False)
    for _ in range(count):
        clock.now += 2
        timer.saw_backward()
    times = reported(timer)["update"]
    assert (times.collective_s, times.why) == (None, AHEAD)
    assert not any(times.busy_s)


def test_how_long_it_takes_to_commit_is_no_part_of_a_step(clock: Clock) -> None:
    timer, before = timer_on(clock), time.perf_counter()
    computed(clock, timer, 1e-9, 1e-9, backward=False)
    timer.finish(before)
    times = timer.times()
    assert times is not None
    assert times[0].why == ""


def test_what_is_done_between_the_last_backward_pass_and_the_commit_may_take_long(
    clock: Clock,
) -> None:
    """An evaluation, or a checkpoint."""
    timer = timer_on(clock)
    computed(clock, timer, 3, 5)
    timer.finish(time.perf_counter() + 1000)
    times = timer.times()
    assert times is not None
    assert (times[0].busy_s, times[0].collective_s, times[0].why) == ([3, 5], [0, 0], "")


def test_each_epoch_counts_once_towards_the_share_of_the_step(clock: Clock) -> None:
    timer = timer_on(clock, 1)
    for _ in range(2):
        computed(clock, timer, 4, backward=False)
    timer.finish(time.perf_counter() + 100)
    times = timer.times()
    assert times is not None
    assert times[0].why == AHEAD, "8 s of 100"


def test_unknown_waits_have_a_reason_unless_the_trainer_names_its_waits(clock: Clock) -> None:
    timer = timer_on(clock, cannot="nobody looks")
    computed(clock, timer, 3, 5)
    times = reported(timer)["update"]
    assert (times.busy_s, times.collective_s, times.why) == ([3, 5], None, "nobody looks")

    timer = timer_on(clock, cannot="nobody looks")
    timer.hand_out(0)
    with timer.waiting():
        clock.now += 3
    timer.asked(0)
    computed(clock, timer, 3, 5)
    assert reported(timer)["update"].why == ""


class Group:
    """A process group that counts its collectives."""

    group_desc, count = "default_pg", 0

    def _get_sequence_number_for_group(self) -> int:
        return self.count


def test_collectives_in_micro_batches_that_nobody_times_are_named(clock: Clock) -> None:
    group = Group()
    timer = timer_on(clock)
    timer._collectives.groups = [group]  # type: ignore[list-item]
    for key in ("nobody waits", "before a wait", "in a wait", "afterwards"):
        with timer.timer(key, 0):
            clock.now += 3
            group.count += key == "before a wait"
            if key in ("before a wait", "in a wait"):
                with timer.waiting():
                    group.count += 1
            group.count += key == "nobody waits"
        group.count += 1
    times = reported(timer)
    for key in ("nobody waits", "before a wait"):
        assert "collectives of default_pg in micro-batches are not timed" in times[key].why
        assert times[key].collective_s is None
    assert times["in a wait"].why == times["afterwards"].why == ""


def test_what_is_captured_into_a_graph_has_no_times(clock: Clock) -> None:
    timer = timer_on(clock, 1)
    timer.hand_out(0)
    clock.captures = True
    with timer.waiting():
        pass
    clock.captures = False
    clock.now += 3
    timer.asked(0)
    times = reported(timer)["update"]
    assert (times.collective_s, times.why) == (None, GAPS)
    assert not any(times.busy_s)


def test_nothing_is_reported_before_the_clock_has_come_to_it(clock: Clock) -> None:
    clock.behind = 200
    timer = timer_on(clock, 1)
    computed(clock, timer, 3)
    timer.finish()
    assert timer.times() is None
    clock.now += 200
    times = timer.times()
    assert times is not None
    assert times[0].busy_s == [3]


@pytest.fixture(autouse=True)
def _nobody_listens_afterwards() -> Iterator[None]:
    yield
    probes.listen(None)


def listener() -> object:
    return probes.listener


def test_probes_report_from_the_first_micro_batch_to_the_commit(clock: Clock) -> None:
    timer = timer_on(clock, 1)
    assert listener() is None
    timer.hand_out(0)
    assert listener() is timer
    clock.now += 1
    timer.asked(0)
    timer.finish()
    assert listener() is None
