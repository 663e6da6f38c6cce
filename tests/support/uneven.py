"""Four ranks of which one is slow, and then another: real processes, and clocks of their own."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from rollout_workers import RolloutProducer, RolloutSample
from tests.e2e.harness import finish, running
from tests.support.server import ServeProcess, eventually
from tests.support.source import ROOT
from tests.support.torchrun import torchrun_command
from tests.workers.support.tiny_model import VOCABULARY

TRAINER = ROOT / "tests" / "e2e" / "uneven_trainer.py"
#: Two or three micro-batches a rank.
RANKS, BATCH, BUDGET, SLOW = 4, 64, 512, 1.5
STEPS, CHANGE = 60, 30


def samples(steps: int = STEPS, *, alike: bool = False) -> dict[str, RolloutSample]:
    """Lengths of a lognormal distribution, some sixty tokens in the mean; alike: all of them."""
    rng = np.random.default_rng(3)
    lengths = np.clip(rng.lognormal(4.0, 0.6, steps * BATCH), 4, 400).astype(int)
    if alike:
        lengths[:] = lengths.mean()
    return {
        f"s{at}": RolloutSample({"input_ids": rng.integers(0, VOCABULARY, length)}, f"s{at}")
        for at, length in enumerate(lengths.tolist())
    }


def run(
    folder: Path,
    model: str,
    cost: str,
    *,
    steps: int = STEPS,
    change: int = CHANGE,
    slow: float = SLOW,
    alike: bool = False,
) -> list[Any]:
    """Trains; seconds and tokens of each step, float64[2, R, M]. alike: the samples are."""
    sync = "step" if model == "ddp" else "micro-step"
    options: dict[str, Any] = {"micro_batch_tokens": BUDGET, "sync": sync, "cost": cost}
    with ServeProcess(folder, dp_size=RANKS, global_batch_size=BATCH, **options) as server:
        with running(
            *torchrun_command(RANKS, folder), str(TRAINER), "--model", model,
            "--slow", str(slow), "--until", str(change), "--endpoint", server.endpoint,
            "--out", str(folder), "--linger-until", str(folder / "seen"),
        ) as training:  # fmt: skip
            with RolloutProducer(server.endpoint, reconnect_timeout=5) as producer:
                for sample in samples(steps, alike=alike).values():
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
