"""Real ranks with one slow among them: what is told agrees with their own clocks round their work.

The work is sleep: it takes as long however many ranks share a core, so that clocks can be compared.
"""

from pathlib import Path

import pytest

from tests.workers.timing.runs import run


@pytest.mark.parametrize("model", ["ddp", "fsdp2"])
def test_time_lost_and_the_slow_rank_are_told_as_clocks_round_the_work_tell_them(
    model: str, tmp_path: Path
) -> None:
    seen = run(tmp_path, 4, "--model", model, "--slow", "1.4")
    each = model == "fsdp2"  # DDP's ranks meet once a step
    real = seen.lost("spent", each_micro_step=each)
    told = seen.lost("computed", each_micro_step=each)
    assert real > 0.1
    assert told == pytest.approx(real, rel=0.1)
    assert seen.rank_s("computed") == pytest.approx(seen.rank_s("spent"), rel=0.15)


def test_without_telling_waits_apart_all_ranks_would_look_alike(tmp_path: Path) -> None:
    seen = run(tmp_path, 2, "--model", "fsdp2", "--slow", "1.4", "--steps", "5")
    busy = [sum(sum(step["busy_s"]) for step in rank) for rank in seen.ranks]
    assert busy[0] == pytest.approx(busy[1], rel=0.05)


def test_gradients_that_are_reduced_by_hand_after_the_step_leave_micro_batches_pure(
    tmp_path: Path,
) -> None:
    seen = run(tmp_path, 2, "--model", "by-hand", "--slow", "1.4", "--steps", "5")
    assert seen.rank_s("computed") == pytest.approx(seen.rank_s("spent"), rel=0.15)


def test_collectives_that_nobody_times_are_said_and_no_waits_are_told(tmp_path: Path) -> None:
    seen = run(tmp_path, 2, "--model", "unknown", "--steps", "4")
    for step in (step for rank in seen.ranks for step in rank):
        assert step["collective_s"] is None
        assert "collectives of default_pg in micro-batches are not timed" in step["why"]
