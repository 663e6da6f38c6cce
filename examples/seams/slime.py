"""slime: `build_dp_schedule`, which packs micro-batches first and assigns them to ranks afterwards.

With virtual pipeline stages the number of micro-batches is a multiple of the stages' group.
"""

from rollout_planner import plan_step


def build_dp_schedule(
    args, train_parallel_config, total_lengths, *, global_batch_size, rollout_indices
):
    parallel, limit = train_parallel_config, {"micro_batch_size": args.micro_batch_size}
    if args.use_dynamic_batch_size:
        limit = {"micro_batch_tokens": args.max_tokens_per_gpu * parallel["cp_size"]}
    if parallel["vpp_size"] > 1:
        limit["multiple"] = parallel["microbatch_group_size_per_vp_stage"]
    samples = {}
    for at, rollout in enumerate(rollout_indices):
        samples.setdefault(rollout, []).append(at)
    rollouts, size = list(samples), global_batch_size
    assert len(rollouts) >= size, f"num_rollouts {len(rollouts)} < global_batch_size {size}"
    partitions, indices = ([[] for _ in range(parallel["dp_size"])] for _ in range(2))
    counts = []
    for first in range(0, len(rollouts) - size + 1, size):
        taken = [at for rollout in rollouts[first : first + size] for at in samples[rollout]]
        lengths = [total_lengths[at] for at in taken]
        ranks = plan_step(
            lengths, dp_size=parallel["dp_size"], sync="step", oversize="alone", **limit
        )
        assert all(map(all, ranks)), f"{len(taken)} samples are fewer than micro-batches"
        counts.append(len(ranks[0]))
        for rank, partition, own in zip(ranks, partitions, indices, strict=True):
            for part in rank:
                own.append(list(range(len(partition), len(partition) + len(part))))
                partition += [taken[i] for i in part]
    return partitions, indices, counts, [size] * len(counts)
