"""Reports to a producer: the trainer's progress, and its dropped samples."""

import pytest

from rollout_dispatcher.core.effects import Advised, PushAnswered
from rollout_dispatcher.core.waiting import TrainerProgress
from tests.support.core.cores import Bench
from tests.support.samples import make_sample


def push(bench: Bench, by: str, count: int, version: int | None = 1) -> None:
    first = bench.core.statistics().accepted
    names = [f"{by}{first + at}" for at in range(count)]
    bench.push(*[make_sample(name, policy_version=version) for name in names], by=by)


def test_before_a_version_is_reported_only_what_comes_in_is_known() -> None:
    bench = Bench(batch=4, window=6, capacity=8)
    push(bench, "p", 3)
    assert bench.core.trainer_progress == TrainerProgress(None, None, None, 5)
    assert bench.core.trainer_progress.staleness(1) is None


def test_a_sample_is_expected_behind_the_steps_that_what_is_buffered_makes() -> None:
    bench = Bench(batch=4, window=6, capacity=20)
    bench.perform(bench.core.set_policy_version(7, bench.now, 0))
    found = []
    for _ in range(6):
        push(bench, "p", 2, version=6)
        found.append(
            (bench.core.trainer_progress.expected_version, bench.core.trainer_progress.remaining)
        )
    assert found == [(7, 18), (8, 16), (8, 14), (9, 12), (9, 10), (10, 8)]
    assert bench.core.trainer_progress.staleness(5) == 2
    assert bench.core.trainer_progress.staleness(8) == 0


def test_and_behind_those_that_are_under_way() -> None:
    bench = Bench(batch=4, window=6, capacity=20)
    bench.join()
    bench.perform(bench.core.set_policy_version(7, bench.now, 0))
    push(bench, "p", 6)
    bench.hungry()
    assert len(bench.planned) == 1
    assert bench.core.trainer_progress[:3] == (7, 8, 8)
    push(bench, "p", 2)
    assert bench.core.trainer_progress[:3] == (7, 8, 9)
    bench.train(0)
    assert len(bench.planned) == 2
    assert bench.core.trainer_progress[:3] == (7, 8, 8)  # the next report is on its way
    bench.perform(bench.core.set_policy_version(8, bench.now, 1))
    assert bench.core.trainer_progress[:3] == (8, 9, 9)


def test_nothing_remains_while_pushes_wait() -> None:
    bench = Bench(batch=4, window=4, capacity=4)
    push(bench, "p", 4)
    assert bench.core.trainer_progress.remaining == 0
    assert bench.push(make_sample("held"), by="q") is None
    assert bench.core.trainer_progress.remaining == 0


@pytest.mark.parametrize(("versions", "oldest"), [((3, 2, None), 2), ((None,), None)])
def test_an_answer_knows_the_oldest_version_of_its_push(
    versions: tuple[int | None, ...], oldest: int | None
) -> None:
    bench = Bench()
    samples = [make_sample(f"s{at}", policy_version=it) for at, it in enumerate(versions)]
    bench.push(*samples, by="p")
    (answer,) = [effect for effect in bench.log if isinstance(effect, PushAnswered)]
    assert answer.oldest == oldest


def test_who_pushes_versions_that_the_trainer_cannot_have_is_advised_once_a_connection() -> None:
    bench = Bench(batch=4, window=6, capacity=20, max_staleness=1)
    push(bench, "p", 1, version=90)  # before the first report nobody knows
    bench.perform(bench.core.set_policy_version(7, bench.now, 0))
    push(bench, "p", 2, version=8)  # of weights whose report is on its way
    assert not [effect for effect in bench.log if isinstance(effect, Advised)]
    for _ in range(2):
        push(bench, "p", 2, version=9)
    bench.perform(bench.core.producer_disconnected("p", bench.now))
    push(bench, "p", 1, version=10)
    advised = [effect for effect in bench.log if isinstance(effect, Advised)]
    assert [effect.producer for effect in advised] == ["p", "p"]
    assert advised[0].text.startswith("samples have policy_version 9, and the trainer stands at 7")
