"""verl: the choice of a `custom_sampler`; examples/verl_sampler.py is the buffer around it.

Takes the finished prompts that balance best; pass them oldest first. None is passed over more than
`max_skips` times, unless more than `max_skips + 1` batches of them wait.
"""

import numpy as np

from rollout_planner import Quadratic, plan
from rollout_planner.types import Oversize, PlanConfig, Window


def best_prompts(lengths_of, skips, batch_size, *, dp_size, micro_batch_tokens, max_skips=6):
    """lengths_of, skips: by prompt, tokens of its answers and how often it was passed over."""
    uids = list(lengths_of)
    group = np.repeat(np.arange(len(uids)), [len(lengths_of[uid]) for uid in uids])
    window = Window(
        tokens=np.concatenate([lengths_of[uid] for uid in uids]),
        skips=np.array([skips[uids[at]] for at in group]),
        group=group,
        must_go=np.zeros(len(group), bool),
    )
    config = PlanConfig(
        dp_size=dp_size, dispatch_batch_size=1, by_groups=True, cost=Quadratic(),
        micro_batch_tokens=micro_batch_tokens, oversize=Oversize.ALONE, max_skips=max_skips,
    )  # fmt: skip
    return [uids[at] for at in np.unique(group[plan(window, config, take=batch_size).chosen])]
