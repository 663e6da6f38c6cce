"""verl's custom_sampler: our selection in its replay buffer, without the service. verl 0.9.1.

In the configuration of verl's asynchronous trainers:

    trainer.v1.sampler.custom_sampler.path=examples/verl_sampler.py
    trainer.v1.sampler.custom_sampler.name=WindowReplayBuffer
    trainer.v1.sampler.sampler_kwargs='{dp_size: 8, micro_batch_tokens: 32768}'

verl trains on the oldest finished prompts, and splits what it got over the ranks. Which prompts it
got decides how well that can go: here they are the set that balances best, out of those that are
there, up to `window_multiple` batches of them; none is passed over more than `max_skips` times.
"""

from collections import Counter, defaultdict
from typing import Any

import numpy as np
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from rollout_planner import Quadratic, plan
from rollout_planner.types import Oversize, PlanConfig, Window

# integration: begin


class WindowReplayBuffer(ReplayBufferAsync):
    """Selects from a window. sampler_kwargs: `dp_size`, `micro_batch_tokens`, and as below."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given = self.sampler_kwargs
        self.window_multiple = float(given.get("window_multiple", 1.5))
        self.config = PlanConfig(
            dp_size=int(given["dp_size"]),
            dispatch_batch_size=1,  # batches are counted in prompts
            by_groups=True,
            cost=Quadratic(*given.get("cost", (1.0, 24576.0, 0.0))),
            micro_batch_tokens=int(given["micro_batch_tokens"]),
            oversize=Oversize.ALONE,
            max_skips=int(given.get("max_skips", 6)),
        )
        self.skips = Counter[str]()

    def _select_prompt_uids(
        self, partition_id: str, sampleable_keys: set[str], batch_size: int
    ) -> tuple[list[str], dict[str, dict[str, Any]], dict[str, int]]:
        oldest_first, trajectories, versions = super()._select_prompt_uids(
            partition_id, sampleable_keys, len(sampleable_keys)
        )
        chosen = oldest_first[:batch_size]
        if partition_id != "val":
            there = oldest_first[: round(batch_size * self.window_multiple)]
            chosen = self.best(there, trajectories, batch_size)
            self.skips.update(set(there) - set(chosen))
            self.skips = Counter({uid: self.skips[uid] for uid in self.skips if uid not in chosen})
        return chosen, trajectories, versions

    def best(
        self, uids: list[str], trajectories: dict[str, dict[str, Any]], batch_size: int
    ) -> list[str]:
        """The prompts whose trajectories, all of them, balance best over ranks."""
        lengths = defaultdict(list)
        for key, tag in trajectories.items():
            lengths[key.split("_")[0]].append(tag["seq_len"])
        group = np.repeat(np.arange(len(uids)), [len(lengths[uid]) for uid in uids])
        if len(uids) <= batch_size or not group.size:
            return uids
        window = Window(
            tokens=np.array([length for uid in uids for length in lengths[uid]]),
            skips=np.array([self.skips[uids[index]] for index in group]),
            group=group,
            must_go=np.zeros(len(group), bool),
        )
        taken = np.unique(group[plan(window, self.config, take=batch_size).chosen])
        return [uids[index] for index in taken]


# integration: end
