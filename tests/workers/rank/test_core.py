"""What a DP rank holds and says, message by message."""

import pytest

from rollout_dispatcher.ends import EndReason
from rollout_dispatcher.errors import (
    GenerationFenced,
    StepContractError,
)
from rollout_dispatcher.protocol import messages as m
from rollout_workers.rank.core import RankCore
from tests.workers.rank.cores import connected, deliver, hear, reconnect, spoken, take
from tests.workers.support.peers import rank_welcome, step


def test_a_step_is_prepared_at_once_and_taken_only_when_released() -> None:
    core = connected()
    assert hear(core, step(4)) == [m.Prepared(step=4, digest="d")]
    deliver(core, 4, 0)
    assert core.ready() is None
    hear(core, m.Release(step=4))
    assert take(core) == 4
    assert spoken(core) == [m.Demand(taken=4, hungry=False)]


def test_what_happened_is_said_in_that_order_and_only_the_newest_of_a_kind() -> None:
    core = connected()
    hear(core, step(0), m.Release(step=0))
    take(core)
    core.set_policy_version(1)
    core.set_policy_version(2)
    core.commit(0)
    core.demand(hungry=True)
    core.demand(hungry=False)
    core.demand(hungry=True)
    assert spoken(core) == [
        m.Demand(taken=0, hungry=False),
        m.PolicyVersion(policy_version=2, first_step=0),
        m.Commit(step=0),
        m.Demand(taken=0, hungry=True),
    ]


def test_a_hello_tells_all_that_a_lost_connection_may_have_swallowed() -> None:
    core = connected()
    hear(core, step(0, 2), step(1, 3), m.Release(step=0), m.Release(step=1))
    deliver(core, 0, 0)
    take(core)
    core.commit(0)
    core.set_policy_version(9)
    take(core)
    deliver(core, 1, 0)
    deliver(core, 1, 1)
    core.lost()
    core.demand(hungry=True)
    assert spoken(core) == []
    hello = core.hello()
    assert (hello.generation, hello.run_id, hello.taken, hello.committed) == (1, "run", 1, 0)
    assert (hello.received, hello.hungry, hello.policy_version) == ([(1, 2)], True, 9)


def first_step_of(core: RankCore, version: int) -> int:
    """The first step that trains with a version reported now, as the dispatcher hears of it."""
    spoken(core)
    core.set_policy_version(version)
    (said,) = spoken(core)
    assert isinstance(said, m.PolicyVersion)
    assert core.hello().policy_step == said.first_step
    return said.first_step


def test_a_version_counts_from_the_first_step_that_has_not_begun_to_train() -> None:
    core = connected()
    assert first_step_of(core, 1) == 0
    hear(core, *(step(n, 2) for n in range(3)), *(m.Release(step=n) for n in range(3)))
    take(core)
    assert first_step_of(core, 2) == 0, "taken, and nothing of it was trained"
    core.begin(0)
    assert first_step_of(core, 3) == 1
    take(core)
    assert first_step_of(core, 4) == 1
    core.commit(0)
    assert first_step_of(core, 5) == 1
    core.commit(1)
    assert first_step_of(core, 6) == 2


def test_a_version_counts_for_all_taken_steps_that_have_not_begun() -> None:
    core = connected()
    hear(core, step(0), step(1), m.Release(step=0), m.Release(step=1))
    take(core), take(core)
    assert first_step_of(core, 1) == 0
    core.begin(1)
    assert first_step_of(core, 2) == 2


def test_a_version_reported_before_the_first_step_counts_from_where_training_goes_on() -> None:
    core = connected(committed=41)
    assert first_step_of(core, 3) == 42
    core.resume(m.CheckpointPosition(run_id="run", step=20))
    assert (core.hello().policy_version, core.hello().policy_step) == (3, 21)


def test_the_same_version_again_is_no_news() -> None:
    core = connected()
    assert first_step_of(core, 3) == 0
    hear(core, step(0), m.Release(step=0))
    take(core)
    core.begin(0)
    spoken(core)
    core.set_policy_version(3)
    assert spoken(core) == []
    assert core.hello().policy_step == 0


def test_a_version_that_a_step_has_trained_with_is_said_though_a_newer_one_follows() -> None:
    core = connected()
    hear(core, step(0), m.Release(step=0))
    take(core)
    spoken(core)
    core.set_policy_version(1)
    core.begin(0)
    core.set_policy_version(2)
    assert spoken(core) == [
        m.PolicyVersion(policy_version=1, first_step=0),
        m.PolicyVersion(policy_version=2, first_step=1),
    ]


def test_a_version_may_not_go_back_once_training_has_begun() -> None:
    core = connected()
    core.set_policy_version(5)
    assert first_step_of(core, 4) == 0
    hear(core, step(0), m.Release(step=0))
    take(core)
    with pytest.raises(StepContractError, match=r"policy version 3 comes after 4.*only rise"):
        core.set_policy_version(3)
    assert core.hello().policy_version == 4


def test_a_repeated_delivery_is_prepared_again_and_otherwise_ignored() -> None:
    core = connected()
    hear(core, step(0, 2), m.Release(step=0))
    deliver(core, 0, 0)
    take(core)
    reconnect(core)
    assert hear(core, step(0, 2), m.Release(step=0)) == [m.Prepared(step=0, digest="d")]
    deliver(core, 0, 0)
    deliver(core, 0, 1)
    assert [item.header.index for item in core.begin(0).micro_batches] == [0, 1]


def test_taking_more_steps_than_may_be_open_says_to_commit() -> None:
    core = connected()
    hear(core, *(step(n) for n in range(3)), *(m.Release(step=n) for n in range(3)))
    take(core)
    take(core)
    with pytest.raises(StepContractError, match=r"2 steps from step 0 on .* call step\.commit\(\)"):
        core.ready()
    core.commit(0)
    assert take(core) == 2


def test_a_released_step_is_begun_before_the_dispatcher_says_where_to_stop_or_never() -> None:
    core = connected()
    hear(core, step(0), m.Release(step=0))
    take(core)
    core.commit(0)
    hear(core, step(1), m.Release(step=1), m.LastStep(step=0))
    assert core.ready() is None
    hear(core, m.LastStep(step=None))  # who was lost is there again
    assert take(core) == 1
    hear(core, m.LastStep(step=0))
    core.commit(1)
    core.demand(hungry=True)
    assert spoken(core) == [m.Commit(step=1), m.Demand(taken=1, hungry=True)]


def test_the_end_comes_after_the_steps_that_were_announced_before_it() -> None:
    core = connected()
    hear(core, step(0), m.End(reason=EndReason.ENDED))
    assert (core.exhausted, core.finished) == (False, False)
    assert core.ready() is None
    hear(core, m.Release(step=0))
    take(core)
    assert (core.exhausted, core.finished) == (True, False)
    core.commit(0)
    assert core.finished


def test_another_generation_than_ours_is_a_fence() -> None:
    core = connected()
    core.lost()
    with pytest.raises(GenerationFenced, match=r"belongs to generation 1, .* 2 now"):
        hear(core, rank_welcome(generation=2))


def times(step: int, key: str = "update") -> m.StepTimes:
    return m.StepTimes(step=step, cost_key=key, busy_s=[0.5, 1.5], collective_s=[0.0, 0.1])


def telling() -> RankCore:
    """A rank in two steps."""
    core = connected(prefetch=2, max_open_steps=4)
    for number in range(2):
        hear(core, step(number), m.Release(step=number))
        take(core)
    spoken(core)
    return core


def passes(*keys: str) -> list[m.PassTimes]:
    return [m.PassTimes(cost_key=key, busy_s=[0.5, 1.5], collective_s=[0.0, 0.1]) for key in keys]


def as_heard(messages: list[m.Message]) -> list[m.Message]:
    """As the dispatcher has them: what it is sent, and no more."""
    return [type(one).model_validate_json(one.model_dump_json()) for one in messages]


def test_what_passes_took_is_in_the_commit_where_the_dispatcher_hears_it_there() -> None:
    core = telling()
    core.commit(0)
    core.report_times(times(0, "log-prob"))
    core.report_times(times(0))
    core.commit(1)
    core.report_times(times(1))
    assert as_heard(spoken(core)) == [
        m.Commit(step=0, times=passes("log-prob", "update")),
        m.Commit(step=1, times=passes("update")),
    ]


def test_what_is_known_after_the_commit_has_a_message_of_its_own() -> None:
    core = telling()
    core.commit(0)
    assert spoken(core) == [m.Commit(step=0)]
    core.report_times(times(0))
    core.commit(1)
    core.report_times(times(0, "critic"))
    assert spoken(core) == [times(0), m.Commit(step=1), times(0, "critic")]
