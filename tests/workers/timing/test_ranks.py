"""Real ranks with one slow among them: what is told agrees with their own clocks round their work.

The work is sleep: it takes as long however many ranks share a core, so that clocks can be compared.
"""

import pytest

from tests.workers.timing.runs import Run, run

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    return run(tmp_path_factory.mktemp("ranks"), 4, "--slow", "1.4", "--unit", "0.04")


@pytest.mark.parametrize("model", ["ddp", "fsdp2", "by-hand"])
def test_time_lost_and_the_slow_rank_are_told_as_clocks_round_the_work_tell_them(
    model: str, seen: dict[str, Run]
) -> None:
    each = model == "fsdp2"  # the others' ranks meet once a step
    real = seen[model].lost("spent", each_micro_step=each)
    told = seen[model].lost("computed", each_micro_step=each)
    assert real > 0.1
    assert told == pytest.approx(real, rel=0.1)
    assert seen[model].rank_s("computed") == pytest.approx(seen[model].rank_s("spent"), rel=0.15)


def test_without_telling_waits_apart_all_ranks_would_look_alike(seen: dict[str, Run]) -> None:
    busy = [sum(sum(step["busy_s"]) for step in rank) for rank in seen["fsdp2"].ranks]
    assert busy == pytest.approx([busy[0]] * 4, rel=0.05)


def test_collectives_that_nobody_times_are_said_and_no_waits_are_told(seen: dict[str, Run]) -> None:
    for step in (step for rank in seen["unknown"].ranks for step in rank):
        assert step["collective_s"] is None
        assert "collectives of default_pg in micro-batches are not timed" in step["why"]
