"""A process group of another size: what the books, the end and the costs know of new plans.

That open steps keep their number, order and samples, whenever groups come and the dispatcher dies,
is what `test_dispatch_machine` holds.
"""

from dataclasses import replace

from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import Deliver, EndRanks, PlanWanted, ReplanWanted
from rollout_dispatcher.core.steps.rank_state import RankHello
from rollout_planner.types import PlanConfig
from tests.support.core.cores import Bench
from tests.support.samples import make_sample


class Elastic(Bench):
    """Process groups of any size, which hold two steps ahead."""

    def __init__(self) -> None:
        super().__init__(batch=4, window=4, capacity=12, durable=True, check_size=lambda _: None)
        self.join_group(2)
        self.push_lengths(*range(1, 9))
        assert list(self.core._ledger.steps) == [0, 1]
        self.log.clear()

    def _config(self, wanted: PlanWanted | ReplanWanted) -> PlanConfig:
        return replace(super()._config(wanted), dp_size=wanted.dp_size)

    def join_group(self, size: int) -> None:
        generation: int | None = None
        for rank in range(size):
            hello = RankHello(f"{size}-{rank}", rank, size, generation, prefetch_steps=2)
            self.perform(self.core.join(hello, self.now))
            generation = self.core._ledger.generation.number

    def push_lengths(self, *lengths: int) -> None:
        self.push(*[make_sample(f"{self._next_seq}.{tokens}", tokens) for tokens in lengths])


def test_the_books_know_nothing_of_a_new_plan() -> None:
    bench = Elastic()
    bench.push_lengths(1, 2, 3)
    before = bench.core.statistics()
    bench.join_group(4)
    after = bench.core.statistics()
    assert after.dp_size == 4
    assert after.balanced
    for name in ("steps_planned", "small_steps", "selection_bias", "in_flight", "buffered"):
        assert getattr(after, name) == getattr(before, name)
    assert bench.core._totals.dispatched.samples == 8
    assert [entry.skips for entry in bench.core._buffer.ready(9)] == [0, 0, 0]


def test_the_end_is_told_only_behind_the_last_step_that_is_planned_again() -> None:
    bench = Elastic()
    bench.perform(bench.core.end_stream(bench.now, force=True))
    bench.log.clear()
    bench.join_group(1)
    kinds = [type(effect) for effect in bench.log if isinstance(effect, Deliver | EndRanks)]
    assert kinds == [Deliver, Deliver, EndRanks]


def test_a_step_keeps_what_its_plan_costs_and_a_new_plan_brings_its_own() -> None:
    bench = Elastic()
    for size in (2, 4, 1):
        bench.join_group(size)
        for step in bench.core._ledger.steps.values():
            tokens = [
                [sum(entry.sample.tokens for entry in part) for part in rank]
                for rank in step.micro_batches
            ]
            assert len(tokens) == size
            assert step.planned_cost is not None
            assert step.planned_cost.tolist() == tokens


def test_after_a_restart_nobody_knows_what_an_open_step_was_planned_to_cost() -> None:
    bench = Elastic()
    bench.core = DispatcherCore(bench.core.config)
    bench.perform(bench.core.restore(bench.memory.remembered(), bench.now))
    assert [step.planned_cost for step in bench.core._ledger.steps.values()] == [None] * 2
