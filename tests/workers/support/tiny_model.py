"""A model small enough to train in a test, whose loss sees every token before it in its sample."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH = 17, 6


class TinyModel(nn.Module):
    """Predicts each token from the mean of those before it; float64."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, dtype=torch.float64, generator=generator) / 3)

        self.embedding = parameter(VOCABULARY, WIDTH)
        self.start = parameter(WIDTH)
        self.mixing = parameter(WIDTH, WIDTH)
        self.head = parameter(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, bounds: list[int], *, shifted: bool = False) -> Tensor:
        """Loss of every token, [total], of samples that lie between consecutive bounds.

        shifted: score token i by the logits of token i - 1 of the whole row, as trainers of causal
            models do; the first token of a sample then meets the logits of the sample before.
        """
        rows = [input_ids[a:b] for a, b in pairwise(bounds)]
        if not shifted:
            return torch.cat([self.sample_loss(ids) for ids in rows])
        logits = torch.cat([self.logits(ids) for ids in rows])
        losses = functional.cross_entropy(logits[:-1], input_ids[1:], reduction="none")
        return functional.pad(losses, (1, 0))

    def sample_loss(self, ids: Tensor) -> Tensor:
        """Loss of every token of one sample, [tokens]."""
        return functional.cross_entropy(self._logits(ids)[:-1], ids, reduction="none")

    def logits(self, ids: Tensor) -> Tensor:
        """What is expected behind each token of a sample, [tokens, VOCABULARY]."""
        return self._logits(ids)[1:]

    def _logits(self, ids: Tensor) -> Tensor:
        """What is expected before, between and after the tokens, [tokens + 1, VOCABULARY]."""
        before = torch.cat([self.start[None], self.embedding[ids]])
        context = before.cumsum(0) / torch.arange(1, len(ids) + 2, device=ids.device)[:, None]
        return torch.tanh(context @ self.mixing) @ self.head


def optimizers(models: dict[str, TinyModel]) -> dict[str, torch.optim.Optimizer]:
    """The optimizers under test, by the name of their model."""
    return {
        "sgd": torch.optim.SGD(models["sgd"].parameters(), lr=0.5, momentum=0.9),
        "adamw": torch.optim.AdamW(models["adamw"].parameters(), lr=0.05, weight_decay=0.1),
    }


def flat(model: nn.Module) -> list[float]:
    """All parameters, one after the other."""
    return flat_tensor(model).tolist()


def flat_tensor(model: nn.Module) -> Tensor:
    """The same, for autograd."""
    return torch.cat([item.reshape(-1) for item in model.parameters()])
