"""NeMo-RL: `HeadNodeHCPScheduler.schedule_samples` in `nemo_rl.models.policy.hybrid_cp_scheduler`.

The driver's plan of context parallelism, a size for each packed micro-batch, as pull request 2133
has it. It packs the samples of a rank and group, so the budget of a rank limits their sum.
"""

from rollout_planner import PackedBlockScheduler


def schedule_samples(self, seq_lengths):
    scheduler = PackedBlockScheduler(self.max_seqlen_per_dp_cp_rank, self.cp_size, self.dp_size)
    groups = scheduler.get_groups_and_subsamples(list(enumerate(seq_lengths)))
    lengths = [[[seq_lengths[i] for i in rank] for rank in group] for group in groups]
    return lengths, groups
