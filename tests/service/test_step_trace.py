"""What the step_trace is told, as it is remembered and as it is read again from its record."""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rollout_dispatcher.core import effects as e
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.measuring.times import RankTimes
from rollout_dispatcher.core.planning.trigger import Trigger
from rollout_dispatcher.core.steps.step import OpenStep
from rollout_dispatcher.record.recording import Recording, load_recording
from rollout_dispatcher.record.writer import RecordWriter
from rollout_dispatcher.service.config.serve import ServeConfig, core_config
from rollout_dispatcher.service.step_trace import MAX_STEPS, StepTrace
from rollout_dispatcher.simulate.recorded import excess_of
from rollout_dispatcher.simulate.replay import Setting
from rollout_planner.cost import Quadratic
from rollout_planner.planner import plan
from rollout_planner.types import Plan, PlanConfig, Strategy, Window
from tests.support.core.cores import Bench
from tests.support.samples import make_sample

RANKS, BATCH = 2, 4
CONFIG = ServeConfig(dp_size=RANKS, global_batch_size=BATCH, micro_batch_size=1)


class Told:
    """A step_trace, a clock that counts, and samples to plan."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        header = {"run": "r", "process": "p", "release": "1", "unix": 100.0}
        config = {"config": CONFIG.model_dump(mode="json")}
        self.writer = RecordWriter(folder, 2**20, header | config)
        self.now = 0.0
        self.step_trace = StepTrace(lambda: self.now, self.writer)
        self._tickets = itertools.count()

    def plan(
        self, number: int, generation: int = 1, staleness: tuple[int, ...] = ()
    ) -> tuple[Plan, tuple[Entry, ...]]:
        sizes = [9, 5, 7, 3]
        entries = tuple(
            Entry(make_sample(f"s{size}", size), next(self._tickets), self.now) for size in sizes
        )
        self.step_trace.accepted(e.SamplesAccepted(entries))
        none = np.zeros(BATCH, np.int64)
        window = Window(np.array(sizes), none, none - 1, none > 0)
        made = plan(window, CONFIG.plan_config(), BATCH)
        wanted = e.PlanRequested(entries, window, BATCH, RANKS, Trigger.WINDOW_FULL, trial=False)
        report = e.StepPlanned(
            number, made, Trigger.WINDOW_FULL, waits=np.zeros(BATCH), skips=none,
            staleness=staleness, tokens=window.tokens[made.chosen], nbytes=0,
            entries=[entries[at] for at in made.chosen],
        )  # fmt: skip
        self.step_trace.planned(wanted, [report], self.now, generation)
        return made, entries

    def read(self) -> Recording:
        self.step_trace.flush()
        self.writer.close(10)
        return load_recording(self.folder)


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path / "record")


def test_times_that_ranks_measured_are_on_record_once_all_have_told(told: Told) -> None:
    made, _ = told.plan(0)
    told.step_trace.measured(1, RankTimes(0, "update", [3.0, 4.0], [0.5, 1.0]))
    told.step_trace.measured(0, RankTimes(0, "update", [3.0, 4.0], [0.0, 0.0]))
    told.step_trace.measured(0, RankTimes(0, "log-prob", [1.0, 1.0], None, "gloo"))
    told.step_trace.measured(
        0, RankTimes(7, "update", [1.0, 1.0], None)
    )  # of no step that is known
    told.step_trace.measured(2, RankTimes(0, "update", [1.0, 1.0], None))  # nor of any rank
    (step,) = told.read().steps.values()
    compute = step.measured["update"].compute(RANKS)
    assert compute is not None
    assert compute.tolist() == [[3.0, 4.0], [2.5, 3.0]]
    assert step.excess == pytest.approx(made.excess)
    assert step.lower_bound == pytest.approx(made.lower_bound, rel=1e-6)


def test_what_was_measured_has_one_excess_whatever_was_planned_for_a_pipeline(told: Told) -> None:
    told.plan(0)
    for rank, busy in enumerate(([3.0, 4.0], [2.0, 1.0])):
        told.step_trace.measured(rank, RankTimes(0, "update", busy, [0.0, 0.0]))
    piped = CONFIG.model_copy(update={"pipeline_stages": 4})
    recording = told.read()
    (step,) = recording.steps.values()
    setting = Setting(Strategy.WINDOW, 1.0, piped.plan_config(), core_config(piped))
    assert excess_of(step, setting) == pytest.approx(7 / 5 - 1)


def test_the_first_report_of_a_rank_counts_and_is_read_though_others_never_report(
    told: Told,
) -> None:
    told.plan(0)
    for again in range(3):
        times = RankTimes(0, "update", [3.0 + again, 4.0], None, "gloo")
        told.step_trace.measured(1, times)
        told.step_trace.flush()
    for number in range(1, MAX_STEPS + 1):
        told.plan(number)
    assert len(told.step_trace._steps) == MAX_STEPS
    found = told.read().steps["r", 0].measured["update"]
    assert (found.busy, found.collective, found.why) == ({1: [3.0, 4.0]}, {1: None}, "gloo")
    assert found.compute(RANKS) is None


def test_times_of_a_delivery_that_is_void_do_not_count_for_the_next(told: Told) -> None:
    told.plan(0)
    told.step_trace.measured(1, RankTimes(0, "update", [9.0, 9.0], None))
    told.step_trace.redelivered(e.Redelivered(0, "rewind"))
    told.step_trace.measured(1, RankTimes(0, "update", [3.0, 4.0], None))
    assert told.read().steps["r", 0].measured["update"].busy == {1: [3.0, 4.0]}


def test_a_step_that_is_planned_and_trained_again_is_as_it_was_last(told: Told) -> None:
    made, entries = told.plan(0)
    told.step_trace.released(0)
    told.now = 5.0
    told.step_trace.redelivered(e.Redelivered(0, "new-size"))
    alone = PlanConfig(1, BATCH, Quadratic(), micro_batch_size=2)
    none = np.zeros(BATCH, np.int64)
    again = plan(Window(np.array([9, 5, 7, 3]), none, none - 1, none > 0), alone, BATCH)
    parts = tuple(
        tuple(tuple(entries[at] for at in part.tolist()) for part in rank)
        for rank in again.micro_batches
    )
    told.step_trace.replanned(OpenStep(0, parts, "digest", 0.0), again, told.now, 2)
    for tell in released_to_committed(told):
        told.now += 1
        tell()
    (step,) = told.read().trained()
    assert (step.attempt, step.generation, step.dp_size) == (2, 2, 1)
    assert (step.trigger, step.at, step.eligible) == ("window-full", 100.0, BATCH)
    assert (step.released, step.taken, step.done) == (106.0, [107.0], [108.0])
    assert step.committed == 109.0
    assert sorted(step.tickets) == [0, 1, 2, 3]
    assert made.cost.shape != step.cost.shape


def released_to_committed(told: Told) -> list[Callable[[], None]]:
    step_trace = told.step_trace
    return [
        lambda: step_trace.released(0),
        lambda: step_trace.taken(0, 0, told.now),
        lambda: step_trace.rank_commits(0, 0, told.now),
        lambda: step_trace.committed(0),
    ]


def test_a_step_of_an_earlier_process_is_committed_all_the_same(told: Told) -> None:
    told.plan(0)
    told.step_trace.committed(0)
    other = StepTrace(lambda: 3.0, told.writer)
    other.released(0)
    other.rank_commits(0, 0, 3.0)
    other.committed(0)
    (step,) = told.read().trained()
    assert step.committed == 103.0


def test_samples_of_several_pushes_are_on_record_in_order(told: Told) -> None:
    entries = [
        Entry(make_sample(f"s{at}", 3 + at, policy_version=at % 2), at, 0.5) for at in range(4)
    ]
    told.step_trace.accepted(e.SamplesAccepted(entries[:2]))
    told.step_trace.accepted(e.SamplesAccepted(entries[2:]))
    told.step_trace.record_state(Bench().core.statistics)
    found = told.read().samples.values()
    assert [(it.ticket, it.tokens, it.version, it.group) for it in found] == [
        (at, 3 + at, at % 2, None) for at in range(4)
    ]
    assert {it.at for it in found} == {100.5}


@pytest.mark.parametrize("staleness", [(), (2, 2, 2, 2), (0, 1, 0, 3), (1, 1)])
def test_staleness_is_on_record_of_all_samples_or_of_those_of_which_it_is_known(
    told: Told, staleness: tuple[int, ...]
) -> None:
    told.plan(0, staleness=staleness)
    (step,) = told.read().steps.values()
    assert tuple(step.staleness) == staleness
    assert sorted(step.tickets) == [0, 1, 2, 3]
