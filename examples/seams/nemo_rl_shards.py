"""NeMo-RL: `shard_meta_for_dp` in `nemo_rl.models.policy.tq_policy`, with sequence packing.

The split over ranks, and the packing that workers look up in `extra_info`. Without sequence packing
it calls NeMo-RL's own.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
from nemo_rl.data_plane import preshard

from rollout_planner import plan_step


def shard_meta_for_dp(meta, *, dp_world, sequence_packing_args=None, **options):
    if sequence_packing_args is None:
        return preshard.shard_meta_for_dp(meta, dp_world=dp_world, **options)
    budget = sequence_packing_args["max_tokens_per_microbatch"]
    multiple = sequence_packing_args["sequence_length_pad_multiple"]
    batch_size = options.get("batch_size")
    lengths = np.array(meta.sequence_lengths)
    padded, size = -(-lengths // multiple) * multiple, batch_size or len(lengths)
    rows, indices, tokens, counts = ([[] for _ in range(dp_world)] for _ in range(4))
    for start in range(0, len(lengths), size):
        batch = padded[start : start + size]
        for rank, parts in enumerate(plan_step(batch, dp_size=dp_world, micro_batch_tokens=budget)):
            ends = np.cumsum([0, *map(len, parts)]).tolist()
            rows[rank] += [start + i for part in parts for i in part]
            indices[rank].append([list(pair) for pair in pairwise(ends)])
            tokens[rank].append([int(batch[part].sum()) for part in parts])
            counts[rank].append(ends[-1])
    packing = zip(rows, indices, tokens, counts, strict=True)
    metas = [
        replace(
            meta,
            sample_ids=[meta.sample_ids[i] for i in own],
            sequence_lengths=lengths[own].tolist(),
            tags=None,
            extra_info=meta.extra_info
            | {"micro_batch_indices": at, "micro_batch_lengths": of, "elem_counts_per_gb": n},
        )
        for own, at, of, n in packing
    ]
    return metas, np.argsort(np.concatenate(rows)).tolist()
