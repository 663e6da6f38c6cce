"""`examples/seams/nemo_rl_driver.py` in NeMo-RL's own driver class."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.frameworks.megatron import source
from tests.support.seams import seam

pytestmark = pytest.mark.skipif(not source.has_driver(), reason=source.__doc__ or "")
DP, CP, BUDGET = 4, 2, 1024


def test_its_shards_hold_every_sample_within_the_budget() -> None:
    module = source.nemo_rl_driver()
    pieces = np.ceil(np.random.default_rng(0).lognormal(5.5, 1, 96) / 16)
    lengths = (np.clip(pieces, 1, BUDGET * DP * CP // 16) * 16).astype(int).tolist()
    config = SimpleNamespace(max_seqlen_per_dp_cp_rank=BUDGET)
    driver = module.HeadNodeHCPScheduler(config, DP, CP, BUDGET * CP, megatron_cfg={})
    page = seam("schedule_samples")["schedule_samples"]
    driver.schedule_samples = lambda seq_lengths: page(driver, seq_lengths)
    data = module.BatchedDataDict(
        input_ids=torch.arange(len(lengths))[:, None].repeat(1, 8),
        input_lengths=torch.tensor(lengths),
    )

    shards = [shard for of_rank in driver.schedule_and_shard(data) for shard in of_rank]

    groups = shards[0]["sample_id_groups"]
    held = np.zeros(len(lengths))
    assert len(shards) == DP * CP
    for at, shard in enumerate(shards):
        names = [sample for group in groups for sample in group[at]]
        sizes = dict(zip(names, shard["local_cp_sizes"].tolist(), strict=True))
        assert shard["sample_id_groups"] == groups
        assert shard["shard_sample_ids"] == names == shard["input_ids"][:, 0].tolist()
        assert shard["input_lengths"].tolist() == [lengths[i] for i in names]
        np.add.at(held, names, [1 / sizes[i] for i in names])
        for group in groups:
            assert len({sizes[i] for i in group[at]}) == 1, "a forward pass has one size"
            assert sum(lengths[i] / sizes[i] for i in group[at]) <= BUDGET
    assert held.tolist() == [1.0] * len(lengths)
