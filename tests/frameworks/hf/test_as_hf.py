"""`model(**micro_batch.as_hf())` against models of transformers."""

import dataclasses
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from rollout_workers.micro_batch.collate import CollateConfig, collate
from rollout_workers.micro_batch.layouts import Collation
from rollout_workers.micro_batch.loss import LossConfig
from tests.workers.micro_batch.batches import HEADER, batch, received
from tests.workers.support.peers import filler, sample

ROLLOUTS = [
    ([5, 6, 7, 9, 3], [0, 0, 1, 1, 1]),
    ([8, 9], [1, 1]),  # the first token has nothing before it, whatever the mask says
    ([1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 1, 0, 1, 1, 0, 1, 1, 1]),
    ([4], [1]),
]
#: Tokens that the loss counts and that have others before them.
COUNTED = 10
SIZES = {
    "vocab_size": 13, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
FORMS: dict[str, CollateConfig] = {
    "packed": CollateConfig(LossConfig(1)),
    "of samples' multiple": CollateConfig(LossConfig(1), sample_length_multiple=4),
    "of fixed length": CollateConfig(LossConfig(1), packed_length=40),
    "of both": CollateConfig(LossConfig(1), sample_length_multiple=4, packed_length=40),
    "padded": CollateConfig(LossConfig(1), Collation.PADDED),
    "jagged": CollateConfig(LossConfig(1), Collation.JAGGED),
}


def tiny(kind: str, attention: str) -> nn.Module:
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**SIZES, attn_implementation=attention)
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config).double()
    return model


def gradients(model: nn.Module, loss: Tensor) -> Tensor:
    found = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([item.flatten() for item in found])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_gradients_are_those_of_a_run_a_sample(form: str, kind: str, attention: str) -> None:
    model = tiny(kind, attention)
    alone = torch.zeros((), dtype=torch.float64)
    for ids, mask in ROLLOUTS:
        logits = model(torch.tensor([ids])).logits[0, :-1].float()
        losses = nn.functional.cross_entropy(
            logits, torch.tensor(ids[1:], dtype=torch.int64), reduction="none"
        )
        alone = alone + (losses * torch.tensor(mask[1:])).sum() / COUNTED
    header = HEADER.model_copy(update={"loss_tokens": COUNTED})
    found = batch(*(sample(*each) for each in ROLLOUTS), config=FORMS[form], header=header)
    arguments: dict[str, Any] = found.as_hf()
    loss = model(**arguments, num_items_in_batch=1).loss * found.loss_scale
    assert loss.item() == pytest.approx(alone.item(), rel=1e-6)
    torch.testing.assert_close(
        gradients(model, loss), gradients(model, alone), rtol=1e-5, atol=1e-7
    )


def test_left_padding_gives_the_same_loss() -> None:
    model = tiny("Llama", "sdpa")
    right = batch(*(sample(*each) for each in ROLLOUTS), config=FORMS["padded"])
    left = dataclasses.replace(right).as_padded(side="left", multiple_of=8)
    losses = [model(**each.as_hf()).loss.item() for each in (right, left)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_filler_has_a_loss_of_zero_and_a_backward_pass(form: str) -> None:
    """By the model's own mean it would be NaN: none of its labels counts."""
    model = tiny("Llama", "sdpa")
    found = collate(received(filler(3, 0, sample([4, 5], [1, 1]))), HEADER, FORMS[form])
    arguments: dict[str, Any] = found.as_hf()
    loss = model(**arguments, num_items_in_batch=1).loss * found.loss_scale
    assert loss.item() == 0.0
    assert not gradients(model, loss).any()
