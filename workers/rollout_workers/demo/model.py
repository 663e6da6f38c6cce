"""A small causal transformer over packed samples, whose cost grows with length as a real one's.

Attention runs sample by sample inside a packed micro-batch, so no sample sees another and a
sample of s tokens costs a*s^2 + b*s. `flops` counts both from the shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, pad, scaled_dot_product_attention

from rollout_workers.demo.data import VOCABULARY


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model."""

    vocabulary: int = VOCABULARY
    width: int = 64
    layers: int = 2
    heads: int = 2

    def flops(self, lengths: Sequence[int]) -> float:
        """Floating-point operations to train once on samples of these lengths.

        Forward, a multiply and an add each count one: 24*width^2 a token and layer in matrices,
        2*width*s^2 a layer in causal attention, 2*width*vocabulary a token in the output; backward
        is twice that. Norms, softmax and the optimizer are not counted.
        """
        width = self.width
        per_token = self.layers * 24 * width * width + 2 * width * self.vocabulary
        forward = sum(per_token * s + self.layers * 2 * width * s * s for s in lengths)
        return 3.0 * forward


#: Small enough for two cores, and its samples large enough to dwarf what a step costs by itself.
SHAPE = Shape()


class Transformer(nn.Module):
    """Token ids in, logits of the next token out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        frequencies = 10_000.0 ** -torch.linspace(0, 1, shape.width // 2)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, bounds: list[int]) -> Tensor:
        """int64[tokens], int64[tokens], n + 1 bounds of n samples -> float[tokens, vocabulary]."""
        angles = position_ids[:, None] * self.get_buffer("frequencies")
        hidden = self.embedding(input_ids) + torch.cat([angles.sin(), angles.cos()], dim=-1)
        for block in self.blocks:
            hidden = block(hidden, bounds)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor, bounds: list[int]) -> Tensor:
        hidden = hidden + self.out(self._attend(self.qkv(self.attention_norm(hidden)), bounds))
        added: Tensor = self.down(gelu(self.up(self.mlp_norm(hidden))))
        return hidden + added

    def _attend(self, qkv: Tensor, bounds: list[int]) -> Tensor:
        """Causal attention inside each sample, float[tokens, 3*width] -> [tokens, width]."""
        tokens = qkv.shape[0]
        query, key, value = qkv.view(tokens, 3, self.heads, -1).permute(1, 2, 0, 3).unbind()
        attended = [
            scaled_dot_product_attention(
                query[None, :, start:stop], key[None, :, start:stop], value[None, :, start:stop],
                is_causal=True,
            )
            for start, stop in pairwise(bounds)
        ]  # fmt: skip
        return torch.cat(attended, dim=2)[0].transpose(0, 1).reshape(tokens, -1)


def token_losses(logits: Tensor, input_ids: Tensor) -> Tensor:
    """Loss of each token given those before it, float[tokens].

    The first token of a sample is predicted from the sample before it, which means nothing: its
    loss mask is zero.
    """
    losses = cross_entropy(logits[:-1], input_ids[1:], reduction="none")
    return pad(losses, (1, 0))
