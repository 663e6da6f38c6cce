"""verl's dynamic context parallelism, with `PackedBlockScheduler` where it looks for Megatron's."""

import sys
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rollout_planner import PackedBlockScheduler

with warnings.catch_warnings():  # what verl imports has deprecations
    warnings.simplefilter("ignore")
    from verl.utils import dynamic_cp_scheduler as dcp
    from verl.utils.tensordict_utils import get_non_tensor_data

WHERE = "megatron.core.datasets.data_schedule"


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as one of its ranks sees it."""

    of: int
    own: int

    def size(self) -> int:
        return self.of

    def rank(self) -> int:
        return self.own


@pytest.fixture(autouse=True)
def _by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType(WHERE)
    module.DefaultDynamicCPScheduler = PackedBlockScheduler
    for at, _ in enumerate(WHERE.split("."), start=1):
        name = ".".join(WHERE.split(".")[:at])
        monkeypatch.setitem(sys.modules, name, module if name == WHERE else ModuleType(name))


@pytest.mark.parametrize(("dp_size", "cp_size", "budget"), [(2, 1, 4096), (4, 2, 512), (3, 2, 512)])
def test_every_token_is_trained_once_within_the_budget_of_its_rank(
    dp_size: int, cp_size: int, budget: int
) -> None:
    ranks = dp_size * cp_size
    random = np.random.default_rng(ranks)
    lengths = [int(n) for n in np.clip(random.lognormal(5, 1, 8 * ranks), 1, 2 * budget)]
    rows = [torch.full((length,), at) for at, length in enumerate(lengths)]
    batch = TensorDict(
        {"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)},
        batch_size=[len(lengths)],
    )
    scheduler = dcp.DynamicCPScheduler(budget, dp_size=dp_size, cp_size=cp_size)
    trained, led = 0, list[int]()
    begun = set()
    for rank in range(ranks):
        micro_batches = scheduler.schedule(batch, Group(ranks, rank), tp_size=1)
        begun.add(len(micro_batches))
        for each in micro_batches:
            said = {name: get_non_tensor_data(each, name, None) for name in SAID}
            assert len(said[dcp.DCP_PADDING_MASK]) <= budget
            assert [int(row[0]) for row in each["input_ids"].unbind()] == said[dcp.DCP_SAMPLE_IDS]
            trained += said[dcp.DCP_LOCAL_NUM_TOKENS]
            led += said[dcp.DCP_SAMPLE_IDS] if said[dcp.DCP_GROUP_LEADER] else []
    assert trained == sum(lengths)
    assert sorted(led) == list(range(len(lengths)))
    assert len(begun) == 1


SAID = (
    dcp.DCP_SAMPLE_IDS,
    dcp.DCP_GROUP_LEADER,
    dcp.DCP_PADDING_MASK,
    dcp.DCP_LOCAL_NUM_TOKENS,
)
