"""The demo's model and data: what is measured on them means something."""

import numpy as np
import pytest
import torch

from rollout_workers.demo.data import NOISE, PERMUTATION, rollout
from rollout_workers.demo.model import SHAPE, Transformer, token_losses


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(SHAPE)


def test_samples_of_a_pack_do_not_see_each_other(model: Transformer) -> None:
    lengths = [5, 1, 9]
    ids = torch.arange(sum(lengths)) % SHAPE.vocabulary
    positions = torch.cat([torch.arange(n) for n in lengths])
    together = model(ids, positions, [0, 5, 6, 15])
    parts = torch.split(ids, lengths)
    apart = [model(part, torch.arange(len(part)), [0, len(part)]) for part in parts]
    torch.testing.assert_close(together, torch.cat(apart))


def test_no_token_sees_a_later_one(model: Transformer) -> None:
    ids = torch.arange(12) % SHAPE.vocabulary
    changed = ids.clone()
    changed[8:] = 0
    before = model(ids, torch.arange(12), [0, 12])[:8]
    torch.testing.assert_close(model(changed, torch.arange(12), [0, 12])[:8], before)


def test_a_token_s_loss_is_that_of_predicting_it() -> None:
    logits = torch.zeros(3, 4)
    logits[0, 2] = 100.0  # after token 0 comes a 2, surely
    losses = token_losses(logits, torch.tensor([1, 2, 3]))
    torch.testing.assert_close(losses, torch.tensor([0.0, 0.0, float(np.log(4))]))


def test_a_rollout_is_the_same_whoever_makes_it() -> None:
    first, again, other = rollout(7, 50, 1), rollout(7, 50, 1), rollout(8, 50, 1)
    assert (first["input_ids"] == again["input_ids"]).all()
    assert (first["input_ids"] != other["input_ids"]).any()


def test_a_rollout_can_be_learnt_but_for_its_noise() -> None:
    ids = rollout(0, 20_000, 0)["input_ids"]
    learnt = (PERMUTATION[ids[:-1]] == ids[1:]).mean()
    assert learnt == pytest.approx(1 - 1 / NOISE, abs=0.02)


@pytest.mark.parametrize("tokens", [2, 3, 1000])
def test_the_loss_leaves_out_the_prompt_and_never_everything(tokens: int) -> None:
    mask = rollout(0, tokens, 0)["loss_mask"]
    assert not mask[0]
    assert mask[-1]
