"""OpenRLHF: `balance_experiences`, which assigns samples to ranks by length, in a serpentine."""

from rollout_planner import plan_step


def balance_experiences(experiences, args):
    items = [item for each in experiences for item in split_experience_batch(each)]
    ranks = args.actor.num_nodes * args.actor.num_gpus_per_node
    ranks //= args.ds.ring_attn_size * args.ds.tensor_parallel_size
    lengths = [int(item.total_length) for item in items]
    most = -(-len(items) // ranks)
    parts = plan_step(lengths, dp_size=ranks, micro_batch_size=most, sync="step")
    return [make_experience_batch([items[i] for i in part]) for [part] in parts]
