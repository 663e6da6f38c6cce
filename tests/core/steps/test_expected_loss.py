"""The loss tokens that a step is expected to have: fixed by its plan, whatever becomes of it."""

import json

import pytest

from rollout_dispatcher.core.steps.step import OpenStep
from tests.core.steps.test_attempts import Ranks
from tests.core.steps.test_checkpoints import Run
from tests.support.core.cores import Bench
from tests.support.samples import make_sample


def next_step(bench: Bench) -> OpenStep:
    """The step that ranks get next."""
    bench.hungry()
    bench.pass_time(3.0)
    return bench.core._ledger.steps[bench.core._ledger.steps.committed + 1]


@pytest.mark.parametrize("loss_tokens", [1, 3, 7])
def test_where_all_samples_have_as_many_it_is_what_the_step_has(loss_tokens: int) -> None:
    bench = Bench(batch=4, window=6, capacity=200)
    bench.push_plain(170, tokens=loss_tokens + 1)
    bench.join()
    for number in range(40):
        assert next_step(bench).expected_loss_tokens == 4 * loss_tokens
        bench.train(number)


def test_it_is_of_arrivals_and_not_of_what_was_chosen() -> None:
    bench = Bench(batch=2, window=4, capacity=8)
    bench.push(*[make_sample(f"{at}", tokens) for at, tokens in enumerate([101, 9, 51, 9])])
    bench.join()
    assert bench.trained(0) == {"1", "2"}
    step = next_step(bench)
    assert (step.usual_loss, step.expected_loss_tokens) == (41.5, 83)


def test_where_no_token_counts_it_is_0() -> None:
    bench = Bench(batch=4, window=4)
    bench.push_plain(4, tokens=1)
    bench.join()
    assert next_step(bench).expected_loss_tokens == 0


def described(step: OpenStep) -> tuple[int, float, str]:
    return step.expected_loss_tokens, step.usual_loss, step.digest


def test_a_new_generation_a_restart_and_a_rewind_give_the_same_to_the_bit() -> None:
    run = Run(steps=0)
    run.push(*[make_sample(f"{at}", 2 + at * at % 37) for at in range(28)])
    given = []
    for number in range(4):
        given.append(described(next_step(run)))
        run.train(number)
    given.append(described(next_step(run)))
    run.begin()
    assert described(next_step(run)) == given[4]
    run.restart()
    run.begin()
    run.load(0)
    for number in range(1, 5):
        assert described(next_step(run)) == given[number]
        run.train(number)
    means = [mean for _, mean, _ in given]
    assert len({*means}) == len(means)
    assert json.loads(json.dumps(means)) == means, "as the journal keeps them"


def test_a_step_that_loses_samples_keeps_its_mean() -> None:
    ranks = Ranks()
    ranks.push(*[make_sample(f"{at}", 3 + at, store="files") for at in range(4)])
    before = ranks.core._ledger.steps[0]
    ranks.lose(1, 0, "3")
    after = ranks.core._ledger.steps[0]
    assert (before.expected_loss_tokens, after.expected_loss_tokens) == (14, round(3 * 3.5))
    assert after.usual_loss == before.usual_loss
