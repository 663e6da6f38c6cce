"""The first token of a sample is never a target, whatever its mask says.

The README's loop on short samples whose masks are all ones: with samples end to end the first token
of each would be scored by the last logits of the one before, and its share of what losses are
divided by would be large. Two DP ranks in one process; their gradients are averaged as DDP does.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from rollout_workers import MicroBatch, MicroBatchStream, RolloutProducer, Step
from tests.support.server import ServeProcess
from tests.workers.normalisers.losses import FORMULAS, Counted
from tests.workers.support.tiny_model import VOCABULARY, TinyModel

pytestmark = pytest.mark.e2e

SAMPLES, BATCH = 24, 12
LOSSES = ("token-mean", "sequence-mean", "sequence-mean-token-sum", "constant:5", "group-mean")
SERVE: dict[str, Any] = {
    "dp_size": 2, "global_batch_size": BATCH, "micro_batch_tokens": 24, "group_size": 2,
    "buffer_capacity": 2 * SAMPLES,
}  # fmt: skip


def rollouts() -> list[NDArray[np.int64]]:
    """Ids of samples of 3 to 8 tokens; two make a group."""
    random = np.random.default_rng(25)
    return [random.integers(0, VOCABULARY, random.integers(3, 9)) for _ in range(SAMPLES)]


def all_ones(ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.ones(len(ids), bool)


def fields_of(index: int, ids: NDArray[np.int64]) -> dict[str, Any]:
    return {"input_ids": ids, "loss_mask": all_ones(ids)}


def push(server: ServeProcess, *, shifted: bool = False) -> None:
    with RolloutProducer(server.endpoint, loss_mask_shifted=shifted) as producer:
        for at, ids in enumerate(rollouts()):
            producer.push(fields_of(at, ids), sample_id=f"{at}", group_id=f"g{at // 2}")
        producer.end_stream()


def push_shifted(server: ServeProcess) -> None:
    push(server, shifted=True)


def post(server: ServeProcess, **more: object) -> None:
    for at, ids in enumerate(rollouts()):
        fields = {"input_ids": ids.tolist(), "loss_mask": all_ones(ids).tolist()}
        sample = {"fields": fields, "sample_id": f"{at}", "group_id": f"g{at // 2}"}
        assert server.post("/v1/samples", json.dumps(sample | more).encode()).status == 200
    assert server.post("/v1/stream/end").status == 200


def post_shifted(server: ServeProcess) -> None:
    post(server, loss_mask_shifted=True)


# -- the README's loop


def token_losses(model: TinyModel, batch: MicroBatch) -> Tensor:
    """As trainers of causal models have it: each row is shifted by one, whatever lies in it."""
    if batch.layout == "padded":
        rows = [logits_of(model, ids, [0, len(ids)]) for ids in batch.input_ids]
        return torch.stack([shifted(*row) for row in zip(rows, batch.input_ids, strict=True)])
    ids, bounds = batch.input_ids, batch.cu_seqlens.tolist()
    if batch.layout == "jagged":
        losses = shifted(logits_of(model, ids.values(), bounds), ids.values())
        return torch.nested.nested_tensor_from_jagged(losses, ids.offsets())  # type: ignore[attr-defined]
    return shifted(logits_of(model, ids, bounds), ids)


def logits_of(model: TinyModel, ids: Tensor, bounds: list[int]) -> Tensor:
    return torch.cat([model.logits(ids[a:b]) for a, b in pairwise(bounds)])


def shifted(logits: Tensor, ids: Tensor) -> Tensor:
    return pad(cross_entropy(logits[:-1], ids[1:], reduction="none"), (1, 0))


def total(values: Tensor) -> Tensor:
    return values.values().sum() if values.is_nested else values.sum()


def gradients(step: Step) -> dict[str, Tensor]:
    """Of each loss of a step, on this rank."""
    found = {}
    for name in (*names(), "loss"):
        model = TinyModel()
        for batch in step:
            weighted = total(token_losses(model, batch) * batch[f"{name}_weights"])
            (weighted * batch.loss_scales[name]).backward()  # type: ignore[no-untyped-call]
        found[name] = gradient_of(model)
    return found


def gradient_of(model: TinyModel) -> Tensor:
    return torch.cat(
        [each.grad.reshape(-1) for each in model.parameters() if each.grad is not None]
    )


def names() -> Mapping[str, str]:
    return {word.partition(":")[0].replace("-", "_"): word for word in LOSSES}


def expected(word: str, chosen: list[int]) -> Tensor:
    """The gradient where each sample is scored alone, by its own logits."""
    model, ids = TinyModel(), rollouts()
    found: Counted = []
    for at in chosen:
        alone = torch.from_numpy(ids[at])
        losses = cross_entropy(model.logits(alone)[:-1], alone[1:], reduction="none")
        found.append((f"g{at // 2}", losses, torch.ones_like(losses)))
    kind, _, number = word.partition(":")
    FORMULAS[kind](found, float(number or 0)).backward()  # type: ignore[no-untyped-call]
    return gradient_of(model)


def seen(step: Step) -> tuple[Step, list[int], dict[str, Tensor], list[tuple[float, ...]]]:
    """A step's samples, gradients, and what a trainer could count of its tokens."""
    batches = [each for each in step if not each.is_filler]
    chosen = [int(name) for each in batches for name in each.sample_ids]
    counts = [
        tuple(float(total(one)) for one in (b.loss_weights, b.loss_mask, b.labels != -100))
        for b in batches
        if b.layout != "jagged"
    ]
    found = gradients(step)
    step.commit()
    return step, chosen, found, counts


def streams(endpoint: str, layout: str) -> Iterator[MicroBatchStream]:
    generation = None
    for rank in range(2):
        options: dict[str, Any] = {"layout": layout, "losses": names(), "generation": generation}
        options["weights_dtype"] = torch.float64
        stream = MicroBatchStream(endpoint, dp_rank=rank, dp_size=2, **options)
        generation = stream.generation
        yield stream


@pytest.mark.parametrize(
    ("fill", "layout"),
    [
        (push, "packed"),
        (push, "padded"),
        (push, "jagged"),
        (push_shifted, "packed"),
        (post, "packed"),
        (post_shifted, "packed"),
    ],
)
def test_masks_of_all_ones_give_the_gradient_of_samples_scored_alone(
    tmp_path: Path, fill: Callable[[ServeProcess], None], layout: str
) -> None:
    with (
        ServeProcess(tmp_path, **SERVE) as server,
        ExitStack() as stack,
        ThreadPoolExecutor() as threads,
    ):
        fill(server)
        assert server.scrape()["loss_positions_left_out_total"] == SAMPLES
        ranks = [stack.enter_context(each) for each in streams(server.endpoint, layout)]
        steps = list(zip(*threads.map(lambda rank: list(map(seen, rank)), ranks), strict=True))
    assert len(steps) == SAMPLES // BATCH
    for views in steps:
        chosen = [at for _, samples, _, _ in views for at in samples]
        for word in LOSSES:
            name = word.partition(":")[0].replace("-", "_")
            reduced = torch.stack([found[name] for _, _, found, _ in views]).mean(dim=0)
            wanted = expected(word, chosen)
            assert (reduced - wanted).abs().max() / wanted.abs().max() < 1e-9, word
        for weights, mask, labels in (count for *_, counts in views for count in counts):
            assert weights == mask == labels
        step = views[0][0]
        assert step.loss_tokens == sum(len(rollouts()[at]) - 1 for at in chosen)
