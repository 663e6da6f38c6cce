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

    def forward(self, input_ids: Tensor, bounds: list[int]) -> Tensor:
        """Loss of every token, [total], of samples that lie between consecutive bounds."""
        return torch.cat([self.sample_loss(input_ids[a:b]) for a, b in pairwise(bounds)])

    def sample_loss(self, ids: Tensor) -> Tensor:
        """Loss of every token of one sample, [tokens]."""
        before = torch.cat([self.start[None], self.embedding[ids[:-1]]])
        context = before.cumsum(0) / torch.arange(1, len(ids) + 1)[:, None]
        logits = torch.tanh(context @ self.mixing) @ self.head
        return functional.cross_entropy(logits, ids, reduction="none")


def optimizers(models: dict[str, TinyModel]) -> dict[str, torch.optim.Optimizer]:
    """The optimizers under test, by the name of their model."""
    return {
        "sgd": torch.optim.SGD(models["sgd"].parameters(), lr=0.5, momentum=0.9),
        "adamw": torch.optim.AdamW(models["adamw"].parameters(), lr=0.05, weight_decay=0.1),
    }


def flat(model: nn.Module) -> list[float]:
    """All parameters, one after the other."""
    return torch.cat([item.detach().reshape(-1) for item in model.parameters()]).tolist()
