"""The step ledger: states, generations, redelivery, and ranks that are not who they say."""

import numpy as np
import pytest

from dispatcher.core.buffer import Entry
from dispatcher.core.events import Deliver, Effect, FailRanks, Redelivered, Release
from dispatcher.core.ledger import StepLedger
from dispatcher.core.standing import RankHello
from dispatcher.core.step import NEXT, OpenStep, StepEvent, StepState, step_digest
from dispatcher.errors import (
    ConfigError,
    GenerationFenced,
    IllegalTransition,
    ProtocolError,
    RankRefused,
)
from dispatcher.plan import Plan, Sync
from tests.support.samples import make_sample


def hello(dp_rank: int, generation: int | None = 1, **options: object) -> RankHello:
    client = options.pop("client_id", f"rank-{dp_rank}")
    return RankHello(client, dp_rank, 2, generation, **options)  # type: ignore[arg-type]


def make_ledger(*, max_open_steps: int = 4) -> StepLedger:
    ledger = StepLedger(2, max_open_steps)
    ledger.join(hello(0, None), 0.0)
    ledger.join(hello(1), 0.0)
    begin(ledger)
    return ledger


def begin(ledger: StepLedger) -> None:
    """Every rank asks for steps from where the generation stands."""
    for dp_rank, rank in ledger.ranks.items():
        ledger.demand(dp_rank, rank.taken, hungry=False)


def open_step(ledger: StepLedger, *names: str) -> list[Effect]:
    """A step with one micro-batch a rank: even places to rank 0, odd ones to rank 1."""
    names = names or ("a", "b")
    entries = tuple(Entry(make_sample(name), at, 0.0) for at, name in enumerate(names))
    places = np.arange(len(names))
    parts = ((places[::2],), (places[1::2],))
    plan = Plan(parts, np.ones((2, 1)), Sync.STEP, 0.0, 0.0, 1.0)
    return ledger.open(plan, entries, 0.0)


def prepare(ledger: StepLedger, step: int, *ranks: int) -> list[Effect]:
    effects: list[Effect] = []
    for rank in ranks or (0, 1):
        effects += ledger.prepared(rank, step, ledger.steps[step].digest)
    return effects


def test_every_state_and_event_has_its_move_or_none() -> None:
    for state in StepState:
        for event in StepEvent:
            step = OpenStep(0, (), "d", 0.0, state)
            if (state, event) in NEXT:
                step.move(event)
                assert step.state is NEXT[state, event]
            else:
                with pytest.raises(IllegalTransition):
                    step.move(event)
                assert step.state is state


def test_a_step_goes_to_every_rank_and_is_released_when_all_hold_it() -> None:
    ledger = make_ledger()
    assert open_step(ledger) == [Deliver(0, 0), Deliver(1, 0)]
    assert prepare(ledger, 0, 0) == []
    assert prepare(ledger, 0, 1) == [Release((0, 1), 0)]


def test_a_step_is_committed_when_every_rank_has_said_so() -> None:
    ledger = make_ledger()
    open_step(ledger)
    prepare(ledger, 0)
    assert ledger.commit(0, 0) == []
    assert ledger.in_flight == 2
    (done,) = ledger.commit(1, 0)
    assert (done.number, done.state) == (0, StepState.COMMITTED)
    assert ledger.in_flight == 0


def test_a_commit_covers_all_steps_before_it() -> None:
    ledger = make_ledger()
    for step in range(3):
        open_step(ledger)
        prepare(ledger, step)
    ledger.commit(0, 2)
    assert [done.number for done in ledger.commit(1, 1)] == [0, 1]
    assert list(ledger.steps) == [2]


def test_a_rank_cannot_speak_of_a_step_it_was_not_given() -> None:
    ledger = make_ledger()
    open_step(ledger)
    with pytest.raises(ProtocolError, match="committed step 0 before it was prepared"):
        ledger.commit(0, 0)
    with pytest.raises(ProtocolError, match="took step 0 before it was prepared"):
        ledger.demand(0, 0, hungry=False)


def test_preparing_a_step_that_is_not_open_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="not open"):
        make_ledger().prepared(0, 7, "digest")


def test_another_digest_fails_the_generation_on_all_ranks() -> None:
    ledger = make_ledger()
    open_step(ledger)
    (failed,) = ledger.prepared(1, 0, "another plan")
    assert isinstance(failed, FailRanks)
    assert failed.client_ids == ("rank-0", "rank-1")
    assert "another plan" in str(failed.error)
    assert not ledger.complete
    with pytest.raises(GenerationFenced):
        ledger.join(hello(1), 0.0)
    ledger.join(hello(0, None, client_id="new-0"), 0.0)
    ledger.join(hello(1, 2, client_id="new-1"), 0.0)
    assert ledger.complete


def test_no_release_while_a_rank_is_away_and_release_when_it_is_back() -> None:
    ledger = make_ledger()
    open_step(ledger)
    prepare(ledger, 0, 0)
    ledger.leave(0, "rank-0")
    assert prepare(ledger, 0, 1) == []
    assert ledger.steps[0].state is StepState.PREPARED
    ledger.join(hello(0, received={0: 1}), 0.0)
    assert ledger.release_ready() == [Release((0, 1), 0)]


def test_a_live_rank_that_reconnects_goes_on_where_it_was() -> None:
    ledger = make_ledger()
    open_step(ledger)
    open_step(ledger)
    prepare(ledger, 0)
    ledger.leave(1, "rank-1")
    effects = ledger.join(hello(1, received={0: 3}), 0.0)
    assert [effect for effect in effects if isinstance(effect, Deliver)] == [
        Deliver(1, 0, 3),
        Deliver(1, 1, 0),
    ]
    assert Redelivered(0, "reconnect") in effects
    assert prepare(ledger, 0, 1) == [Release((1,), 0)]  # it may have missed the first one


def test_a_rank_that_says_it_committed_before_the_cut_is_believed() -> None:
    ledger = make_ledger()
    open_step(ledger)
    prepare(ledger, 0)
    ledger.commit(0, 0)
    ledger.leave(1, "rank-1")
    effects = ledger.join(hello(1, committed=0, taken=0), 0.0)
    assert effects == []
    assert [done.number for done in ledger.commit(1, ledger.ranks[1].committed)] == [0]


def test_a_new_process_of_the_same_generation_starts_at_the_steps_beginning() -> None:
    ledger = make_ledger()
    open_step(ledger)
    prepare(ledger, 0)
    ledger.leave(1, "rank-1")
    effects = ledger.join(hello(1, client_id="other", received={0: 3}), 0.0)
    assert Deliver(1, 0, 0) in effects


def test_a_new_generation_gets_every_open_step_again_identical_and_acknowledgements_are_void() -> (
    None
):
    ledger = make_ledger()
    open_step(ledger)
    open_step(ledger, "c", "d")
    prepare(ledger, 0)
    ledger.commit(0, 0)
    digests = {number: step.digest for number, step in ledger.steps.items()}
    effects = ledger.join(hello(0, None, client_id="new-0"), 1.0)
    assert isinstance(effects[0], FailRanks)
    assert effects[0].client_ids == ("rank-0", "rank-1")
    assert effects[-2:] == [Deliver(0, 0), Deliver(0, 1)]
    effects = ledger.join(hello(1, 2, client_id="new-1"), 1.0)
    assert effects == [Deliver(1, 0), Deliver(1, 1)]
    assert {number: step.digest for number, step in ledger.steps.items()} == digests
    assert {step.state for step in ledger.steps.values()} == {StepState.PLANNED}
    prepare(ledger, 0)
    assert ledger.commit(1, 0) == []
    assert [done.number for done in ledger.commit(0, 0)] == [0]


@pytest.mark.parametrize(
    ("greeting", "words"),
    [
        (hello(2), "out of range"),
        (RankHello("x", 0, 3, 1), "generation 1 has 2"),
        (RankHello("x", 0, 3, None), "serves 2; start it with --dp-size 3, or with --elastic"),
        (hello(1, None), "only DP rank 0"),
        (hello(1, client_id="impostor"), "two processes claim one rank"),
    ],
)
def test_a_rank_that_cannot_be_seated_is_refused_and_nothing_changes(
    greeting: RankHello, words: str
) -> None:
    ledger = make_ledger()
    with pytest.raises(RankRefused, match=words):
        ledger.join(greeting, 0.0)
    assert ledger.generation == 1
    assert ledger.complete
    assert ledger.ranks[1].client_id == "rank-1"


def in_pairs_only(dp_size: int) -> None:
    if dp_size % 2:
        raise ConfigError("an odd number")


def make_elastic_ledger() -> StepLedger:
    """Of two ranks, with two open steps."""
    ledger = StepLedger(2, 4, in_pairs_only)
    ledger.join(hello(0, None), 0.0)
    ledger.join(hello(1), 0.0)
    begin(ledger)
    open_step(ledger, *"abcd")
    open_step(ledger, *"efgh")
    prepare(ledger, 0)
    return ledger


def grow(ledger: StepLedger, dp_size: int) -> list[Effect]:
    """A whole process group of another size takes over."""
    effects = ledger.join(RankHello("new-0", 0, dp_size, None), 1.0)
    for dp_rank in range(1, dp_size):
        greeting = RankHello(f"new-{dp_rank}", dp_rank, dp_size, ledger.generation)
        effects += ledger.join(greeting, 1.0)
    begin(ledger)
    return effects


def replan(ledger: StepLedger) -> list[Effect]:
    """Plan the first outgrown step again: its samples one by one to the ranks in turn."""
    step = ledger.outgrown
    assert step is not None
    entries = tuple(sorted(step.entries(), key=lambda entry: entry.ticket))
    places, size = np.arange(len(entries)), ledger.dp_size
    parts = tuple((places[rank::size],) for rank in range(size))
    return ledger.replan(step.number, Plan(parts, np.ones((size, 1)), Sync.STEP, 0, 0, 1), entries)


def names(step: OpenStep) -> list[str]:
    return sorted(sample.sample_id for sample in step.samples())


def test_steps_for_another_number_of_ranks_go_out_one_by_one_once_they_are_planned_again() -> None:
    ledger = make_elastic_ledger()
    before = dict(ledger.steps)
    effects = grow(ledger, 4)
    assert Redelivered(0, "new-size") in effects
    assert [effect for effect in effects if isinstance(effect, Deliver)] == []
    assert replan(ledger) == [Deliver(rank, 0) for rank in range(4)]
    late = ledger.join(RankHello("new-3", 3, 4, ledger.generation), 2.0)
    assert [effect for effect in late if isinstance(effect, Deliver)] == [Deliver(3, 0)]
    assert replan(ledger) == [Deliver(rank, 1) for rank in range(4)]
    assert ledger.outgrown is None
    for number, step in ledger.steps.items():
        assert (step.dp_size, names(step)) == (4, names(before[number]))
        assert step.digest != before[number].digest
        assert step.planned_at == before[number].planned_at
    assert prepare(ledger, 0, 0, 1, 2) == []
    assert prepare(ledger, 0, 3) == [Release((0, 1, 2, 3), 0)]


def test_nobody_can_speak_of_a_step_before_it_is_planned_again() -> None:
    ledger = make_elastic_ledger()
    digest = ledger.steps[0].digest
    ledger.join(RankHello("new-0", 0, 4, None), 1.0)
    with pytest.raises(ProtocolError, match="not open"):
        ledger.prepared(0, 0, digest)
    with pytest.raises(ProtocolError, match="committed step 0 before it was prepared"):
        ledger.commit(0, 0)
    boast = RankHello("new-1", 1, 4, ledger.generation, taken=1, committed=1, received={0: 1, 1: 1})
    for _ in ("as a stranger", "as one that is known"):
        ledger.join(boast, 1.0)
        rank = ledger.ranks[1]
        assert (rank.taken, rank.prepared, rank.committed) == (-1, -1, -1)


def test_steps_that_fit_again_stay_as_they_were_behind_those_that_do_not() -> None:
    ledger = make_elastic_ledger()
    grow(ledger, 4)
    second = ledger.steps[1]
    replan(ledger)
    assert [effect for effect in grow(ledger, 2) if isinstance(effect, Deliver)] == []
    assert replan(ledger) == [Deliver(rank, step) for step in (0, 1) for rank in (0, 1)]
    assert ledger.steps[1] is second


def test_a_number_of_ranks_that_no_step_can_have_is_refused_and_nothing_changes() -> None:
    ledger = make_elastic_ledger()
    with pytest.raises(RankRefused, match="no steps for 3 DP ranks: an odd number"):
        ledger.join(RankHello("x", 0, 3, None), 0.0)
    assert (ledger.generation, ledger.dp_size, ledger.outgrown) == (1, 2, None)
    assert ledger.complete
    assert prepare(ledger, 1) == [Release((0, 1), 1)]


@pytest.mark.parametrize(("dp_size", "expected"), [(None, 2), (4, 4), (3, 2)])
def test_after_a_restart_the_number_of_ranks_is_that_of_the_last_generation_if_it_still_may_be(
    dp_size: int | None, expected: int
) -> None:
    ledger = StepLedger(2, 4, in_pairs_only)
    ledger.restore([], 0, 7, dp_size)
    assert ledger.dp_size == expected
    rigid = StepLedger(2, 4)
    rigid.restore([], 0, 7, dp_size)
    assert rigid.dp_size == 2


@pytest.mark.parametrize(("generation", "words"), [(1, "is over"), (9, "was restarted")])
def test_a_rank_of_another_generation_is_fenced(generation: int, words: str) -> None:
    ledger = make_ledger()
    ledger.join(hello(0, None, client_id="new-0"), 0.0)
    with pytest.raises(GenerationFenced, match=words):
        ledger.join(hello(1, generation), 0.0)


def test_a_step_is_wanted_when_every_rank_has_room_for_one_more() -> None:
    ledger = make_ledger()
    wanted = [ledger.wanted]
    open_step(ledger)
    wanted.append(ledger.wanted)
    prepare(ledger, 0)
    for rank in (0, 1):
        ledger.demand(rank, 0, hungry=False)
        wanted.append(ledger.wanted)
    ledger.leave(1, "rank-1")
    wanted.append(ledger.wanted)
    assert wanted == [True, False, False, True, False]


def test_without_prefetch_a_step_is_wanted_only_by_the_hungry() -> None:
    ledger = StepLedger(2, 4)
    ledger.join(hello(0, None, prefetch_steps=0), 0.0)
    ledger.join(hello(1, prefetch_steps=0), 0.0)
    assert not ledger.wanted
    ledger.demand(0, -1, hungry=True)
    assert ledger.hungry
    assert not ledger.wanted
    ledger.demand(1, -1, hungry=True)
    assert ledger.wanted


def test_no_more_steps_are_open_than_allowed() -> None:
    ledger = make_ledger(max_open_steps=1)
    open_step(ledger)
    prepare(ledger, 0)
    for rank in (0, 1):
        ledger.demand(rank, 0, hungry=True)
    assert not ledger.wanted
    for rank in (0, 1):
        ledger.commit(rank, 0)
    assert ledger.wanted


def test_the_digest_tells_steps_ranks_and_order_apart() -> None:
    a, b = (Entry(make_sample(name), ticket, 0.0) for ticket, name in enumerate("ab"))
    plans = [
        (0, (((a,),), ((b,),))),
        (1, (((a,),), ((b,),))),
        (0, (((b,),), ((a,),))),
        (0, (((a, b),), ((),))),
        (0, (((a,), (b,)), ((), ()))),
    ]
    digests = [step_digest(number, micro_batches) for number, micro_batches in plans]
    assert len(set(digests)) == len(plans)
    assert digests[0] == step_digest(*plans[0])
