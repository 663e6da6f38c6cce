"""A fit is used once it has predicted better, no sooner; the loss of a wrong cost is reported."""

import numpy as np
import pytest

from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import CostChanged, Effect, PlanRequested, SpeedsChanged
from rollout_dispatcher.core.facts import CostFitted, SpeedsMeasured
from rollout_dispatcher.core.measuring.cost_in_use import CostConfig, CostInUse, Timing
from rollout_dispatcher.core.measuring.times import RankTimes
from rollout_dispatcher.core.steps.rank_state import RankHello
from rollout_planner.cost import Quadratic
from rollout_planner.planner import plan
from rollout_planner.types import (
    FloatArray,
    Grouping,
    IntArray,
    Layout,
    PlanConfig,
    Sync,
    straggler_excess,
)
from tests.support.core.cores import Bench
from tests.support.samples import make_sample
from tests.support.windows import window_of

DEFAULT = Quadratic()
#: Seconds: of a model whose linear part is three times the default prior's.
TRUTH = Quadratic(1e-9, 1e-9 * 70_000, 0, 0.02)
BATCH, RANKS, BUDGET, NOISE = 64, 4, 65536, 0.05


class Trainer:
    """Plans steps with the cost in use, which then take what `truth` says, to a noise."""

    def __init__(self, cost: CostInUse, truth: Quadratic, **options: object) -> None:
        self.cost, self.truth, self.rng = cost, truth, np.random.default_rng(0)
        self.config = PlanConfig(
            RANKS, BATCH, DEFAULT, micro_batch_tokens=BUDGET, grouping=Grouping.IGNORE,
            **options,  # type: ignore[arg-type]
        )  # fmt: skip
        self.promised, self.true = list[float](), list[float]()
        self.news = list[CostChanged]()

    def train(self, steps: int, *, whole: bool = False, waited: bool = False) -> "Trainer":
        """whole: ranks time all micro-batches of a step at once. waited: with their waits."""
        for number in range(steps):
            drawn = self.rng.lognormal(8.5, 1.0, BATCH)
            window = window_of(np.clip(drawn, 16, BUDGET).astype(np.int64))
            found = plan(window, self.config, BATCH)
            tokens = window.tokens[found.chosen]
            took = self.took(tokens, found.counts)
            self.promised.append(found.excess)
            self.true.append(straggler_excess(took, self.config.sync))
            timed = took * np.exp(NOISE * self.rng.standard_normal(took.shape))
            if whole:
                timed = np.concatenate(
                    (timed.sum(axis=1, keepdims=True), np.zeros_like(timed[:, 1:])), axis=1
                )
            if waited:
                timed = np.repeat(timed.max(axis=0, keepdims=True), RANKS, axis=0)
            step = Timing(
                self.cost.work(tokens, found.counts),
                found.cost,
                timed,
                np.ones(RANKS),
                np.ones(RANKS),
                self.config.sync,
                waited,
            )
            news = self.cost.measured(step, number + 1)
            self.news += [] if news is None else [news]
        return self

    def took(self, tokens: IntArray, counts: IntArray) -> FloatArray:
        which = np.repeat(np.arange(counts.size), counts.ravel())
        s = tokens
        if self.config.layout is Layout.PADDED:
            longest = np.zeros(counts.size, np.int64)
            np.maximum.at(longest, which, tokens)
            s = longest[which]
        sums = np.bincount(which, weights=self.truth(s), minlength=counts.size)
        return sums.reshape(counts.shape) + self.truth.d * (counts > 0)


def test_a_cost_that_is_right_stays_in_use_and_loses_nothing() -> None:
    cost = CostInUse(CostConfig(DEFAULT, adapts=True))
    trainer = Trainer(cost, Quadratic(1e-9, 1e-9 * DEFAULT.b)).train(60)
    assert (trainer.news, cost.fitted_cost) == ([], None)
    assert cost.statistics().loss == 0
    assert cost.statistics().warning == ""


@pytest.mark.parametrize(
    "options",
    [{}, {"layout": Layout.PADDED}, {"sync": Sync.STEP}],
    ids=["packed", "padded", "step"],
)
def test_a_wrong_one_gives_way_to_what_was_measured(options: dict[str, object]) -> None:
    padded = options.get("layout") is Layout.PADDED
    cost = CostInUse(CostConfig(DEFAULT, adapts=True, padded=padded))
    trainer = Trainer(cost, TRUTH, **options).train(40)
    used = cost.fitted_cost
    assert used is not None
    assert [news.fitted.version for news in trainer.news] == [*range(1, len(trainer.news) + 1)]
    assert used.b / used.a == pytest.approx(TRUTH.b / TRUTH.a, rel=0.25)


def test_ranks_that_time_a_step_as_a_whole_teach_as_well() -> None:
    cost = CostInUse(CostConfig(DEFAULT, adapts=True))
    Trainer(cost, TRUTH, sync=Sync.STEP).train(120, whole=True)
    used = cost.fitted_cost
    assert used is not None
    assert abs(np.log(used.b / used.a / 70_000)) < abs(np.log(DEFAULT.b / 70_000)) / 2


@pytest.mark.parametrize("options", [{}, {"layout": Layout.PADDED}], ids=["packed", "padded"])
def test_waits_that_cannot_be_separated_are_those_for_the_slowest_rank(
    options: dict[str, object],
) -> None:
    """As under FSDP2 and TP without hooks of collectives."""
    padded = options.get("layout") is Layout.PADDED
    cost = CostInUse(CostConfig(DEFAULT, adapts=True, padded=padded))
    Trainer(cost, TRUTH, **options).train(60, waited=True)
    used = cost.fitted_cost
    assert used is not None
    assert used.b / used.a == pytest.approx(TRUTH.b / TRUTH.a, rel=0.3)
    right = CostInUse(CostConfig(DEFAULT, adapts=True, padded=padded))
    Trainer(right, Quadratic(1e-9, 1e-9 * DEFAULT.b), **options).train(60, waited=True)
    stays = right.fitted_cost or DEFAULT
    assert stays.b / stays.a == pytest.approx(DEFAULT.b, rel=0.15)  # the slowest of noise is longer


def test_steps_of_which_no_time_is_known_leave_nothing_behind() -> None:
    cost = CostInUse(CostConfig(DEFAULT, adapts=True))
    nothing = np.zeros((RANKS, 1))
    work = cost.work(np.arange(1, 1 + RANKS), np.ones((RANKS, 1), np.int64))
    for step in range(20):
        timing = Timing(
            work, np.ones((RANKS, 1)), nothing, np.ones(RANKS), np.ones(RANKS), Sync.MICRO_STEP,
            waited=step % 2 == 0,
        )  # fmt: skip
        assert cost.measured(timing, step + 1) is None
    assert cost._unseen == []


def test_costs_keep_their_unit_so_that_sums_of_them_mean_the_same_as_before() -> None:
    cost = CostInUse(CostConfig(DEFAULT, adapts=True))
    Trainer(cost, TRUTH).train(40)
    used, lengths = cost.fitted_cost, np.array([2000, 5000, 9000])
    assert used is not None
    assert used(lengths).sum() == pytest.approx(DEFAULT(lengths).sum(), rel=0.5)


def test_a_cost_that_was_asked_for_stays_and_its_loss_is_reported() -> None:
    cost = CostInUse(CostConfig(DEFAULT))
    trainer = Trainer(cost, Quadratic(1e-9, 2e-6)).train(60)
    assert (trainer.news, cost.fitted_cost) == ([], None)
    at = cost.statistics()
    promised, true = (1 + np.mean(each[-16:]) for each in (trainer.promised, trainer.true))
    assert at.loss == pytest.approx(1 - promised / true, rel=0.1)
    assert at.loss is not None
    assert f"loses {at.loss:.1%} besides" in at.warning
    assert at.newest is not None
    assert at.newest.b / at.newest.a == pytest.approx(2_000, rel=0.25)


FITTED = CostFitted(3, Quadratic(1, 70_000, 0, 9), 0.05, 12)


def test_the_next_process_goes_on_with_what_was_in_use_unless_another_is_asked_for_now() -> None:
    cost = CostInUse(CostConfig(DEFAULT, adapts=True))
    cost.restore(FITTED, None)
    assert cost.fitted_cost == FITTED.cost
    explicit = CostInUse(CostConfig(DEFAULT))
    explicit.restore(FITTED, None)
    assert explicit.fitted_cost is None


class Timed(Bench):
    """Two ranks that report what the squares of their samples' lengths take.

    slow: how many times as long the second one takes. apart: whether they separate their waits.
    """

    def __init__(self, slow: float = 1.0, *, apart: bool = True) -> None:
        super().__init__(
            batch=12, window=16, capacity=16, durable=True, cost=CostConfig(DEFAULT, adapts=True)
        )
        self.join()
        self.rng, self.slow, self.apart = np.random.default_rng(1), slow, apart

    def train_one(self, step: int) -> list[Effect]:
        """A step; returns what its times bring."""
        lengths = self.rng.integers(10, 1000, 12)
        self.push(*[make_sample(f"{step}-{at}", int(s)) for at, s in enumerate(lengths)])
        self.hungry()
        self.pass_time(2.0)
        self.train(step)
        start = len(self.log)
        opened = self.core._parts.measuring._steps[step]
        took = np.split(self.rng.normal(1, 0.01, opened.counts.size), 2)
        at, of_ranks = 0, list[list[float]]()
        for rank, counts in enumerate(opened.counts):
            busy = []
            for index, count in enumerate(counts):
                s = opened.tokens[at : at + count]
                busy.append(float((1e-6 * s * s).sum() + 1e-4) * took[rank][index])
                at += count
            of_ranks.append([each * (self.slow if rank else 1.0) for each in busy])
        together = [max(each) for each in zip(*of_ranks, strict=True)]
        for rank, busy in enumerate(of_ranks):
            times = RankTimes(step, "update", together, None)
            if self.apart:
                times = RankTimes(step, "update", busy, [0.0] * len(busy))
            self.perform(self.core.step_times(rank, times))
        return self.log[start:]


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "waited"])
def test_the_core_asks_for_plans_by_it_notes_it_and_a_restart_goes_on_so(apart: bool) -> None:
    bench = Timed(apart=apart)
    for step in range(60):
        if any(isinstance(effect, CostChanged) for effect in bench.train_one(step)):
            break
    else:
        pytest.fail("quadratic times were not separated from linear ones")
    (fitted,) = [fact for fact in bench.facts if isinstance(fact, CostFitted)]
    assert (fitted.version, fitted.first_step) == (1, step + 1)
    bench.train_one(step + 1)
    wanted = [effect.cost for effect in bench.log if isinstance(effect, PlanRequested)]
    assert wanted[0] is None
    assert wanted[-1] == fitted.cost
    after = DispatcherCore(bench.core.config)
    after.restore(bench.memory.remembered(), bench.now)
    last = [fact for fact in bench.facts if isinstance(fact, CostFitted)][-1]
    assert after._parts.cost.fitted == last


def test_a_slow_rank_gets_less_work_and_as_much_as_others_once_it_is_slow_no_more() -> None:
    bench = Timed(slow=2.0)
    shares = list[float]()
    for step in range(90):
        bench.slow = 2.0 if step < 45 else 1.0
        bench.train_one(step)
        opened = bench.core._parts.measuring._steps[step]
        of_first = int(opened.counts[0].sum())
        work = opened.tokens.astype(float) ** 2
        shares.append(float(work[of_first:].sum() / work.sum()))
    speeds = [fact for fact in bench.facts if isinstance(fact, SpeedsMeasured)]
    reported = [effect.measured for effect in bench.log if isinstance(effect, SpeedsChanged)]
    assert speeds == reported
    assert speeds[0].slowness == pytest.approx((1.0, 2.0), rel=0.1)
    assert speeds[-1].slowness == pytest.approx((1.0, 1.0), abs=0.1)
    assert speeds[-1].first_step < 65
    assert np.mean(shares[20:45]) < np.mean(shares[65:]) - 0.05

    after = DispatcherCore(bench.core.config)
    after.restore(bench.memory.remembered(), bench.now)
    generation = bench.core._ledger.generation.number
    assert after._parts.cost.slowness(generation) == bench.core._parts.cost.slowness(generation)


def test_without_evidence_ranks_count_as_equally_fast_and_that_is_reported() -> None:
    bench = Timed()
    for step in range(30):
        bench.train_one(step)
    assert not [fact for fact in bench.facts if isinstance(fact, SpeedsMeasured)]
    found = bench.core._parts.measuring.statistics().as_json()
    assert found["slowness_in_plans"] == "no rank is surely slower than others"


def test_another_generation_begins_with_ranks_that_are_alike() -> None:
    bench = Timed(slow=2.0)
    for step in range(30):
        bench.train_one(step)
    generation = bench.core._ledger.generation.number
    assert bench.core._parts.cost.slowness(generation) is not None
    before = len(bench.log)
    bench.perform(bench.core.join(RankHello("r2", 0, 2, None), bench.now))
    bench.perform(bench.core.join(RankHello("r3", 1, 2, generation + 1), bench.now))
    bench.train_one(30)
    wanted = [effect for effect in bench.log[before:] if isinstance(effect, PlanRequested)]
    assert [effect.slowness for effect in wanted] == [None] * len(wanted)
    assert wanted
