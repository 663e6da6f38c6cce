"""Balancing as pure functions: arrays in, indices out; no IO, no clock, no state.

`planner.plan` is the door for the dispatcher itself; `public` is the one for trainers that run
without it, and `karmarkar_karp` and `get_seqlen_balanced_partitions` stand in for verl's.
"""

from rollout_planner.cost import Quadratic, TransformerCost, parse_cost, tokens, transformer_cost
from rollout_planner.errors import UnequalPartitions
from rollout_planner.planner import plan, plan_digest, validate_config
from rollout_planner.public.batch import balance_batch
from rollout_planner.public.megatron import BlockScheduler, PackedBlockScheduler
from rollout_planner.public.partition import balanced_partition, log_seqlen_unbalance, pack
from rollout_planner.public.step import plan_step
from rollout_planner.split.karmarkar_karp import get_seqlen_balanced_partitions, karmarkar_karp

__all__ = [
    "BlockScheduler",
    "PackedBlockScheduler",
    "Quadratic",
    "TransformerCost",
    "UnequalPartitions",
    "balance_batch",
    "balanced_partition",
    "get_seqlen_balanced_partitions",
    "karmarkar_karp",
    "log_seqlen_unbalance",
    "pack",
    "parse_cost",
    "plan",
    "plan_digest",
    "plan_step",
    "tokens",
    "transformer_cost",
    "validate_config",
]
