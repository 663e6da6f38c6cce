"""A process group of another size: open steps are planned again with the same samples."""

import pytest

from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.buffer.entry import BufferLimits
from rollout_dispatcher.core.config import DispatchConfig
from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import (
    Decision,
    Deliver,
    Effect,
    EndRanks,
    PlanWanted,
    ReplanWanted,
)
from rollout_dispatcher.core.planning.trigger import TriggerConfig
from rollout_dispatcher.core.steps.rank_state import RankHello
from rollout_planner.cost import parse_cost
from rollout_planner.planner import plan
from rollout_planner.types import PlanConfig
from tests.support.core.memory import Memory
from tests.support.samples import make_sample

BATCH = 4


class Bench:
    """A core whose planner answers when told to; every rank holds what it is given."""

    def __init__(self, memory: Memory | None = None) -> None:
        self.memory = memory or Memory()
        self.core = DispatcherCore(
            DispatchConfig(
                dp_size=2,
                limits=BufferLimits(12, BATCH, None, 1 << 20, 64),
                trigger=TriggerConfig(BATCH, BATCH, max_wait=1.0),
                durable=True,
                check_size=lambda _: None,
            )
        )
        self.asked: list[PlanWanted | ReplanWanted] = []
        self.log: list[Effect] = []
        if memory is not None:
            self.perform(self.core.restore(memory.remembered()))
            self.perform(self.core.tick(0.0))

    def perform(self, decision: Decision) -> None:
        self.memory.note(decision.facts, decision.totals)
        for effect in decision.effects:
            self.log.append(effect)
            if isinstance(effect, PlanWanted | ReplanWanted):
                self.asked.append(effect)

    def join(self, size: int) -> None:
        generation: int | None = None
        for rank in range(size):
            hello = RankHello(f"{id(self)}-{size}-{rank}", rank, size, generation, prefetch_steps=2)
            self.perform(self.core.join(hello, 0.0))
            generation = self.core._ledger.generation.number

    def push(self, first: int, count: int) -> None:
        samples = tuple(make_sample(f"s{first + at}", 1 + at) for at in range(count))
        self.perform(self.core.push(Push("p", first, samples), 0.0))

    def answer(self) -> None:
        """The planner answers the oldest question."""
        wanted = self.asked.pop(0)
        config = PlanConfig(
            dp_size=wanted.dp_size,
            dispatch_batch_size=BATCH,
            cost=parse_cost("tokens", lambda _: ""),
            micro_batch_size=1,
        )
        found = plan(wanted.window, config, wanted.take)
        if isinstance(wanted, PlanWanted):
            self.perform(self.core.planned(wanted, found, 0.0))
        else:
            self.perform(self.core.replanned(wanted, found, 0.0))

    def answer_all(self) -> None:
        while self.asked:
            self.answer()

    def delivered(self) -> list[tuple[int, int]]:
        """Rank and step of each delivery since the last look."""
        found = [(e.dp_rank, e.step) for e in self.log if isinstance(e, Deliver)]
        self.log.clear()
        return found

    def content(self) -> dict[int, list[str]]:
        steps = self.core._ledger.steps.values()
        return {step.number: sorted(one.sample_id for one in step.samples()) for step in steps}

    def digests(self) -> dict[int, str]:
        return {step.number: step.digest for step in self.core._ledger.steps.values()}


def two_open_steps() -> Bench:
    bench = Bench()
    bench.join(2)
    bench.push(0, 8)
    bench.answer_all()
    assert list(bench.core._ledger.steps) == [0, 1]
    bench.delivered()
    return bench


@pytest.mark.parametrize("size", [1, 3, 4])
def test_open_steps_keep_number_order_and_samples(size: int) -> None:
    bench = two_open_steps()
    before, digests = bench.content(), bench.digests()
    bench.join(size)
    assert bench.delivered() == []
    bench.answer_all()
    assert bench.delivered() == [(rank, step) for step in (0, 1) for rank in range(size)]
    assert bench.content() == before
    assert all(bench.digests()[step] != digests[step] for step in (0, 1))
    assert {len(step.micro_batches) for step in bench.core._ledger.steps.values()} == {size}


def test_the_books_know_nothing_of_a_new_plan() -> None:
    bench = two_open_steps()
    bench.push(8, 3)
    before = bench.core.statistics()
    bench.join(4)
    bench.answer_all()
    after = bench.core.statistics()
    assert after.dp_size == 4
    assert after.balanced
    for name in ("steps_planned", "small_steps", "selection_bias", "in_flight", "buffered"):
        assert getattr(after, name) == getattr(before, name)
    assert bench.core._totals.dispatched.samples == 8
    assert [entry.skips for entry in bench.core._buffer.ready(9)] == [0, 0, 0]


def test_a_plan_for_ranks_that_are_gone_is_not_used() -> None:
    bench = Bench()
    bench.join(2)
    bench.push(0, 4)
    (wanted,) = bench.asked
    assert wanted.dp_size == 2
    bench.join(4)
    assert bench.asked == [wanted]  # one question at a time
    bench.answer()
    assert bench.core._ledger.steps == {}
    assert [again.dp_size for again in bench.asked] == [4]
    bench.answer_all()
    assert bench.core._ledger.steps[0].dp_size == 4


def test_a_new_plan_that_comes_too_late_for_its_ranks_is_not_used() -> None:
    bench = two_open_steps()
    before = bench.digests()
    bench.join(4)
    bench.join(3)
    bench.answer()
    assert bench.digests() == before
    bench.join(2)  # they fit again, before the answer for three
    bench.answer_all()
    assert bench.digests() == before
    bench.join(4)
    bench.answer_all()
    assert {step.dp_size for step in bench.core._ledger.steps.values()} == {4}


def test_a_new_plan_of_a_step_that_was_committed_meanwhile_is_not_used() -> None:
    bench = two_open_steps()
    bench.join(4)
    bench.join(2)  # the steps fit again, and the first is trained before the planner answers
    digest = bench.core._ledger.steps[0].digest
    for rank in (0, 1):
        bench.perform(bench.core.prepared(rank, 0, digest, 0.0))
    for rank in (0, 1):
        bench.perform(bench.core.commit(rank, 0, 0.0))
    bench.join(4)
    bench.answer_all()
    assert list(bench.core._ledger.steps) == [1]
    assert bench.core._ledger.steps[1].dp_size == 4


@pytest.mark.parametrize("answers", [0, 1, 2])
def test_a_dispatcher_that_dies_in_the_middle_goes_on_with_the_new_size(answers: int) -> None:
    bench = two_open_steps()
    before = bench.content()
    bench.join(4)
    for _ in range(answers):
        bench.answer()
    after = Bench(bench.memory)
    assert after.core._ledger.generation.dp_size == 4
    assert after.digests() == bench.digests()
    assert after.content() == before
    bench.answer_all()
    after.answer_all()
    assert after.digests() == bench.digests()


def test_the_end_is_told_only_behind_the_last_step_that_is_planned_again() -> None:
    bench = two_open_steps()
    bench.perform(bench.core.end_stream(0.0, force=True))
    bench.log.clear()
    bench.join(1)
    assert not any(isinstance(effect, EndRanks) for effect in bench.log)
    bench.answer_all()
    kinds = [type(effect) for effect in bench.log if isinstance(effect, Deliver | EndRanks)]
    assert kinds == [Deliver, Deliver, EndRanks]


def test_a_step_keeps_what_its_plan_costs_and_a_new_plan_brings_its_own() -> None:
    bench = two_open_steps()
    for size in (2, 4, 1):
        bench.join(size)
        bench.answer_all()
        for step in bench.core._ledger.steps.values():
            tokens = [
                [sum(entry.sample.tokens for entry in part) for part in rank]
                for rank in step.micro_batches
            ]
            assert step.planned_cost is not None
            assert step.planned_cost.tolist() == tokens


def test_after_a_restart_nobody_knows_what_an_open_step_was_planned_to_cost() -> None:
    steps = Bench(two_open_steps().memory).core._ledger.steps.values()
    assert [step.planned_cost for step in steps] == [None] * 2
