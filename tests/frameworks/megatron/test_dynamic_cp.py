"""`PackedBlockScheduler` beside Megatron-Core's own for dynamic context parallelism."""

from typing import Any

import numpy as np
import pytest

from rollout_planner import PackedBlockScheduler
from tests.frameworks.megatron import source
from tests.frameworks.megatron.test_block_scheduler import squares, step_time

pytestmark = pytest.mark.skipif(not source.has_dynamic_cp(), reason=source.__doc__ or "")
BATCHES = 2000


def over_budget(groups: list[list[list[int]]], lengths: list[int], budget: int) -> bool:
    """Whether any rank has more tokens of a group than it has room for."""
    for group in groups:
        ranks = np.bincount([sample for rank in group for sample in rank], minlength=len(lengths))
        if any(sum(lengths[i] / int(ranks[i]) for i in rank) > budget + 1e-6 for rank in group):
            return True
    return False


@pytest.mark.timeout(900)
def test_no_step_takes_longer_than_by_megatrons_own() -> None:
    theirs, random = source.megatron_schedule().DefaultDynamicCPScheduler, np.random.default_rng(0)
    took: list[float] = []
    for _ in range(BATCHES):
        ranks, budget = (int(random.choice(of)) for of in ([2, 4, 8, 16, 32, 64], [4096, 16384]))
        drawn = random.lognormal(
            np.log(2000), random.uniform(0.2, 1.6), random.integers(1, 8) * ranks
        )
        pieces = np.clip(np.ceil(drawn / (2 * ranks)), 1, budget // 2)
        lengths = (pieces * 2 * ranks).astype(int).tolist()
        asked: dict[str, Any] = {
            "max_seqlen_per_dp_cp_rank": budget, "cp_size": 2, "dp_size": ranks // 2,
            "microbatch_group_size_per_vp_stage": None,
        }  # fmt: skip
        samples = list(enumerate(lengths))
        by_them = theirs(**asked).get_groups_and_subsamples(samples)
        ours = PackedBlockScheduler(**asked, cost=squares, split_overhead=0.0)
        by_us = ours.get_groups_and_subsamples(samples)
        assert not over_budget(by_us, lengths, budget)
        took.append(step_time(by_us, lengths) / step_time(by_them, lengths))
        assert took[-1] <= 1 + 1e-9, (ranks, budget, lengths)
    assert np.mean(took) < 0.8


@pytest.mark.parametrize("pipeline", [None, 2])
def test_a_subclass_of_megatrons_own_plans_with_it(pipeline: int | None) -> None:
    """As `wrap_data_iterator` makes the class that `scheduler_map` names."""

    class Planned(source.megatron_schedule().DefaultDynamicCPScheduler):  # type: ignore[misc]
        def get_groups_and_subsamples(self, samples: list[tuple[int, int]]) -> Any:
            return PackedBlockScheduler(
                self.max_seqlen_per_dp_cp_rank,
                self.cp_size,
                self.dp_size,
                self.microbatch_group_size_per_vp_stage,
            ).get_groups_and_subsamples(samples)

    samples = [(10 + at, 64 * (at % 7 + 1)) for at in range(40)]
    made = Planned(1024, 2, 2, pipeline, max_num_seqs=None, min_cp_size=1)
    groups = made.get_groups_and_subsamples(samples)
    assert len(groups) % (pipeline or 1) == 0
    assert {i for group in groups for rank in group for i in rank} == {i for i, _ in samples}
