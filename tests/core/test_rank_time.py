"""Every rank-second is accounted to one cause, and to the right one."""

import itertools
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_dispatcher.core.effects import Deliver
from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.core.measuring.cost_in_use import CostConfig
from rollout_dispatcher.core.measuring.times import RankTimes
from rollout_dispatcher.core.rank_time import TimeCause
from rollout_dispatcher.core.steps.rank_state import RankHello
from tests.support.core.cores import Bench
from tests.support.samples import make_sample

RANKS, BATCH = 2, 4


class Run(Bench):
    """Ranks that have taken their first step and wait for the next."""

    def __init__(self, *, window: int = BATCH, capacity: int = 6, **options: object) -> None:
        super().__init__(window=window, capacity=capacity, **options)  # type: ignore[arg-type]
        self.named, self.version = 0, 0 if "max_staleness" in options else None
        self.join()
        self.supply()
        self.wait(-1)
        self.train(0)

    def supply(self, tokens: int = 100, version: int | None = None, count: int = BATCH) -> None:
        version = self.version if version is None else version
        for _ in range(count):
            self.named += 1
            self.push(make_sample(f"s{self.named}", tokens, policy_version=version))

    def wait(self, taken: int) -> None:
        for rank in range(RANKS):
            self.perform(self.core.demand(rank, taken, self.now, hungry=True))

    def take(self, step: int) -> None:
        self.hold(step)
        for rank in range(RANKS):
            self.perform(self.core.demand(rank, step, self.now, hungry=False))

    def train(self, step: int, seconds: float = 0.0) -> None:
        self.take(step)
        self.now += seconds
        for rank in range(RANKS):
            self.perform(self.core.commit(rank, step, self.now))

    def report(self, step: int, computed: tuple[float, float]) -> None:
        longest = max(computed)
        for rank, seconds in enumerate(computed):
            times = RankTimes(step, "update", [longest + 0.1], [longest + 0.1 - seconds])
            self.perform(self.core.step_times(rank, times))

    def look(self) -> dict[TimeCause, float]:
        self.core.rank_time(self.now)
        return {cause: spent for cause, spent in self.core.statistics().rank_time.items() if spent}

    def gained(self, happens: Callable[[], object]) -> Mapping[TimeCause, object]:
        """What that adds to each cause, about."""
        before = self.look()
        happens()
        gained = {cause: spent - before.get(cause, 0.0) for cause, spent in self.look().items()}
        return {cause: pytest.approx(spent) for cause, spent in gained.items() if spent > 1e-9}

    def passes(self, seconds: float) -> None:
        self.now += seconds


def test_nothing_is_accounted_before_the_first_step_and_after_the_end() -> None:
    bench = Bench(window=BATCH)
    bench.join()
    bench.now += 100
    bench.core.rank_time(bench.now)
    assert set(bench.core.statistics().rank_time.values()) == {0.0}
    run = Run()
    run.perform(run.core.end_stream(run.now, force=True))
    assert run.core.drained
    run.passes(100)
    assert run.look() == {}


def test_what_ranks_do_themselves_is_work() -> None:
    run = Run()
    run.supply()
    run.wait(0)
    assert run.gained(lambda: run.train(1, seconds=7)) == {TimeCause.WORK: 14}
    assert run.gained(lambda: run.passes(2)) == {TimeCause.WORK: 4}, "evaluation, weight sync"


def test_too_few_samples_are_rollouts_fault() -> None:
    run = Run()
    run.wait(0)
    run.supply(count=BATCH - 1)
    assert run.gained(lambda: run.passes(5)) == {TimeCause.NO_SAMPLES: 10}


def test_samples_that_were_all_dropped_as_stale_are_named_and_not_rollout() -> None:
    run = Run(max_staleness=1)
    run.perform(run.core.set_policy_version(10, run.now, 1))
    run.supply(version=3)
    run.wait(0)
    assert run.core.statistics().dropped[DropReason.STALE] == BATCH
    assert run.gained(lambda: run.passes(5)) == {TimeCause.STALE: 10}
    assert run.core.reasons(run.now)[0].text == (
        "0 of 4 samples are ready, and 4 samples were dropped as stale since the last step was "
        "planned: --max-staleness asks for policy version 9 or newer"
    )
    run.supply(version=10)
    run.train(1)
    run.wait(1)
    assert run.gained(lambda: run.passes(5)) == {TimeCause.NO_SAMPLES: 10}, "it is over"


def test_a_slow_journal_is_named_and_not_rollout() -> None:
    run, slow = Run(), [True]
    run.core.watch_journal(lambda: slow[0])
    run.wait(0)
    assert run.gained(lambda: run.passes(5)) == {TimeCause.JOURNAL: 10}
    slow[0] = False
    assert run.gained(lambda: run.passes(5)) == {TimeCause.NO_SAMPLES: 10}


def test_a_journal_without_room_is_named() -> None:
    run = Run(durable=True)
    run.core.set_journal_capacity(lambda *_: False)
    run.wait(0)
    run.supply(count=1)
    assert run.gained(lambda: run.passes(5)) == {TimeCause.JOURNAL: 10}


def test_a_batch_that_is_there_and_not_on_its_ranks_is_the_dispatchers() -> None:
    run = Run()
    run.supply()
    run.wait(0)
    assert any(isinstance(effect, Deliver) and effect.step == 1 for effect in run.log)
    assert run.gained(lambda: run.passes(3)) == {TimeCause.DISPATCHER: 6}


def test_time_for_a_window_to_fill_is_rollouts() -> None:
    run = Run(window=6, target_excess=0.0)
    run.supply(count=3)
    run.supply(tokens=101, count=1)
    assert run.core.next_step == 1, "the window is not full, and nobody waits"
    run.wait(0)
    assert run.gained(lambda: run.passes(1)) == {TimeCause.NO_SAMPLES: 2}


def test_time_in_which_a_step_is_planned_is_the_dispatchers() -> None:
    run = Run()
    run.plans = False
    run.supply()
    run.wait(0)
    assert run.gained(lambda: run.passes(1)) == {TimeCause.DISPATCHER: 2}


def test_a_rank_that_is_gone_is_named_for_itself_and_for_those_that_wait() -> None:
    run = Run()
    run.supply()
    run.wait(0)
    run.take(1)
    run.perform(run.core.leave(1, "r1", run.now))
    assert run.gained(lambda: run.passes(5)) == {TimeCause.GONE_RANK: 5, TimeCause.WORK: 5}
    run.perform(run.core.commit(0, 1, run.now))
    run.perform(run.core.demand(0, 1, run.now, hungry=True))
    assert run.gained(lambda: run.passes(5)) == {TimeCause.GONE_RANK: 10}


def test_a_rank_that_hangs_is_named_once_it_is_known_to() -> None:
    run = Run()
    for step in range(1, 3):
        run.supply()
        run.wait(step - 1)
        run.train(step, seconds=2)
    run.supply()
    run.wait(2)
    run.take(3)
    run.core.progressed(0, 1, 5, run.now)
    assert run.gained(lambda: run.passes(29)) == {TimeCause.WORK: 58}
    run.passes(1)
    run.look()
    assert run.gained(lambda: run.passes(60)) == {TimeCause.HUNG_RANK: 120}
    stall = run.core.stall(run.now)
    assert stall is not None
    assert stall.hung == (1,), "and only this rank"
    for rank in range(RANKS):
        run.perform(run.core.commit(rank, 3, run.now))
    run.report(3, (1.0, 91.0))  # 61 s of it were accounted for as the hang
    gained = run.gained(lambda: run.passes(100))
    assert gained == {TimeCause.SLOW_RANK: 29, TimeCause.WORK: 171}


def test_waits_for_a_slow_rank_are_owed_until_loops_have_paid_them() -> None:
    run = Run()
    run.supply()
    run.wait(0)
    run.train(1, seconds=3)
    run.report(1, (2.0, 3.0))
    gained = run.gained(lambda: run.passes(0.25))
    assert gained == {TimeCause.SLOW_RANK: 0.5}
    assert run.gained(lambda: run.passes(2)) == {TimeCause.SLOW_RANK: 0.5, TimeCause.WORK: 3.5}


def test_waits_for_a_rank_with_more_work_are_of_lengths() -> None:
    run = Run()
    for _ in range(BATCH - 1):
        run.supply(tokens=100, count=1)
    run.supply(tokens=900, count=1)
    run.wait(0)
    run.train(1, seconds=9)
    opened = run.planned[-1].plan.cost.sum(axis=1)
    long, short = float(opened.max()) / 100, float(opened.min()) / 100
    took = (long, short) if opened[0] > opened[1] else (short, long)
    run.report(1, took)
    gained = run.gained(lambda: run.passes(100))
    assert gained == {TimeCause.LENGTHS: long - short, TimeCause.WORK: 200 - (long - short)}


@pytest.mark.parametrize("computed", [(0.05, 0.35), (0.01, 0.35)])
def test_waits_for_a_slow_rank_that_plans_know_of_are_still_of_the_slow_rank(
    computed: tuple[float, float],
) -> None:
    run = Run(cost=CostConfig(adapts=True))
    steps = iter(range(1, 100))

    def train(count: int) -> None:
        for step in itertools.islice(steps, count):
            run.supply()
            run.wait(step - 1)
            run.train(step, seconds=0.4)
            run.report(step, computed)

    train(40)
    in_plans = run.core.measured.in_plans
    assert in_plans is not None
    assert in_plans[1] == 4.0, "the largest slowness in plans"
    assert len(run.planned[-1].plan.micro_batches[1][0]) == 1, "it is sent less work"
    gained = run.gained(lambda: train(10))
    assert gained[TimeCause.SLOW_RANK] == 10 * (computed[1] - computed[0])
    assert TimeCause.LENGTHS not in gained


def test_backpressure_is_counted_in_seconds() -> None:
    run = Run()
    before = run.core.statistics().backpressure_seconds
    run.supply(count=BATCH + 10)
    run.passes(4)
    run.look()
    assert run.core.statistics().backpressure_seconds == pytest.approx(before + 4)


OF_RANKS = ("wait", "take", "commit", "report", "leave", "join", "beat")
EVENTS = st.sampled_from([*OF_RANKS, "supply", "stale", "version", "group", "slow"])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.integers(0, 1), st.floats(0, 40)), max_size=60))
def test_the_causes_add_up_to_the_ranks_time(
    events: list[tuple[str, int, float]],
) -> None:
    run, slow = Run(max_staleness=1, capacity=8), [False]
    run.core.watch_journal(lambda: slow[0])
    began, client = run.now, ["r0", "r1"]
    last = dict.fromkeys(TimeCause, 0.0)
    for event, rank, seconds in events:
        happens(run, event, rank, client, slow)
        run.passes(seconds)
        run.core.rank_time(run.now)
        found = run.core.statistics().rank_time
        assert all(found[cause] >= last[cause] for cause in TimeCause), "a counter fell"
        last = dict(found)
        assert sum(found.values()) == pytest.approx(RANKS * (run.now - began), abs=0.01)


def happens(run: Run, event: str, rank: int, client: list[str], slow: list[bool]) -> None:
    core = run.core
    match event:
        case "supply" | "stale":
            run.supply(version=0 if event == "stale" else 5, count=3)
        case "version":
            run.perform(core.set_policy_version(5, run.now, 0))
        case "group":
            run.join()
            client[:] = ["r0", "r1"]
        case "slow":
            slow[0] = not slow[0]
        case _ if rank in core.statistics().ranks:
            rank_does(run, event, rank, client[rank])


def rank_does(run: Run, event: str, rank: int, client: str) -> None:
    core, known = run.core, run.core.statistics().ranks[rank]
    step = core.step(known.taken + 1)
    if event == "join" and not known.connected:
        hello = RankHello(
            client, rank, RANKS, core.generation, taken=known.taken, committed=known.committed
        )
        run.perform(core.join(hello, run.now))
    if event == "join" or not known.connected:
        return
    if event == "wait":
        run.perform(core.demand(rank, known.taken, run.now, hungry=True))
    elif event == "beat":
        core.progressed(rank, known.handed_out + 1, known.collectives + 1, run.now)
    elif event == "take" and step is not None:
        run.perform(core.prepared(rank, step.number, step.digest, run.now))
        run.perform(core.demand(rank, step.number, run.now, hungry=False))
    elif event == "commit" and known.taken > known.committed:
        run.perform(core.commit(rank, known.taken, run.now))
    elif event == "report" and known.committed >= 0:
        times = RankTimes(known.committed, "update", [3.0 + 5 * rank], [1.0 + rank])
        run.perform(core.step_times(rank, times))
    elif event == "leave":
        run.perform(core.leave(rank, client, run.now))
