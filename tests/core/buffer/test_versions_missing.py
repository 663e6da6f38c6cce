"""Where staleness is limited: a sample says its version, or is exempt and never too old."""

import pytest

from rollout_dispatcher.core.buffer.phases import StalenessPolicy
from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.sample import Outcome, Sample
from tests.support.core.cores import Bench
from tests.support.samples import make_sample

A, R = Outcome.ACCEPTED, Outcome.REFUSED


def of_group(name: str, version: int | None, *, exempt: bool = False, size: int = 2) -> Sample:
    return make_sample(
        name, group_id="g", group_size=size, policy_version=version, staleness_exempt=exempt
    )


@pytest.mark.parametrize("policy", StalenessPolicy)
def test_a_sample_without_a_version_is_refused_where_staleness_is_limited(
    policy: StalenessPolicy,
) -> None:
    bench = Bench(max_staleness=1, staleness_policy=policy)
    pushed = [make_sample("a", policy_version=0), make_sample("b"), make_sample("c")]
    assert bench.push(*pushed) == (A, R, R)
    assert bench.errors()[0] == (
        "sample b has no policy_version, and --max-staleness is set: nobody could tell whether it "
        "is too old; push it with the version of the weights that generated it, or, if none did "
        "(a demonstration, replay), with staleness_exempt=True"
    )
    assert bench.core.statistics().refused == {"policy-version-missing": 2}
    assert Bench().push(make_sample("b")) == (A,)  # where it is not limited


def test_a_member_without_a_version_is_lacking_and_its_group_may_be_pushed_again() -> None:
    bench = Bench(max_staleness=1)
    assert bench.push(of_group("0", None), of_group("1", None)) == (R, R)
    assert bench.push(of_group("0", 3), of_group("1", 3)) == (A, A)


def test_who_came_before_a_member_without_a_version_passes_soft_caps_as_members_do() -> None:
    bench = Bench(batch=4, window=4, capacity=4, max_staleness=1, keep_incomplete=True)
    bench.push(*[make_sample(f"p{at}", policy_version=0) for at in range(4)])
    assert bench.push(of_group("0", 0), of_group("1", None)) == (A, R)


@pytest.mark.parametrize("restart", [False, True])
def test_what_is_exempt_is_trained_on_however_old(restart: bool) -> None:
    bench = Bench(batch=2, window=2, max_staleness=1, durable=True)
    bench.push(make_sample("old", policy_version=0))
    bench.push(make_sample("demonstration", staleness_exempt=True))
    bench.push(make_sample("replay", policy_version=0, staleness_exempt=True))
    if restart:
        bench.core = DispatcherCore(bench.core.config)
        bench.perform(bench.core.restore(bench.memory.remembered(), bench.now))
    bench.perform(bench.core.set_policy_version(9, bench.now, 0))
    bench.join()
    bench.hungry()
    assert bench.trained(0) == {"demonstration", "replay"}
    assert bench.dropped(DropReason.STALE) == 1


@pytest.mark.parametrize(
    ("members", "trained"),
    [
        ([(8, False), (0, True)], True),
        ([(8, False), (None, True)], True),
        ([(0, False), (8, True)], False),
        ([(None, True), (None, True)], True),
    ],
)
def test_the_version_of_a_group_is_that_of_its_worst_member_that_is_not_exempt(
    members: list[tuple[int | None, bool]], trained: bool
) -> None:
    bench = Bench(batch=2, window=2, max_staleness=1)
    for name, (version, exempt) in zip("ab", members, strict=True):
        assert bench.push(of_group(name, version, exempt=exempt)) == (A,)
    bench.perform(bench.core.set_policy_version(9, bench.now, 0))
    bench.join()
    bench.hungry()
    assert bench.dropped(DropReason.STALE) == (0 if trained else 2)


def test_before_the_first_report_samples_are_taken_and_are_judged_when_planned() -> None:
    bench = Bench(batch=2, window=2, max_staleness=1)
    bench.push(make_sample("a", policy_version=0), make_sample("b", policy_version=5))
    bench.perform(bench.core.set_policy_version(5, bench.now, 0))
    bench.push(make_sample("c", policy_version=5))
    bench.join()
    bench.hungry()
    assert bench.trained(0) == {"b", "c"}


def test_steps_of_a_trainer_that_reports_no_version_are_counted_until_it_does() -> None:
    for limit, expected in ((1, 2), (None, 0)):
        bench = Bench(batch=2, window=2, max_staleness=limit)
        bench.join()
        for step in range(2):
            bench.push(*[make_sample(f"{step}{at}", policy_version=0) for at in range(2)])
            bench.hungry()
            bench.train(step)
        assert bench.core.statistics().steps_unjudged == expected
        bench.perform(bench.core.set_policy_version(0, bench.now, 2))
        assert bench.core.statistics().steps_unjudged == 0
