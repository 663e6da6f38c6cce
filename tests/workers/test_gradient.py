"""Training is that of one process, whatever the cut: by plain DP ranks, and by every mesh.

A real dispatcher, real torchrun ranks under DDP, and one process that trains on the same dispatch
batches with the loss as a textbook writes it: parameters agree after several optimizer steps. With
some shapes the samples lie in a payload store, from which every rank of a replica fetches them.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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
from tests.workers.support.train_replicas import PLAIN, SHAPES

pytestmark = pytest.mark.e2e
BATCH, SAMPLES = 12, 49
SERVE = {"global_batch_size": BATCH, "micro_batch_tokens": 48, "strategy": "window"}
TOLERANCE = 1e-9


class Start(NamedTuple):
    """Ranks, and the cases that they train one after the other; device and backend are torch's."""

    ranks: int
    cases: tuple[str, ...]
    device: str = "cpu"
    backend: str = "gloo"


STARTS = (Start(4, (PLAIN, "tp", "hsdp")), Start(8, ("cp", "pp")))
gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no GPU here: gradients are compared on CPUs"
)
#: NCCL takes one rank a GPU; gloo takes any number.
ON_GPU = (Start(2, (PLAIN,), "cuda"), Start(1, (PLAIN,), "cuda", "cpu:gloo,cuda:nccl"))
CASES = [pytest.param(start, case, id=case) for start in STARTS for case in start.cases] + [
    pytest.param(start, PLAIN, id=f"{start.ranks} on a GPU", marks=gpu) for start in ON_GPU
]
#: Ranks of each model replica, by case and DP rank; its DP leader first. Others are one rank each.
REPLICAS = {
    "tp": ((0, 1), (2, 3)),
    "cp": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "pp": ((0, 1, 4, 5), (2, 3, 6, 7)),
}
#: Shapes whose samples come by reference: each rank fetches some, and gets the others.
REFERENCED, INLINE_LIMIT = {"tp", "pp"}, 256


def replicas(start: Start, case: str) -> tuple[tuple[int, ...], ...]:
    return REPLICAS.get(case, tuple((rank,) for rank in range(start.ranks)))


# -- what is trained on


def rollouts(case: str) -> dict[str, RolloutSample]:
    """Samples of 1 to 40 tokens; every seventh has no token that the loss counts.

    Those of plain DP ranks have no mask, and every seventh is of one token.
    """
    random = np.random.default_rng(11)
    made = {}
    for index in range(SAMPLES):
        tokens = int(random.integers(1, 41))
        mask = random.random(tokens) < (0.0 if index % 7 == 3 else 0.6)
        fields = {"input_ids": random.integers(0, VOCABULARY, tokens), "loss_mask": mask}
        if case == PLAIN:
            fields = {"input_ids": fields["input_ids"][: 1 if index % 7 == 3 else None]}
        made[f"s{index}"] = RolloutSample(fields, f"s{index}")
    return made


def push_all(case: str, endpoint: str) -> None:
    with RolloutProducer(endpoint, reconnect_timeout=5) as producer:
        for sample in rollouts(case).values():
            producer.push_many([sample])
        producer.end_stream()


class Trained:
    """What every rank saw and ended with, by start and case; made when first asked for."""

    def __init__(self, directories: pytest.TempPathFactory) -> None:
        self._directories = directories
        self._found: dict[tuple[Start, str], list[dict[str, Any]]] = {}

    def __call__(self, start: Start, case: str) -> list[dict[str, Any]]:
        if (start, case) not in self._found:
            self._train(start, self._directories.mktemp(f"ranks{start.ranks}"))
        return self._found[start, case]

    def _train(self, start: Start, directory: Path) -> None:
        trainer = str(Path(__file__).parent / "support" / "train_replicas.py")
        command = [*torchrun_command(start.ranks, directory), trainer, str(directory)]
        with ExitStack() as stack:
            # Left last: where training fails, pushes wait until their dispatcher is gone.
            pool = stack.enter_context(ThreadPoolExecutor())
            endpoints = {}
            for case in start.cases:
                options = SERVE | (references(directory, case) if case in REFERENCED else {})
                size = len(replicas(start, case))
                served = serve(directory / case, dp_size=size, **options)
                endpoints[case] = stack.enter_context(served)
            pushing = [pool.submit(push_all, *item) for item in endpoints.items()]
            runs = [f"{case}={endpoint}" for case, endpoint in endpoints.items()]
            with running(*command, start.device, start.backend, *runs) as process:
                finish(process)
            for push in pushing:
                push.result(30)
        for case in start.cases:
            files = [directory / f"{case}-{rank}.json" for rank in range(start.ranks)]
            self._found[start, case] = [json.loads(file.read_text()) for file in files]


def references(directory: Path, case: str) -> dict[str, object]:
    """Options with which samples of the limit and more lie in a store of the test's own."""
    folder = directory / f"{case}-store"
    (folder / "payloads").mkdir(parents=True)
    return {
        "payload_stores": f"file://{folder / 'payloads'}",
        "inline_limit": f"{INLINE_LIMIT}B",
        "journal_dir": folder / "journal",
        "sample_retention": "commit",
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory)


# -- the textbook


def samples_of(leaders: list[dict[str, Any]], step: int) -> list[str]:
    """Ids of a whole step, over all DP ranks, without fillers."""
    batches = [batch for rank in leaders for batch in rank["steps"][step]["batches"]]
    return [name for batch in batches if not batch["filler"] for name in batch["ids"]]


def reference(leaders: list[dict[str, Any]], case: str) -> dict[str, list[float]]:
    """Parameters after the same steps in one process, each one big batch."""
    models = {name: TinyModel() for name in ("sgd", "adamw")}
    solvers = optimizers(models)
    samples = rollouts(case)
    for step in range(len(leaders[0]["steps"])):
        chosen = [samples[name].fields for name in samples_of(leaders, step)]
        for name, model in models.items():
            solvers[name].zero_grad()
            textbook_loss(model, chosen).backward()  # type: ignore[no-untyped-call]
            solvers[name].step()
    return {name: flat(model) for name, model in models.items()}


def textbook_loss(model: TinyModel, chosen: list[Any]) -> torch.Tensor:
    """Mean over all tokens that the loss counts: those that the mask marks, but never the first."""
    counted = []
    for fields in chosen:
        later = np.arange(len(fields["input_ids"])) > 0
        losses = model.sample_loss(torch.as_tensor(fields["input_ids"]))
        counted.append(losses[torch.as_tensor(later & fields.get("loss_mask", later))])
    losses = torch.cat(counted)
    return losses.mean() if len(losses) else flat_tensor(model).sum() * 0.0


@pytest.mark.parametrize(("start", "case"), CASES)
def test_parameters_equal_those_of_one_process(trained: Trained, start: Start, case: str) -> None:
    ranks = trained(start, case)
    expected = reference([ranks[members[0]] for members in replicas(start, case)], case)
    for rank in ranks:
        for name, parameters in rank["parameters"].items():
            worst = np.abs(np.subtract(parameters, expected[name])).max()
            assert worst <= TOLERANCE, f"{name} is off by {worst}"
    moved = np.abs(np.subtract(expected["sgd"], flat(TinyModel()))).max()
    assert moved > 0.01, "nothing was trained"


@pytest.mark.parametrize(("start", "case"), CASES)
def test_a_replica_sees_the_same_and_each_sample_is_trained_once(
    trained: Trained, start: Start, case: str
) -> None:
    ranks, members_of = trained(start, case), replicas(start, case)
    for members in members_of:
        views = [ranks[member]["steps"] for member in members]
        assert all(view == views[0] for view in views)
    plans = [
        [(step["number"], step["digest"], len(step["batches"])) for step in rank["steps"]]
        for rank in ranks
    ]
    assert all(plan == plans[0] for plan in plans)
    leaders = [ranks[members[0]] for members in members_of]
    seen = [name for step in range(len(plans[0])) for name in samples_of(leaders, step)]
    assert sorted(seen) == sorted(rollouts(case))
    assert len({json.dumps(rank["state"]) for rank in ranks}) == 1
    assert {rank["committed"] for rank in ranks} == {len(plans[0])}


def test_the_steps_were_worth_the_test(trained: Trained) -> None:
    ranks = trained(STARTS[0], PLAIN)
    batches = [batch for rank in ranks for step in rank["steps"] for batch in step["batches"]]
    assert any(batch["filler"] for batch in batches)
    assert len({batch["tokens"] for batch in batches}) > 5
    assert len({len(step["batches"]) for step in ranks[0]["steps"]}) > 1
    assert len(ranks[0]["steps"]) == -(-SAMPLES // BATCH)


@pytest.mark.parametrize("case", REPLICAS)
def test_a_step_that_is_iterated_again_is_not_sent_again(trained: Trained, case: str) -> None:
    """All that a peer receives are the payloads of the samples, once: 9 bytes a token."""
    (start,) = (start for start in STARTS if case in start.cases)
    tokens = {name: len(sample.fields["input_ids"]) for name, sample in rollouts(case).items()}
    for peer in (peer for members in REPLICAS[case] for peer in members[1:]):
        found = trained(start, case)[peer]
        batches = [batch for step in found["steps"] for batch in step["batches"]]
        sizes = [[1] if b["filler"] else [tokens[name] for name in b["ids"]] for b in batches]
        if case in REFERENCED:  # the others each peer has fetched for itself
            sizes = [[each for each in size if nbytes(each) < INLINE_LIMIT] for size in sizes]
        assert found["bytes"][-1] == sum(nbytes(sum(size)) for size in sizes)


def nbytes(tokens: int) -> int:
    """Of samples end to end: 8 bytes an id, 1 a mask's value, and then aligned."""
    return 8 * tokens + -(-tokens // 8) * 8


def test_every_mesh_of_the_documents_is_here() -> None:
    assert sorted(SHAPES) == sorted({case for start in STARTS for case in start.cases} - {PLAIN})
