"""A hello is taken whole or not at all: one that is refused changes nothing."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import (
    FailRanks,
    RefuseRank,
    WelcomeRank,
)
from rollout_dispatcher.core.steps.rank_state import CheckpointPosition, RankHello
from rollout_dispatcher.errors import (
    CheckpointRefused,
    DispatcherError,
    GenerationFenced,
    ProtocolError,
    RankRefused,
)
from tests.core.steps.test_checkpoints import Run
from tests.support.core.cores import Bench
from tests.support.examples import examples
from tests.support.frozen import frozen

NONSENSE = 10**15


def fresh() -> DispatcherCore:
    return Run(steps=2, begin=False).core


def under_way() -> DispatcherCore:
    run = Run(retain=False)
    run.run_to(1)
    run.hungry()
    return run.core


def half_joined() -> DispatcherCore:
    run = under_way_and_retained()
    run.births += 1
    run.say(0, None)
    return run.core


def one_of_three_joined(
    training: dict[str, str],
) -> tuple[DispatcherCore, Callable[..., list[object]]]:
    core = DispatcherCore(replace(Bench().core.config, dp_size=3))

    def join(dp_rank: int, training: dict[str, str], generation: int | None = 1) -> list[object]:
        hello = RankHello(f"r{dp_rank}", dp_rank, 3, generation, training=training)
        return list(core.join(hello, 0.0).effects)

    join(0, training, None)
    return core, join


def test_ranks_that_do_not_train_alike_are_refused_all_of_them_with_what_differs() -> None:
    alike = {"loss_normalisation": "token-mean", "fields": "input_ids"}
    _, join = one_of_three_joined(alike)
    join(1, dict(alike))
    other = {"loss_normalisation": "sequence-mean", "losses['kl']": "token-mean of kl_mask"}
    failed, refused = join(2, other)
    words = (
        "the DP ranks of generation 1 do not train alike: fields is input_ids on DP ranks 0, 1, "
        "not given on DP rank 2; loss_normalisation is token-mean on DP ranks 0, 1, sequence-mean "
        "on DP rank 2; losses['kl'] is not given on DP ranks 0, 1, token-mean of kl_mask on DP "
        "rank 2; make the stream with the same options on every rank, and restart all ranks"
    )
    assert isinstance(failed, FailRanks)
    assert failed.client_ids == ("r0", "r1")
    assert isinstance(refused, RefuseRank)
    assert refused.client_id == "r2"
    assert str(failed.error) == str(refused.error) == words
    with pytest.raises(RankRefused, match="do not train alike"):
        join(1, alike)
    assert any(isinstance(effect, WelcomeRank) for effect in join(0, other, None)), "a new group"


def one_rank_away() -> DispatcherCore:
    core = under_way()
    core.leave(1, core._ledger.ranks[1].client_id, 0.0)
    return core


def under_way_and_retained() -> Run:
    run = Run()
    run.run_to(3)
    run.core.checkpoint_saved(0, 1)
    return run


def going_back() -> DispatcherCore:
    run = under_way_and_retained()
    run.begin()
    run.load(2, 0)
    return run.core


def back() -> DispatcherCore:
    run = under_way_and_retained()
    run.begin()
    run.load(2)
    return run.core


def restarted() -> DispatcherCore:
    run = under_way_and_retained()
    run.restart()
    return run.core


def restarted_on_the_way_back() -> DispatcherCore:
    run = under_way_and_retained()
    run.begin()
    run.load(2, 0)
    run.restart()
    return run.core


def failed() -> DispatcherCore:
    run = under_way_and_retained()
    run.perform(run.core.prepared(0, 4, "another plan", run.now))
    return run.core


SCENES: dict[str, Callable[[], DispatcherCore]] = {
    made.__name__: made
    for made in (
        fresh, under_way, half_joined, one_rank_away, going_back, back, restarted,
        restarted_on_the_way_back, failed,
    )
}  # fmt: skip

numbers = st.one_of(st.integers(-1, 8), st.just(NONSENSE))
positions = st.builds(CheckpointPosition, st.sampled_from(["run", "other"]), numbers)
hellos = st.builds(
    RankHello,
    client_id=st.sampled_from(["0.1", "1.1", "0.2", "1.2", "somebody"]),
    dp_rank=st.integers(0, 3),
    dp_size=st.sampled_from([2, 2, 2, 1, 3]),
    generation=st.sampled_from([None, 1, 2, 3]),
    prefetch_steps=st.integers(0, 3),
    taken=st.one_of(st.just(-1), numbers),
    committed=st.one_of(st.just(-1), numbers),
    hungry=st.booleans(),
    received=st.dictionaries(
        st.one_of(st.integers(0, 8), st.just(NONSENSE)), st.integers(0, 3), max_size=3
    ),
    resume=st.one_of(st.none(), positions),
    saved=st.one_of(st.just(-1), numbers),
)


@pytest.mark.parametrize("scene", SCENES)
@examples(50)
@given(data=st.data())
def test_a_hello_that_raises_leaves_everything_as_it_was(scene: str, data: st.DataObject) -> None:
    core = SCENES[scene]()
    for _ in range(4):
        hello = data.draw(hellos)
        before, generation = everything(core), core._ledger.generation.number
        try:
            core.join(hello, 1000.0)
        except DispatcherError as error:
            assert_same(core, before, error)
        assert core.statistics().balanced
        assert core._ledger.generation.number == generation + (
            hello.generation is None and everything(core) != before
        )


def everything(core: DispatcherCore) -> object:
    """With what is counted along up to date, which it is as soon as anybody looks."""
    core.statistics()
    return frozen(core)


def assert_same(core: DispatcherCore, before: object, why: object = None) -> None:
    """Without the difference: pytest takes minutes to lay out two cores beside each other."""
    unchanged = everything(core) == before
    assert unchanged, why


def test_a_hello_that_claims_a_checkpoint_of_no_step_begins_nothing() -> None:
    core = under_way()
    before = everything(core)
    with pytest.raises(ProtocolError, match="a checkpoint after step 99, which was never planned"):
        core.join(RankHello("new", 0, 2, None, saved=99), 0.0)
    assert_same(core, before)


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        ({"taken": 99}, "says that it has taken step 99"),
        ({"committed": 99}, "says that it has committed step 99"),
        ({"received": {0: 1, 99: 1}}, "says that it has got step 99"),
    ],
)
def test_a_hello_that_claims_steps_that_never_were_is_refused(
    claims: dict[str, object], words: str
) -> None:
    core = restarted()
    before = everything(core)
    with pytest.raises(ProtocolError, match=words):
        core.join(RankHello("0.1", 0, 2, 1, **claims), 0.0)  # type: ignore[arg-type]
    assert_same(core, before)


def test_a_hello_that_claims_more_micro_batches_than_a_step_has_is_refused() -> None:
    core = restarted()
    before = everything(core)
    (number,) = core._ledger.steps
    with pytest.raises(ProtocolError, match="9 micro-batches of step 4, which has 1"):
        core.join(RankHello("0.1", 0, 2, 1, received={number: 9}), 0.0)
    assert_same(core, before)


def test_a_rank_that_loads_another_run_s_checkpoint_of_the_same_step_is_refused() -> None:
    core = going_back()
    before = everything(core)
    with pytest.raises(CheckpointRefused, match="is of run other"):
        core.join(RankHello("1.2", 1, 2, 2, resume=CheckpointPosition("other", 2)), 0.0)
    assert_same(core, before)


def test_a_rank_of_another_run_is_fenced_though_its_generation_has_the_same_number() -> None:
    core = half_joined()
    number, before = core._ledger.generation.number, everything(core)
    words = f"{number} is of run gone, .* serves run {core.run_id}: it was restarted without"
    with pytest.raises(GenerationFenced, match=words):
        core.join(RankHello("1.1", 1, 2, number, run_id="gone"), 0.0)
    assert_same(core, before)
    core.join(RankHello("1.1", 1, 2, number, run_id=core.run_id), 0.0)
    assert core._ledger.ranks[1].connected


def test_a_hello_that_fails_its_generation_is_refused_and_gets_no_welcome() -> None:
    run = under_way_and_retained()
    run.begin()
    run.load(2, 0)
    effects = run.say(1, 2, resume=CheckpointPosition("run", 1))
    failed, refused = effects
    assert isinstance(failed, FailRanks)
    assert isinstance(refused, RefuseRank)
    assert (refused.client_id, refused.error) == ("1.2", failed.error)


def test_after_a_restart_no_step_is_committed_before_every_rank_is_back_and_has_committed() -> None:
    run = Run()
    run.run_to(0)
    run.hungry()
    run.restart()
    for rank, committed in ((0, 1), (1, 2)):
        run.say(rank, 1, taken=1, committed=0, received={1: 1}, run_id="run")
        run.perform(run.core.commit(rank, 1, run.now))
        assert run.core.statistics().steps_committed == committed
