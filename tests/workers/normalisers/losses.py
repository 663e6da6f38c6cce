"""The losses under test, what is pushed for them, and what each is, as a textbook has it."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout_workers import RolloutProducer, RolloutSample
from tests.workers.support.tiny_model import VOCABULARY, TinyModel, flat_tensor

GROUPS, BATCH_GROUPS = 14, 5
LONGEST = 40
#: The main loss, which has no name of its own here.
MAIN = "group-mean"
#: What the stream is asked for beside it, and what the trainer makes by itself.
LOSSES = {
    "tokens": "token-mean",
    "sequences": "sequence-mean",
    "sums": "sequence-mean-token-sum",
    "constant": f"constant:{LONGEST}",
}
MADE = "made"
NAMES = ("loss", *LOSSES, MADE)


def rollouts() -> list[RolloutSample]:
    """Groups of four or fewer, among them one of a single sample and two samples without a group.

    Every seventh sample has no token that the loss counts.
    """
    random = np.random.default_rng(5)
    made: list[RolloutSample] = []
    for group in range(GROUPS):
        for member in range(1 if group == GROUPS - 1 else 4):
            index, tokens = len(made), int(random.integers(2, LONGEST))
            fields = {
                "input_ids": random.integers(0, VOCABULARY, tokens),
                "loss_mask": random.random(tokens) < (0.0 if index % 7 == 3 else 0.6),
            }
            alone = group == 6 and member < 2
            made.append(RolloutSample(fields, f"s{index}", None if alone else f"g{group}"))
    return made


#: The last of these groups loses a member on the way: it is never pushed.
SHORT = frozenset({"g3", "g6", f"g{GROUPS - 1}"})
LOST = "s15"


def pushed() -> dict[str, RolloutSample]:
    return {one.sample_id or "": one for one in rollouts() if one.sample_id != LOST}


def push_all(endpoint: str) -> None:
    """Groups as a whole; those that are short are closed with the members that came."""
    groups: defaultdict[str | None, list[RolloutSample]] = defaultdict(list)
    for one in pushed().values():
        groups[one.group_id].append(one)
    with RolloutProducer(endpoint, group_size=4) as producer:
        for name, members in groups.items():
            producer.push_many(members)
            if name in SHORT:
                producer.close_group(name, keep=True)
        producer.end_stream()


# -- the textbook


Counted = list[tuple[str | None, Tensor, Tensor]]


def textbook(name: str, model: TinyModel, chosen: list[RolloutSample]) -> Tensor:
    """The loss of that name of a whole step, in one process; 0 where nothing has a weight."""
    loss = LOSSES.get(name, MAIN if name == "loss" else "token-mean")
    found: Counted = []
    for one in chosen:
        ids = torch.as_tensor(one.fields["input_ids"])
        weights = made_mask(ids) if name == MADE else torch.as_tensor(one.fields["loss_mask"])
        weights = weights.to(torch.float64, copy=True)
        if name != MADE:  # the first token is no target of a loss that the stream weighs
            weights[0] = 0
        found.append((one.group_id or one.sample_id, model.sample_loss(ids), weights))
    if not any(weights.any() for _, _, weights in found):
        return flat_tensor(model).sum() * 0.0
    word, _, number = loss.partition(":")
    return FORMULAS[word](found, float(number or 0))


def made_mask(ids: Tensor) -> Tensor:
    """What a trainer might think of during a step: the tokens to train on."""
    return (ids % 3 == 1).double()


def token_mean(found: Counted, _: float) -> Tensor:
    total = sum(float(w.sum()) for _, _, w in found)
    return sum_of((losses * w).sum() for _, losses, w in found) / total


def sequence_mean(found: Counted, _: float) -> Tensor:
    means = [(losses * w).sum() / w.sum() for _, losses, w in found if w.any()]
    return torch.stack(means).mean()


def sequence_mean_token_sum(found: Counted, _: float) -> Tensor:
    return torch.stack([(losses * w).sum() for _, losses, w in found if w.any()]).mean()


def constant(found: Counted, number: float) -> Tensor:
    return sum_of((losses * w).sum() for _, losses, w in found) / (number * len(found))


def group_mean(found: Counted, _: float) -> Tensor:
    groups: defaultdict[str | None, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for group, losses, w in found:
        groups[group].append((losses, w))
    means = []
    for members in groups.values():
        losses, weights = (torch.cat(parts) for parts in zip(*members, strict=True))
        if weights.any():
            means.append((losses * weights).sum() / weights.sum())
    return torch.stack(means).mean()


def sum_of(losses: Any) -> Tensor:
    return torch.stack(list(losses)).sum()


FORMULAS: Mapping[str, Callable[[Counted, float], Tensor]] = {
    "token-mean": token_mean,
    "sequence-mean": sequence_mean,
    "sequence-mean-token-sum": sequence_mean_token_sum,
    "constant": constant,
    "group-mean": group_mean,
}
