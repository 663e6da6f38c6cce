"""NeMo-RL: a `PromptGroupSampler`, named in `async_rl.sampler` by `name: custom` and a `target`.

Takes the ready prompt groups that balance best, first those that the window of weight versions
would drop next: a group is passed over at most `max_staleness_versions` times.
"""

import numpy as np
from nemo_rl.algorithms.async_utils.staleness_sampler import WindowedSampler

from rollout_planner import Quadratic, plan
from rollout_planner.types import Oversize, PlanConfig, Window


class BalancedSampler(WindowedSampler):
    def __init__(self, buffer, *, dp_size, micro_batch_tokens, max_staleness_versions=1):
        super().__init__(buffer, max_staleness_versions=max_staleness_versions)
        self.config = PlanConfig(
            dp_size=dp_size, dispatch_batch_size=1, by_groups=True, cost=Quadratic(),
            micro_batch_tokens=micro_batch_tokens, oversize=Oversize.ALONE,
            max_skips=max_staleness_versions,
        )  # fmt: skip

    async def select(self, *, current_train_weight, min_prompt_groups, max_prompt_groups):
        self._validate_group_bounds(min_prompt_groups, max_prompt_groups)
        lags = current_train_weight - np.array(self._buffer.start_weight_list)
        there = np.array(self._buffer.ready_list, dtype=bool)
        ready = np.flatnonzero(there & (lags >= 0) & (lags <= self.max_staleness_versions))
        if len(ready) > max_prompt_groups:
            lengths = [self._buffer.meta_list[i].sequence_lengths for i in ready]
            group = np.repeat(np.arange(len(ready)), [len(own) for own in lengths])
            window = Window(
                tokens=np.concatenate(lengths),
                skips=lags[ready][group],
                group=group,
                must_go=np.zeros(len(group), bool),
            )
            chosen = plan(window, self.config, take=max_prompt_groups).chosen
            ready = ready[np.unique(group[chosen])]
        return await self._finalize_selection(ready.tolist(), min_prompt_groups, max_prompt_groups)
