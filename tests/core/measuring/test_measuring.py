"""A pass over a step is measured once all DP ranks have reported it, and never before."""

import numpy as np
import pytest

from rollout_dispatcher.core.effects import StepMeasured
from rollout_dispatcher.core.measuring.measuring import (
    FORGET_AFTER,
    KEPT_STEPS,
    MAX_COST_KEYS,
    MeasuredStatistics,
)
from rollout_dispatcher.core.measuring.times import Pass, RankTimes, Split, Unmeasured
from rollout_dispatcher.core.steps.rank_state import RankHello
from rollout_planner.types import Sync, imbalance
from tests.support.core.cores import Bench


class Timed(Bench):
    """A bench whose two ranks train steps of one micro-batch, and report what the test says."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.join()
        self.step = -1

    def next_step(self) -> int:
        self.push_plain(4)
        self.hungry()
        self.pass_time(2.0)
        self.step += 1
        self.train(self.step)
        return self.step

    def say(
        self,
        dp_rank: int,
        busy: float,
        inside: float | None,
        *,
        step: int | None = None,
        key: str = "update",
        count: int = 1,
    ) -> StepMeasured | None:
        """A rank reports; what is measured with that, if anything is."""
        start = len(self.log)
        collective = None if inside is None else [inside] * count
        number = self.step if step is None else step
        times = RankTimes(
            number, key, [busy] * count, collective, "" if collective else "gloo has no hook"
        )
        self.perform(self.core.step_times(dp_rank, times))
        found = [effect for effect in self.log[start:] if isinstance(effect, StepMeasured)]
        return found[0] if found else None

    def measure(self, slow: float = 1.4, key: str = "update") -> StepMeasured | None:
        """Rank 1 is slower by that factor; rank 0 waits for it; bytes take 0.1 s."""
        self.say(0, slow + 0.1, slow - 1 + 0.1, key=key)
        return self.say(1, slow + 0.1, 0.1, key=key)

    @property
    def seen(self) -> MeasuredStatistics:
        return self.core.measured


def unmeasured(bench: Timed) -> dict[Unmeasured, int]:
    return {reason: count for reason, count in bench.seen.unmeasured.items() if count}


def test_waits_are_separated_from_what_was_computed() -> None:
    bench = Timed()
    bench.next_step()
    found = bench.measure()
    assert found is not None
    assert found.leads
    assert np.allclose(found.split.compute, [[1.0], [1.4]])
    assert found.lost == pytest.approx(1 - 1.2 / 1.4)
    assert found.imbalance == pytest.approx(1.4 / 1.2 - 1)
    assert found.imbalance == pytest.approx(imbalance(found.split.compute)), "as of plans"
    assert bench.seen.why == ""
    assert np.allclose(bench.seen.totals["update"], [[1.0, 1.4], [0.4, 0.0]])
    assert bench.seen.transport == {"update": pytest.approx(0.1)}


def test_where_ranks_meet_once_a_step_only_their_sums_count() -> None:
    known = Pass()
    for dp_rank, busy in enumerate(([1.0, 3.0], [3.0, 1.0])):
        known.report(dp_rank, busy, [0.0, 0.0])
    split = known.split(2)
    assert isinstance(split, Split)
    lost = {sync: StepMeasured(0, "update", True, sync, split, None).lost for sync in Sync}
    assert lost == {Sync.STEP: 0.0, Sync.MICRO_STEP: pytest.approx(1 - 4 / 6)}


def test_ranks_that_take_as_long_have_no_imbalance_below_0() -> None:
    for length in range(1000, 1200):
        known = Pass()
        for dp_rank in range(3):
            known.report(dp_rank, [1.37e-3 * length], [0.0])
        split = known.split(3)
        assert isinstance(split, Split)
        for sync in Sync:
            found = StepMeasured(0, "update", True, sync, split, None)
            assert min(found.imbalance, found.excess) >= 0


def test_nothing_is_measured_before_every_rank_has_reported_and_the_missing_are_named() -> None:
    bench = Timed()
    assert bench.seen.why == "no step is committed yet"
    bench.next_step()
    assert bench.seen.why == "no DP rank has reported what its steps took"
    assert bench.say(0, 1.0, 0.0) is None
    assert bench.say(0, 2.0, 0.0) is None, "its first report counts, once"
    assert bench.seen.why == "step 0, update: DP rank 1 has not reported yet"
    assert bench.seen.last is None
    found = bench.say(1, 1.0, 0.0)
    assert found is not None
    assert found.split.compute.tolist() == [[1.0], [1.0]]
    assert bench.say(1, 1.0, 0.0) is None
    assert (bench.seen.steps, unmeasured(bench)) == (1, {})


def test_a_rank_may_report_before_others_have_committed() -> None:
    bench = Timed()
    bench.push_plain(4)
    bench.hungry()
    bench.pass_time(2.0)
    bench.step = 0
    bench.hold(0)
    bench.perform(bench.core.commit(0, 0, bench.now))
    assert bench.say(0, 1.0, 0.0) is None
    bench.perform(bench.core.commit(1, 0, bench.now))
    assert bench.say(1, 1.0, 0.0) is not None


def test_what_cannot_be_separated_is_unmeasured_and_says_why() -> None:
    bench = Timed()
    bench.next_step()
    assert bench.say(0, 1.0, 0.0) is None
    assert bench.say(1, 1.0, None) is None
    assert unmeasured(bench) == {Unmeasured.NOT_SEPARATED: 1}
    assert bench.seen.why == (
        "step 0, update: DP rank 1 cannot separate time inside collectives: gloo has no hook"
    )


@pytest.mark.parametrize(
    ("busy", "inside", "count", "words"),
    [
        (1.0, 0.5, 2, "timed 2 micro-batches of 1"),
        (1.0, 1.5, 1, "was inside collectives for longer than it took at all"),
        (0.0, 0.0, 1, "the DP ranks report no time outside collectives"),
    ],
)
def test_times_that_cannot_be_are_unmeasured(
    busy: float, inside: float, count: int, words: str
) -> None:
    bench = Timed()
    bench.next_step()
    for rank in (0, 1):
        assert bench.say(rank, busy, inside, count=count) is None
    assert unmeasured(bench) == {Unmeasured.INCONSISTENT: 1}
    assert words in bench.seen.why
    bench.next_step()
    assert bench.measure() is not None, "one wrong step harms no other"


def test_clocks_may_differ_a_little() -> None:
    bench = Timed()
    bench.next_step()
    bench.say(0, 1.0, 1.0005)
    found = bench.say(1, 1.0, 0.0)
    assert found is not None
    assert found.split.compute.tolist() == [[0.0], [1.0]]


def test_steps_that_are_not_known_are_counted_once_for_all_ranks() -> None:
    bench = Timed()
    bench.next_step()
    for step in (7, 2**53 - 1):
        for rank in (0, 1):
            assert bench.say(rank, 1.0, 0.0, step=step) is None
    assert unmeasured(bench) == {Unmeasured.UNKNOWN_STEP: 2}


def test_what_is_held_of_steps_and_passes_is_bounded() -> None:
    bench = Timed()
    measuring = bench.core._parts.measuring
    for turn in range(40):
        bench.next_step()
        for key in range(2 * MAX_COST_KEYS):
            bench.say(turn % 2, 1.0, 0.0, key=f"k{key}")
        assert len(measuring._steps) <= KEPT_STEPS + bench.core.config.max_open_steps
    passes = [len(timed.passes) for timed in measuring._steps.values()]
    assert set(passes) == {MAX_COST_KEYS}
    assert unmeasured(bench)[Unmeasured.TOO_MANY_KEYS] == 40 * MAX_COST_KEYS
    bench.next_step()
    assert bench.measure() is not None, "reports of training always count"
    given_up = 41 - len(passes)
    assert unmeasured(bench)[Unmeasured.INCOMPLETE] == given_up * MAX_COST_KEYS


def test_passes_that_one_rank_makes_up_take_nothing_from_those_of_all() -> None:
    bench = Timed()
    for turn in range(3):
        bench.next_step()
        for key in range(4 * MAX_COST_KEYS):
            bench.say(0, 1.0, 0.0, key=f"made up {turn} {key}")
        for key in range(2 * MAX_COST_KEYS):
            bench.say(1, 1.0, 0.0, key=f"k{key}")
    assert bench.seen.totals == {}
    bench = Timed()
    bench.next_step()
    for key in range(2 * MAX_COST_KEYS):
        bench.say(1, 1.0, 0.0, key=f"made up {key}")
    assert bench.measure(key="update") is not None
    assert bench.say(0, 1.0, 0.0, key="log-prob") is None
    (timed,) = bench.core._parts.measuring._steps.values()
    assert 0 in timed.passes["log-prob"].busy, "the report of the other rank counts"


def test_steps_that_nobody_reports_are_counted_and_old_speeds_forgotten() -> None:
    bench = Timed()
    for _ in range(5):
        bench.next_step()
        bench.measure()
    assert np.allclose(bench.seen.slowness, [1.0, 1.4])
    silent = FORGET_AFTER + KEPT_STEPS + bench.core.config.max_open_steps
    for _ in range(silent):
        bench.next_step()
    assert unmeasured(bench) == {Unmeasured.NOT_REPORTED: FORGET_AFTER}
    assert np.isnan(bench.seen.slowness).all()
    assert bench.seen.why.startswith("no DP rank has reported what step ")


def test_a_new_generation_begins_anew_and_late_words_of_the_old_one_harm_nobody() -> None:
    bench = Timed()
    bench.next_step()
    bench.measure()
    bench.next_step()
    bench.say(0, 1.0, 0.0)
    totals = bench.seen.totals["update"]
    bench.join()
    bench.next_step()
    assert unmeasured(bench) == {Unmeasured.GENERATION: 1}
    assert bench.seen.last is None
    assert bench.seen.why == "no DP rank has reported what its steps took"
    assert bench.say(1, 1.0, 0.0, step=1) is None, "it is of the generation before"
    assert unmeasured(bench)[Unmeasured.UNKNOWN_STEP] == 1
    assert bench.measure() is not None
    assert (bench.seen.totals["update"] > totals).any(), "counters go on"


def test_a_new_dp_size_changes_the_shape_of_everything() -> None:
    bench = Timed(check_size=lambda _: None)
    bench.next_step()
    bench.measure()
    bench.perform(bench.core.join(RankHello("only", 0, 1, None), bench.now))
    assert bench.seen.totals["update"].shape == (2, 2), "nothing has happened since"
    bench.perform(bench.core.step_times(0, RankTimes(0, "update", [1.0], [0.0])))
    assert bench.seen.totals["update"].shape == (2, 1)
    assert bench.seen.slowness.shape == (1,)


def test_a_step_is_judged_by_training_or_else_by_what_takes_longest() -> None:
    bench = Timed()
    bench.next_step()
    assert bench.measure(key="log-prob") is not None
    assert bench.measure(3.0, key="critic") is not None
    assert bench.seen.last is None, "which passes there are is not known in the first step"
    bench.next_step()
    slower, faster = bench.measure(3.0, key="critic"), bench.measure(key="log-prob")
    assert slower is not None
    assert faster is not None
    assert (slower.leads, faster.leads) == (True, False)
    found = bench.measure()
    assert found is not None
    assert found.leads
    bench.next_step()
    other = bench.measure(key="critic")
    assert other is not None
    assert not other.leads


def test_which_pass_judges_a_step_is_found_anew_in_each_generation() -> None:
    """Trainers that were started again may time what they had left to the stream before."""
    bench = Timed()
    bench.next_step()
    assert bench.measure() is not None
    bench.join()
    bench.next_step()
    assert bench.measure(key="actor") is not None
    bench.next_step()
    found = bench.measure(key="actor")
    assert found is not None
    assert found.leads
    assert bench.seen.last is found


def test_of_a_step_that_an_earlier_process_planned_the_loss_is_known_and_no_speed() -> None:
    bench = Timed()
    for _ in range(4):
        bench.next_step()
        bench.core._parts.measuring._steps[bench.step].planned = None
        assert bench.measure() is not None
    assert np.isnan(bench.seen.slowness).all()
    assert bench.seen.cost.loss is None


def test_the_snapshot_is_json_for_people() -> None:
    bench = Timed()
    for _ in range(4):
        bench.next_step()
        bench.measure()
    found = bench.seen.as_json()
    assert found["why_not"] == ""
    assert found["measured_steps"] == 4
    assert found["last_step"]["lost_share"] == pytest.approx(1 - 1.2 / 1.4, abs=1e-6)
    assert found["last_step"]["ranks"][0] == {
        "dp_rank": 0, "compute_s": 1.0, "wait_s": 0.4, "collective_s": 0.5, "slowness": 1.0,
    }  # fmt: skip
