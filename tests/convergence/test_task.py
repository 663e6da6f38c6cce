"""Claims about the task: what is right, what a policy writes, and how good it is."""

import numpy as np
import pytest
import torch

from tests.convergence.base import batch, first_policy
from tests.convergence.policy import Policy, generate
from tests.convergence.rollouts import GROUP, Rollouts, without_the_longest
from tests.convergence.task import BASE, END, MAX_CHAIN, Problem, demonstration, problem


@pytest.fixture(scope="module")
def policy() -> Policy:
    """One that has learnt a little, so that its chains end."""
    return first_policy(0, 20)


def value(digits: list[int]) -> int:
    return sum(digit * BASE**index for index, digit in enumerate(digits))


def test_the_chain_of_a_problem_adds_up() -> None:
    random = np.random.default_rng(3)
    for _ in range(50):
        asked = problem(random)
        assert asked.chain[-1] == END
        rows = asked.chain[:-1].reshape(-1, 4)
        total = value(rows[:, 2].tolist()) + int(rows[-1, 3]) * BASE**asked.digits
        assert total == value(asked.a.tolist()) + value(asked.b.tolist())


def test_of_demonstrations_for_a_long_problem_the_right_ones_are_the_longest() -> None:
    random = np.random.default_rng(4)
    asked = problem(random, 6)
    written = [demonstration(asked, random) for _ in range(300)]
    right = [np.array_equal(chain, asked.chain) for chain in written]
    assert 0 < sum(right) < 150
    assert max(map(len, written)) == len(asked.chain)


def test_generation_and_training_agree_on_every_logit(policy: Policy) -> None:
    asked = Problem(np.array([1, 2, 3]), np.array([4, 0, 2]))
    ids, places, _ = batch([asked], [asked.chain])
    with torch.no_grad():
        expected = policy(ids, places)[0]
        start = len(asked.prompt)
        cache = policy.prefill(ids[:, :start], places[:, :start])
        for at in range(start, ids.shape[1]):
            found = policy.next_logits(ids[:, at], places[:, at], torch.tensor([at]), cache)
            torch.testing.assert_close(found[0], expected[at], atol=1e-5, rtol=1e-5)


def test_the_probability_of_the_right_chain_is_how_often_it_is_written(policy: Policy) -> None:
    asked = Problem(np.array([1]), np.array([2]))
    ids, places, counted = batch([asked], [asked.chain])
    with torch.no_grad():
        likely = float((policy.logprobs(ids, places) * counted).sum().exp())
    chains = generate(policy, [asked] * 4000, torch.Generator().manual_seed(1))
    often = np.mean([np.array_equal(chain, asked.chain) for chain in chains])
    assert often == pytest.approx(likely, abs=4 * np.sqrt(likely / 4000) + 1e-3)
    assert all(len(chain) <= MAX_CHAIN for chain in chains)


def test_rollouts_repeat_and_their_advantages_are_of_their_groups(policy: Policy) -> None:
    written = Rollouts(7).write(policy, 5 * GROUP)
    again = Rollouts(7).write(policy, 5 * GROUP)
    for one, other in zip(written, again, strict=True):
        assert np.array_equal(one.fields["input_ids"], other.fields["input_ids"])
    advantages = np.array([one.fields["advantage"] for one in written]).reshape(5, GROUP)
    assert np.allclose(advantages.sum(axis=1), 0, atol=1e-4)


def test_dropping_the_longest_tenth_keeps_the_order_of_the_rest(policy: Policy) -> None:
    written = Rollouts(8).write(policy, 80)
    kept = without_the_longest(written, 0.1)
    assert len(kept) == 72
    assert sorted(one.tokens for one in kept) == sorted(one.tokens for one in written)[:72]
    places = [next(at for at, one in enumerate(written) if one is each) for each in kept]
    assert places == sorted(places)
