"""Readings for tests of what is made of them: as a dispatcher would answer, without one."""

from typing import Any

from rollout_dispatcher.cli.top import parse
from rollout_dispatcher.cli.top_view import Reading

START = 1_700_000_000.0


def status(ranks: int, **more: Any) -> dict[str, Any]:
    """A /statusz with so many ranks, all of them in step 7."""
    said: dict[str, Any] = {
        "run_id": "0123456789abcdef",
        "version": "1.2.3",
        "run_state": "running",
        "is_ready": True,
        "steps_committed": 8,
        "samples_committed": 80,
        "dispatched_tokens": 8000,
        "open_steps": 1,
        "in_flight": 10,
        "ready": 12,
        "buffered_tokens": 1200,
        "buffered_bytes": 9600,
        "open_groups": 0,
        "delays": [],
        "measured": {"why_not": "", "last_step": None},
        "policy_version": 3,
        "accepted": 100,
        "dropped": {"stale": 0, "oversize": 0},
        "producers_connected": 2,
        "pushes_held": 0,
        "backpressure": False,
        "generation": 1,
        "dp_size": ranks,
        "ranks_connected": ranks,
        "absent_ranks": [],
        "hung_ranks": [],
        "ranks": {str(rank): {"connected": True, "taken": 7} for rank in range(ranks)},
        "config": {"global_batch_groups": None, "buffer_tokens": None, "buffer_bytes": None},
    }
    return said | more


def metrics(at: float = 0.0, *, start: float = START, **more: float | dict[int, float]) -> str:
    """An exposition after `at` seconds. more: values of families, those of ranks by rank."""
    lines = [
        f"dispatcher_unknown {at}",
        f"process_start_time_seconds {start}",
        "dispatcher_window_samples 16.0",
        "dispatcher_buffer_capacity_samples 24.0",
    ]
    for name, value in more.items():
        if isinstance(value, dict):
            cost_key = 'cost_key="update",' if "compute" in name or "straggler" in name else ""
            lines += [
                f'dispatcher_{name}{{{cost_key}dp_rank="{rank}"}} {each}'
                for rank, each in value.items()
            ]
        else:
            lines.append(f"dispatcher_{name} {value}")
    return "\n".join(lines)


def staged(stage: str, *, excess: float, imbalance: float, steps: int) -> str:
    """The histograms of one stage, after so many steps of these means."""
    return "".join(
        f'dispatcher_step_{name}_ratio_count{{stage="{stage}"}} {steps}\n'
        f'dispatcher_step_{name}_ratio_sum{{stage="{stage}"}} {steps * mean}\n'
        f'dispatcher_step_{name}_ratio_bucket{{le="0.1",stage="{stage}"}} 3\n'
        for name, mean in (("straggler_excess", excess), ("imbalance", imbalance))
    )


def reading(said: dict[str, Any], text: str, at: float = 0.0) -> Reading:
    """A look after `at` seconds."""
    return Reading(1000.0 + at, START + 100.0 + at, said, parse(text))
