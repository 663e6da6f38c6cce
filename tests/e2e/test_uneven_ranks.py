"""A slow rank of four gets less work, another one when that is slow; gradients stay what they were.

Held beside clocks of the trainers' own, round what they compute.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rollout_workers import RolloutProducer, RolloutSample
from tests.e2e.harness import finish, running
from tests.support.gradients import diaries, largest_difference
from tests.support.server import ServeProcess, eventually
from tests.support.torchrun import torchrun_command
from tests.workers.support.tiny_model import VOCABULARY, TinyModel

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

HERE = Path(__file__).parent
RANKS, BATCH, BUDGET, SLOW = 4, 32, 1024, 1.5
STEPS, CHANGE = 60, 30


def samples(steps: int = STEPS) -> dict[str, RolloutSample]:
    """Lengths of a lognormal distribution, some sixty tokens in the mean."""
    rng = np.random.default_rng(3)
    lengths = np.clip(rng.lognormal(4.0, 0.6, steps * BATCH), 4, 400).astype(int)
    return {
        f"s{at}": RolloutSample({"input_ids": rng.integers(0, VOCABULARY, length)}, f"s{at}")
        for at, length in enumerate(lengths.tolist())
    }


def run(folder: Path, model: str, cost: str, steps: int = STEPS, change: int = CHANGE) -> list[Any]:
    """Trains; seconds and tokens of each step, float64[2, R, M], and what was logged."""
    sync = "step" if model == "ddp" else "micro-step"
    options: dict[str, Any] = {"micro_batch_tokens": BUDGET, "sync": sync, "cost": cost}
    with ServeProcess(folder, dp_size=RANKS, dispatch_batch_size=BATCH, **options) as server:
        with running(
            *torchrun_command(RANKS, folder), str(HERE / "uneven_trainer.py"), "--model", model,
            "--slow", str(SLOW), "--until", str(change), "--endpoint", server.endpoint,
            "--out", str(folder), "--linger-until", str(folder / "seen"),
        ) as training:  # fmt: skip
            with RolloutProducer(server.endpoint, reconnect_timeout=5) as producer:
                for sample in samples(steps).values():
                    producer.push(sample.fields, sample_id=sample.sample_id)
                producer.end_stream()
            eventually(lambda: server.scrape()["steps_committed_total"] >= steps, "training", 200)
            (folder / "seen").touch()
            finish(training)
        assert server.wait() == 0
    ranks = [
        [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]
        for rank in range(RANKS)
    ]
    return [
        np.array([[rank[key] for rank in step] for key in ("spent_s", "tokens")])
        for step in zip(*ranks, strict=True)
    ]


def lost(steps: list[Any], model: str) -> float:
    """Share of the ranks' time that is lost to waiting for slower ones."""
    spent = [step[0] for step in steps]
    paid = [each.sum(axis=1).max() if model == "ddp" else each.max(axis=0).sum() for each in spent]
    return float(1 - sum(each.sum() for each in spent) / RANKS / sum(paid))


def share(steps: list[Any], rank: int) -> float:
    """Of the tokens that all ranks trained on, this one's."""
    of_ranks = sum(step[1].sum(axis=1) for step in steps)
    return float(of_ranks[rank] / of_ranks.sum())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["ddp", "fsdp2"])
def test_work_goes_where_it_is_done_first_and_gradients_are_the_same(
    model: str, tmp_path: Path
) -> None:
    steps = run(tmp_path, model, "auto")
    assert len(steps) == STEPS
    log = (tmp_path / "serve.log").read_text()
    assert "rank 1 takes 1." in log, log
    assert "2 takes 1." in log, log
    for rank, since in ((1, 20), (2, STEPS - 10)):  # 0.18 on an idle machine
        settled = steps[since : since + 10]
        assert 0.16 < share(settled, rank) < 0.21
        assert lost(settled, model) < lost(steps[:5], model) / 2
    if model == "ddp":
        assert largest_difference(diaries(tmp_path), TinyModel(), _mean_loss) < 1e-9


def _mean_loss(model: nn.Module, names: list[str]) -> Tensor:
    """Of all tokens but the first of each sample."""
    assert isinstance(model, TinyModel)
    pushed = samples()
    losses = [
        model.sample_loss(torch.as_tensor(pushed[name].fields["input_ids"]))[1:] for name in names
    ]
    return torch.cat(losses).mean()
