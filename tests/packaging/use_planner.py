"""What a user of the planner alone does; `smoke.py` runs it where beside it is numpy alone."""

import sys
from importlib.metadata import files
from importlib.util import find_spec
from pathlib import Path

import rollout_planner

LENGTHS = [5120, 380, 2900, 410, 64, 2048]
BUDGET = 8192


def main() -> None:
    """Plan a step, and see that nothing of the service is needed for it."""
    home = Path(str(rollout_planner.__file__)).parent
    assert home.is_relative_to(sys.prefix), f"{home} is not installed here"
    assert (home / "py.typed").exists(), f"{home} has no py.typed"
    assert "LICENSE" in {path.name for path in files("rollout-planner") or ()}
    for other in ("rollout_dispatcher", "rollout_workers", "pydantic", "aiohttp", "torch"):
        assert find_spec(other) is None, f"{other} is here"
    step = rollout_planner.plan_step(LENGTHS, dp_size=2, micro_batch_tokens=BUDGET)
    planned = [index for rank in step for micro_batch in rank for index in micro_batch]
    assert sorted(planned) == list(range(len(LENGTHS))), step
    loads = [sum(LENGTHS[at] for micro_batch in rank for at in micro_batch) for rank in step]
    assert max(loads) <= BUDGET, loads
    parts = rollout_planner.get_seqlen_balanced_partitions(LENGTHS, 2, equal_size=True)
    assert [len(part) for part in parts] == [3, 3], parts


if __name__ == "__main__":
    main()
