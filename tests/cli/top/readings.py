"""Readings for tests: as a dispatcher would answer, without one."""

from typing import Any

from rollout_dispatcher.cli.top import Reading

WORDS = """\
run 0123456789abcdef is running, ready
ranks: 4 of 4 connected, generation 1
lost: 41 % of the ranks' time in 60 s: 30 % no-samples, 11 % slow-rank
the next step waits for:
  DP ranks 1, 3 have not joined (3 min)
"""


def status(ranks: int, **more: Any) -> dict[str, Any]:
    """What is shown of a /statusz with so many ranks, all of them in step 7."""
    found: dict[str, Any] = {
        "run_id": "0123456789abcdef",
        "version": "1.2.3",
        "steps_committed": 8,
        "samples_committed": 80,
        "dispatched_tokens": 8000,
        "measured": {"why_not": "", "last_step": None},
        "dp_size": ranks,
        "absent_ranks": [],
        "hung_ranks": [],
        "ranks": {str(rank): {"connected": True, "taken": 7} for rank in range(ranks)},
    }
    return found | more


def measured(ranks: int, slow: int, lost: float = 0.2) -> dict[str, Any]:
    """A step in which one rank was slow."""
    ranks_took = [
        {"dp_rank": rank, "compute_s": 0.5, "wait_s": 0.2, "slowness": 1.4 if rank == slow else 1.0}
        for rank in range(ranks)
    ]
    return {"why_not": "", "last_step": {"step": 12, "lost_share": lost, "ranks": ranks_took}}


def reading(found: dict[str, Any], at: float = 0.0) -> Reading:
    """A reading after `at` seconds."""
    return Reading(1000.0 + at, found["run_id"], WORDS, found)
