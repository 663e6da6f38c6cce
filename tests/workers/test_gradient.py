"""The gradient of a dispatched step is that of one big batch, whatever its cut.

A real dispatcher, real torchrun ranks under DDP, and one process that trains on the same dispatch
batches with the loss as a textbook writes it. Parameters must agree after several optimizer steps.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from rollout_workers import RolloutProducer, RolloutSample
from tests.e2e.harness import finish, running
from tests.support.server import serve
from tests.support.torchrun import torchrun_command
from tests.workers.support.tiny_model import VOCABULARY, TinyModel, flat, flat_tensor, optimizers

NORMALISATIONS = ("token-mean", "sequence-mean")
EXPECTED = "token-mean-expected"
RUNS = (*NORMALISATIONS, *(f"unmasked-{word}" for word in NORMALISATIONS), EXPECTED)
BATCH, SAMPLES = 12, 49
SERVE = {"global_batch_size": BATCH, "micro_batch_tokens": 48, "strategy": "window"}
#: Where a window has as many samples as a step, each arrival is in the plan that it is trained by.
SERVE_RUN = {EXPECTED: SERVE | {"window": 1}}
TOLERANCE = 1e-9


def rollouts(run: str) -> dict[str, RolloutSample]:
    """Samples of 1 to 40 tokens; every seventh has no token that the loss counts.

    Those of an `unmasked` run have no mask, and every seventh is of one token.
    """
    random = np.random.default_rng(11)
    made = {}
    for index in range(SAMPLES):
        tokens = int(random.integers(1, 41))
        mask = random.random(tokens) < (0.0 if index % 7 == 3 else 0.6)
        fields = {"input_ids": random.integers(0, VOCABULARY, tokens), "loss_mask": mask}
        if is_unmasked(run):
            fields = {"input_ids": fields["input_ids"][: 1 if index % 7 == 3 else None]}
        made[f"s{index}"] = RolloutSample(fields, f"s{index}")
    return made


def is_unmasked(run: str) -> bool:
    return run.startswith("unmasked-")


class Group(NamedTuple):
    """A process group under test: its DP ranks, their device, and the backend."""

    ranks: int
    device: str = "cpu"
    backend: str = "gloo"

    def __str__(self) -> str:
        return f"{self.ranks}-ranks-{self.device}"

    def train(self, directory: Path, *runs: str) -> None:
        """Run the trainer on every rank and wait for it."""
        trainer = str(Path(__file__).parent / "support" / "train_ddp.py")
        command = [*torchrun_command(self.ranks, directory), trainer, str(directory)]
        with running(*command, self.device, self.backend, *runs) as process:
            finish(process)


gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no GPU here: gradients are compared on CPUs"
)
#: NCCL takes one rank a GPU; gloo takes any number.
GROUPS = [
    Group(2),
    Group(4),
    pytest.param(Group(2, "cuda"), marks=gpu),
    pytest.param(Group(1, "cuda", "cpu:gloo,cuda:nccl"), marks=gpu),
]


def push_all(run: str, endpoint: str) -> None:
    with RolloutProducer(endpoint, reconnect_timeout=5) as producer:
        for sample in rollouts(run).values():
            producer.push_many([sample])
        producer.end_stream()


@pytest.fixture(scope="module", params=GROUPS, ids=str)
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """What every rank saw and ended with, by run."""
    group: Group = request.param
    ranks, directory = group.ranks, tmp_path_factory.mktemp(str(group))
    with ExitStack() as stack:
        # Left last: where training fails, pushes wait until their dispatcher is gone.
        pool = stack.enter_context(ThreadPoolExecutor())
        endpoints = {
            word: stack.enter_context(
                serve(directory / word, dp_size=ranks, **SERVE_RUN.get(word, SERVE))
            )
            for word in RUNS
        }
        pushing = [pool.submit(push_all, *item) for item in endpoints.items()]
        group.train(directory, *(f"{w}={endpoint}" for w, endpoint in endpoints.items()))
        for push in pushing:
            push.result(30)
    return {
        word: [json.loads((directory / f"{word}-{r}.json").read_text()) for r in range(ranks)]
        for word in RUNS
    }


def samples_of(ranks: list[dict[str, Any]], step: int) -> list[str]:
    """Ids of a whole step, over all ranks, without fillers."""
    batches = [batch for rank in ranks for batch in rank["steps"][step]["batches"]]
    return [name for batch in batches if not batch["filler"] for name in batch["ids"]]


def reference(ranks: list[dict[str, Any]], run: str) -> dict[str, list[float]]:
    """Parameters after the same steps in one process, each one big batch."""
    models = {name: TinyModel() for name in ("sgd", "adamw")}
    solvers = optimizers(models)
    samples = rollouts(run)
    count = total = 0.0
    for step in range(len(ranks[0]["steps"])):
        chosen = [samples[name].fields for name in samples_of(ranks, step)]
        loss_tokens = sum(int(targets(fields).sum()) for fields in chosen)
        count, total = 0.98 * count + len(chosen), 0.98 * total + loss_tokens
        # What makes the mean over a step's tokens one over the tokens to expect in it.
        factor = loss_tokens / round(total / count * len(chosen)) if run == EXPECTED else 1.0
        for name, model in models.items():
            solvers[name].zero_grad()
            loss = factor * textbook_loss(model, chosen, run)
            loss.backward()  # type: ignore[no-untyped-call]
            solvers[name].step()
    return {name: flat(model) for name, model in models.items()}


def targets(fields: Any) -> Any:
    """The tokens that the loss counts: all that the mask marks, but never the first."""
    later = np.arange(len(fields["input_ids"])) > 0
    return later & fields.get("loss_mask", later)


def textbook_loss(model: TinyModel, chosen: list[Any], run: str) -> torch.Tensor:
    """Mean over all counted tokens, or mean over samples of their mean over counted tokens.

    They are tokens that others of their sample come before.
    """
    counted = [
        model.sample_loss(torch.as_tensor(fields["input_ids"]))[torch.as_tensor(mask)]
        for fields in chosen
        if (mask := targets(fields)).any()
    ]
    if not counted:
        return flat_tensor(model).sum() * 0.0
    if run.endswith("token-mean") or run == EXPECTED:
        return torch.cat(counted).mean()
    return torch.stack([losses.mean() for losses in counted]).mean()


@pytest.mark.e2e
@pytest.mark.parametrize("run", RUNS)
def test_parameters_equal_those_of_one_process(
    trained: dict[str, list[dict[str, Any]]], run: str
) -> None:
    ranks = trained[run]
    expected = reference(ranks, run)
    for rank in ranks:
        for name, parameters in rank["parameters"].items():
            worst = np.abs(np.subtract(parameters, expected[name])).max()
            assert worst <= TOLERANCE, f"{name} is off by {worst}"
    moved = np.abs(np.subtract(expected["sgd"], flat(TinyModel()))).max()
    assert moved > 0.01, "nothing was trained"


@pytest.mark.e2e
def test_the_steps_were_worth_the_test(trained: dict[str, list[dict[str, Any]]]) -> None:
    ranks = trained["token-mean"]
    batches = [batch for rank in ranks for step in rank["steps"] for batch in step["batches"]]
    assert any(batch["filler"] for batch in batches) or len(ranks) == 1
    assert len({batch["tokens"] for batch in batches}) > 5
    assert len({len(step["batches"]) for step in ranks[0]["steps"]}) > 1
    assert len(ranks[0]["steps"]) == -(-SAMPLES // BATCH)
    found = [reference(trained[word], word)["sgd"] for word in (*NORMALISATIONS, EXPECTED)]
    for one, other in combinations(found, 2):
        assert np.abs(np.subtract(one, other)).max() > 1000 * TOLERANCE


@pytest.mark.e2e
@pytest.mark.parametrize("run", RUNS)
def test_all_ranks_saw_the_same_steps_and_each_sample_was_trained_once(
    trained: dict[str, list[dict[str, Any]]], run: str
) -> None:
    ranks = trained[run]
    views = [[(s["number"], s["digest"], len(s["batches"])) for s in r["steps"]] for r in ranks]
    assert all(view == views[0] for view in views)
    assert {rank["generation"] for rank in ranks} == {1}
    everything = [name for step in range(len(views[0])) for name in samples_of(ranks, step)]
    assert sorted(everything) == sorted(rollouts(run))
