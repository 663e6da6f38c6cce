"""Records of made-up runs, written as `serve --record-dir` writes them."""

from pathlib import Path
from typing import Any

import numpy as np

from rollout_dispatcher.core.rank_time import TimeCause
from rollout_dispatcher.record.writer import RecordWriter
from rollout_dispatcher.service.config.serve import ServeConfig
from rollout_planner.types import Grouping

#: When the run began, in seconds since 1970.
BEGAN = 1_700_000_000.0
RANKS, STEPS, MICRO_BATCHES = 4, 12, 2
#: Seconds of a unit of cost, and how much slower one rank is than its cost says.
SPEED, SLOW_RANK, SLOWNESS = 1e-9, 2, 1.4


def write_record(
    folder: Path,
    *,
    measured: bool = True,
    seed: int = 0,
    run: str = "made",
    **options: Any,
) -> None:
    """Four ranks with two micro-batches of one sample a step; one rank is slower than planned.

    options: further ones of `serve`.
    """
    config = ServeConfig(
        dp_size=RANKS,
        global_batch_size=RANKS * MICRO_BATCHES,
        micro_batch_size=1,
        groups=Grouping.IGNORE,
        record_dir=folder,
        **options,
    )
    header = {
        "run": run, "process": "p0", "release": "1.0", "unix": BEGAN,
        "config": config.model_dump(mode="json"),
    }  # fmt: skip
    writer = RecordWriter(folder, 2**30, header)
    rng, ticket, now = np.random.default_rng(seed), 0, 0.0
    for number in range(STEPS):
        tokens = rng.integers(1000, 30_000, (RANKS, MICRO_BATCHES))
        cost = tokens**2.0 + 24576 * tokens
        count = tokens.size
        writer.put({
            "event": "accepted", "at": now, "first": ticket, "pushes": [[now, count]],
            "tokens": tokens.ravel().tolist(), "loss": tokens.ravel().tolist(), "version": number,
        })  # fmt: skip
        planned = now + 0.1
        writer.put(_planned(number, planned, ticket, cost))
        compute = cost * SPEED
        compute[SLOW_RANK] *= SLOWNESS
        pace = compute.max(axis=0)
        took = float(pace.sum())
        writer.put({"event": "released", "at": planned + 0.01, "step": number})
        done = planned + 0.02 + took
        writer.put({
            "event": "committed", "at": done, "step": number,
            "taken": [planned + 0.02] * RANKS, "done": [done] * RANKS,
        })  # fmt: skip
        if measured:
            writer.put({
                "event": "measured", "at": done, "step": number, "cost_key": "update",
                "ranks": [*range(RANKS)], "busy": [pace.tolist()] * RANKS,
                "collective": (pace - compute).tolist(),
            })  # fmt: skip
        writer.put({
            "event": "waited", "at": done, "ranks": [*range(RANKS)], "since": [now] * RANKS,
            "seconds": [0.12] * RANKS,
        })  # fmt: skip
        state = {"buffered": count, "ready": count, "in_flight": count, "held_pushes": 0}
        spent = {cause: float(number + 1) for cause in TimeCause}
        writer.put({"event": "state", "at": now, **state, "rank_time": spent})
        ticket, now = ticket + count, done
    writer.put({"event": "dropped", "at": now, "reason": "stale", "tickets": [ticket]})
    writer.close(10)


def _planned(number: int, at: float, ticket: int, cost: Any) -> dict[str, Any]:
    excess = float(cost.max(axis=0).sum() / cost.sum(axis=1).mean() - 1)
    return {
        "event": "planned", "at": at, "step": number, "attempt": 1, "generation": 1,
        "trigger": "window-full", "eligible": int(cost.size), "staleness": 1,
        "first": ticket, "tickets": [*range(cost.size)], "sizes": np.ones(cost.shape, int).tolist(),
        "cost": cost.tolist(), "fifo_excess": 2 * excess,
        "fifo_imbalance": excess, "lower_bound": float(cost.sum() / RANKS),
    }  # fmt: skip
