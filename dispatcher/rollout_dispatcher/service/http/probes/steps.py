"""What `/debug/steps` says: the last steps, as JSON, the oldest first.

Times of day are seconds since 1970; durations seconds; excesses ratios (0.01 is 1 % of the time
that the work itself takes). What has not happened, or was not seen, is null.

Of hundreds of ranks a step takes tens of milliseconds to tell, and all of them seconds: others have
their turn after each.
"""

import asyncio
from typing import Any

from rollout_dispatcher.core.measuring.times import Pass, measured_excess
from rollout_dispatcher.service.chronicle.recent import MAX_STEPS, RecentSteps, SeenStep
from rollout_dispatcher.service.config.options import ServeConfig
from rollout_dispatcher.service.http.guard import dumps
from rollout_planner.types import Sync, even_time, straggler_excess


async def describe_steps(recent: RecentSteps, config: ServeConfig, offset: float) -> str:
    """The answer, as JSON. offset: from the core's clock to the time of day."""
    told: list[str] = []
    for seen in tuple(recent):
        told.append(dumps(_describe(seen, config, offset)))
        await asyncio.sleep(0)
    about = dumps({"remembered": MAX_STEPS, "sync": str(config.sync)}).removesuffix("\n}")
    return about + ',\n  "steps": [' + ",\n".join(told) + "]\n}\n"


def _describe(seen: SeenStep, config: ServeConfig, offset: float) -> dict[str, Any]:
    sync, stages = config.sync, config.pipeline_stages
    even = even_time(seen.cost, stages)
    bound = max(0.0, seen.lower_bound / even - 1) if even else 0.0

    def at(moment: float | None) -> float | None:
        return None if moment is None else round(moment + offset, 3)

    return {
        "step": seen.number,
        "generation": seen.generation,
        "attempt": seen.attempt,
        "trigger": seen.trigger,
        "eligible": seen.eligible,
        "samples": seen.samples,
        "tokens": seen.tokens,
        "micro_batches": int(seen.cost.shape[1]),
        "planned_at": at(seen.planned),
        "released_at": at(seen.released),
        "committed_at": at(seen.committed),
        "excess": {
            "fifo": round(seen.fifo_excess, 6),
            "planned": round(straggler_excess(seen.cost, sync, stages), 6),
            "lower_bound": round(bound, 6),
        },
        "ranks": [
            {
                "dp_rank": rank,
                "planned_cost": float(f"{cost:.9g}"),
                "delivered_at": at(seen.delivered.get(rank)),
                "taken_at": at(seen.taken.get(rank)),
                "committed_at": at(seen.done.get(rank)),
            }
            for rank, cost in enumerate(seen.cost.sum(axis=1).tolist())
        ],
        "measured": {
            cost_key: _measured(times, seen.dp_size, sync)
            for cost_key, times in seen.measured.items()
        },
    }


def _measured(times: Pass, ranks: int, sync: Sync) -> dict[str, Any]:
    """Of one pass: seconds of each micro-batch by rank, and the excess where it can be told."""
    compute = times.compute(ranks)
    return {
        "busy_s": {str(rank): times.busy[rank] for rank in sorted(times.busy)},
        "collective_s": {str(rank): times.collective[rank] for rank in sorted(times.collective)},
        "excess": None if compute is None else round(measured_excess(compute, sync), 6),
        "why": times.why,
    }
