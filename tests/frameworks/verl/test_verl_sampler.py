"""`examples/verl_sampler.py`: verl's replay buffer hands out whole prompts that balance."""

import warnings
from collections import Counter
from typing import Any

import numpy as np

from rollout_planner import Quadratic, get_seqlen_balanced_partitions

with warnings.catch_warnings():  # what verl imports has deprecations
    warnings.simplefilter("ignore")
    from examples.verl_sampler import WindowReplayBuffer

COST = Quadratic(1.0, 24576.0, 0.0)
RANKS, BATCH, ANSWERS = 8, 16, 4


def buffer(**sampler_kwargs: Any) -> WindowReplayBuffer:
    """As verl's `_build_replay_buffer` makes it."""
    return WindowReplayBuffer(
        trainer_mode="separate_async",
        trainer_config={},
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs={"dp_size": RANKS, "micro_batch_tokens": 131_072} | sampler_kwargs,
    )


def test_prompts_are_whole_are_taken_once_and_none_waits_beyond_its_bound() -> None:
    found = batches(buffer(max_skips=4), rounds=40)
    taken = [uid for _, uids in found for uid in uids]
    assert max(Counter(taken).values()) == 1
    assert all(len(uids) == BATCH for _, uids in found)
    left = {f"p{number}" for number in range(20 * BATCH)} - set(taken)
    assert not left  # what came in the first half of the rounds has gone long before the end


def test_ranks_wait_less_than_for_the_oldest_prompts() -> None:
    chosen = waiting(batches(buffer(), rounds=30))
    oldest = waiting(batches(buffer(window_multiple=1), rounds=30))
    assert chosen < 0.5 * oldest


def batches(sampler: WindowReplayBuffer, rounds: int) -> list[tuple[list[int], list[str]]]:
    """What it selects, round by round, while prompts finish as fast as they are taken."""
    random, number, found = np.random.default_rng(0), 0, []
    partition, steps = sampler.partitions["train"], sampler.prompt_global_steps["train"]
    for _ in range(rounds):
        while len(steps) < 1.5 * BATCH:
            steps[f"p{number}"] = number
            for answer in range(ANSWERS):
                length = int(min(60_000, 2000 * (1 + random.pareto(1.3))))
                partition[f"p{number}_{answer}_0"] = {"seq_len": length}
            number += 1
        uids, _, _ = sampler._select_prompt_uids("train", set(steps), BATCH)
        keys = [key for key in partition if key.split("_")[0] in uids]
        found.append(([partition.pop(key)["seq_len"] for key in keys], uids))
        for uid in uids:
            del steps[uid]
    return found


def waiting(found: list[tuple[list[int], list[str]]]) -> float:
    """Mean excess of the slowest rank, once verl has split each batch over ranks."""
    excess = []
    for lengths, _ in found:
        cost = COST(np.array(lengths))
        parts = get_seqlen_balanced_partitions(cost.astype(int).tolist(), RANKS, equal_size=False)
        ranks = [cost[part].sum() for part in parts]
        excess.append(max(ranks) / np.mean(ranks) - 1)
    return float(np.mean(excess))
