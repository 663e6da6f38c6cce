"""verl: the trainer's method `_balance_batch`, on the controller.

Plans ranks and micro-batches of like cost at the same time, small ones at both ends; with equal
sums alone (verl's Karmarkar-Karp) long micro-batches of one rank meet short ones of another. The
plan travels with the batch as the column `planned`; `verl_micro_batches.py` cuts as planned.
"""

import torch

from rollout_planner import log_seqlen_unbalance, plan_step


def _balance_batch(self, batch, metrics, logging_prefix="global_seqlen", keep_minibatch=False):
    assert not getattr(self, "use_prefix_grouper", False), "use verl's: prompts stay together"
    mask, actor = batch.batch["attention_mask"], self.config.actor_rollout_ref.actor
    lengths = mask.view(len(mask), -1).sum(-1).numpy()
    dp_size, size = self._get_dp_size(self.actor_rollout_wg, "actor"), len(lengths)
    limit = {"micro_batch_size": getattr(actor, "ppo_micro_batch_size_per_gpu", None)}
    most = 0
    if actor.use_dynamic_bsz:
        most = actor.ppo_max_token_len_per_gpu * getattr(actor, "ulysses_sequence_parallel_size", 1)
        limit = {"micro_batch_tokens": most, "oversize": "alone"}
    if keep_minibatch:
        size = actor.ppo_mini_batch_size
    sync = "step" if actor.strategy == "megatron" else "micro-step"
    ranks, planned = [[] for _ in range(dp_size)], [[] for _ in range(dp_size)]
    for start in range(0, len(lengths), size):
        own = lengths[start : start + size]
        step = plan_step(own, dp_size=dp_size, sync=sync, equal_counts=True, **limit)
        for rank, column, parts in zip(ranks, planned, step, strict=True):
            for number, part in enumerate(parts[::2][::-1] + parts[1::2]):
                rank += [start + i for i in part]
                column += [(number, most, size // dp_size) for _ in part]
    batch.reorder(torch.tensor([i for rank in ranks for i in rank]))
    batch.batch["planned"] = torch.tensor([row for column in planned for row in column])
    metrics.update(log_seqlen_unbalance(lengths, ranks, logging_prefix))
