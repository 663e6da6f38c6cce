"""The policy: a small causal transformer over padded rows, which also generates.

Rows are padded at the end, so that a causal mask is all that is needed to train. While generating,
every row goes on where its own tokens end.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, pad, scaled_dot_product_attention

from tests.convergence.task import (
    END,
    MAX_CHAIN,
    MAX_DIGITS,
    MAX_TOKENS,
    POSITIONS,
    VOCABULARY,
    Ints,
    Problem,
    positions,
)

WIDTH, LAYERS, HEADS = 32, 2, 4
#: Keys and values of each layer, [rows, heads, MAX_TOKENS, width / heads] each.
Cache = list[tuple[Tensor, Tensor]]


class Policy(nn.Module):
    """Token ids and their positions in, logits of the next token out."""

    def __init__(self, vocabulary: int = VOCABULARY, positions: int = POSITIONS) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(positions, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """int64[rows, tokens] twice -> float[rows, tokens, vocabulary]."""
        hidden = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            hidden, _, _ = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def logprobs(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Of each token given those before it in its row; float[rows, tokens], the first 0."""
        logits = self(input_ids, position_ids)[:, :-1]
        chosen = logits.gather(2, input_ids[:, 1:, None])[:, :, 0]
        return pad(chosen - logits.logsumexp(2), (1, 0))

    def prefill(self, input_ids: Tensor, position_ids: Tensor) -> Cache:
        """What generation needs of the prompts."""
        hidden, cache = self.tokens(input_ids) + self.positions(position_ids), []
        for block in self.blocks:
            hidden, key, value = block(hidden)
            room = (0, 0, 0, MAX_TOKENS - input_ids.shape[1])
            cache.append((pad(key, room), pad(value, room)))
        return cache

    def next_logits(self, token: Tensor, position: Tensor, at: Tensor, cache: Cache) -> Tensor:
        """Logits after one more token in each row, whose place in it is `at`; all [rows]."""
        hidden = (self.tokens(token) + self.positions(position))[:, None]
        for block, (keys, values) in zip(self.blocks, cache, strict=True):
            assert isinstance(block, _Block)
            hidden = block.extend(hidden, at, keys, values)
        logits: Tensor = self.head(self.norm(hidden[:, 0]))
        return logits


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self._qkv(hidden)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self._finish(hidden, attended), key, value

    def extend(self, hidden: Tensor, at: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One token a row, [rows, 1, width], at its own place; it is written to the cache."""
        query, key, value = self._qkv(hidden)
        rows = torch.arange(len(at))
        keys[rows, :, at], values[rows, :, at] = key[:, :, 0], value[:, :, 0]
        seen = torch.arange(keys.shape[2]) <= at[:, None]
        attended = scaled_dot_product_attention(query, keys, values, seen[:, None, None])
        return self._finish(hidden, attended)

    def _qkv(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, tokens, _ = hidden.shape
        split = self.qkv(self.attention_norm(hidden)).view(rows, tokens, 3, HEADS, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind()
        return query, key, value

    def _finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        added: Tensor = self.down(gelu(self.up(self.mlp_norm(hidden))))
        return hidden + added


def padded(rows: Sequence[Ints]) -> Tensor:
    """int64[rows, longest], zeros at the end."""
    return nn.utils.rnn.pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)


@torch.no_grad()
def generate(policy: Policy, asked: Sequence[Problem], chance: torch.Generator) -> list[Ints]:
    """A chain for each problem, drawn at temperature 1."""
    order = sorted(range(len(asked)), key=lambda index: asked[index].digits)
    asked = [asked[index] for index in order]
    ids = padded([each.prompt for each in asked])
    places = padded([positions(each.digits, 0) for each in asked])
    ends = torch.tensor([len(each.prompt) for each in asked])
    cache = policy.prefill(ids, places)
    rows = torch.arange(len(asked))
    token, place = ids[rows, ends - 1], places[rows, ends - 1]
    chains = torch.full((len(asked), MAX_CHAIN), END)
    for written in range(MAX_CHAIN):
        logits = policy.next_logits(token, place, ends[rows] - 1 + written, cache)
        token = torch.multinomial(logits.softmax(1), 1, generator=chance)[:, 0]
        chains[rows, written] = token
        going = token != END
        if not going.any():
            break
        token, rows = token[going], rows[going]
        cache = [(keys[going], values[going]) for keys, values in cache]
        place = torch.full_like(token, 2 * MAX_DIGITS + 2 + written)
    found: list[Ints] = [None] * len(asked)  # type: ignore[list-item]
    for row, index in zip(chains.numpy(), order, strict=True):
        found[index] = row[: 1 + int((row == END).argmax())] if (row == END).any() else row
    return found
