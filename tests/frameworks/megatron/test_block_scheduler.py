"""`BlockScheduler` where Megatron-Core has its own: in its loader, and beside it, planned alike."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

from rollout_planner import BlockScheduler
from rollout_planner.types import FloatArray, IntArray
from tests.support.torchrun import torchrun_command

LOADER = Path(__file__).with_name("loader.py")
RANKS, BATCHES = 4, 2000


def squares(lengths: IntArray) -> FloatArray:
    """What Megatron-Core takes work for, `get_total_workload`."""
    found: FloatArray = lengths.astype(np.float64) ** 2
    return found


def step_time(groups: list[list[list[int]]], lengths: list[int]) -> float:
    """Of a plan, by Megatron-Core's measure: no doubling costs anything."""
    whole = 0.0
    for group in groups:
        ranks = np.bincount([sample for rank in group for sample in rank], minlength=len(lengths))
        assert all(group)
        whole += max(sum(lengths[i] ** 2 / int(ranks[i]) for i in rank) for rank in group)
    return whole


@pytest.mark.timeout(900)
def test_no_step_takes_longer_than_by_megatrons_own() -> None:
    random = np.random.default_rng(0)
    ours, theirs = [], []
    for _ in range(BATCHES):
        ranks = int(random.choice([2, 4, 8, 16, 32, 64]))
        longest = int(random.choice([4096, 8192, 16384]))
        drawn = random.lognormal(
            np.log(2000), random.uniform(0.2, 1.6), random.integers(1, 8) * ranks
        )
        pieces = np.clip(np.ceil(drawn / (2 * ranks)), 1, longest // 2)
        lengths = (pieces * 2 * ranks).astype(int).tolist()
        group = SimpleNamespace(size=lambda ranks=ranks: ranks)
        samples = list(enumerate(lengths))
        _, by_them = BalancedCPScheduler(longest, group).get_groups_and_subsamples(samples, None)
        scheduler = BlockScheduler(longest, group, cost=squares, split_overhead=0.0)
        _, by_us = scheduler.get_groups_and_subsamples(samples)
        theirs.append(step_time(by_them, lengths))
        ours.append(step_time(by_us, lengths))
        assert ours[-1] <= theirs[-1] * (1 + 1e-9), (ranks, longest, lengths)
    assert np.mean(np.divide(ours, theirs)) < 0.8


def test_megatrons_loader_sends_each_rank_what_it_trains(tmp_path: Path) -> None:
    command = [*torchrun_command(RANKS, tmp_path), str(LOADER), str(tmp_path)]
    subprocess.run(command, check=True, timeout=200)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    groups = found[0]["groups"]
    assert all(each["groups"] == groups for each in found)
    trained = [
        sorted(sample for group in groups for sample in group[rank]) for rank in range(RANKS)
    ]
    assert [sorted(map(int, each["samples"])) for each in found] == trained
    lengths = {int(i): n for each in found for i, n in each["samples"].items()}
    assert lengths == dict(enumerate(found[0]["lengths"]))
    split = {sample for group in groups for sample in group[0] if sample in group[1]}
    assert split, "the longest sample is on several ranks"


@pytest.mark.parametrize("ranks", [2, 8])
def test_lengths_are_told_beside_ids_as_megatron_has_them(ranks: int) -> None:
    group = SimpleNamespace(size=lambda: ranks)
    samples = [(10 + i, 64 * (i + 1)) for i in range(20)]
    lengths, ids = BlockScheduler(1024, group).get_groups_and_subsamples(samples, None)
    theirs, _ = BalancedCPScheduler(1024, group).get_groups_and_subsamples(samples, None)
    assert [[len(rank) for rank in each] for each in lengths] == [
        [len(rank) for rank in each] for each in ids
    ]
    assert sorted({n for each in lengths for rank in each for n in rank}) == sorted(
        {n for each in theirs for rank in each for n in rank}
    )
