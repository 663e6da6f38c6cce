"""Balancing as pure functions: arrays in, indices out; no IO, no clock, no state.

`planner.plan` is the door for the dispatcher itself; `public` is the one for trainers that run
without it, and `karmarkar_karp` and `get_seqlen_balanced_partitions` stand in for verl's.
"""

from rollout_dispatcher.balance.cost.models import Quadratic, parse_cost, tokens
from rollout_dispatcher.balance.cost.transformer import TransformerCost, transformer_cost
from rollout_dispatcher.balance.planner import plan, plan_digest, validate_config
from rollout_dispatcher.balance.public.batch import balance_batch
from rollout_dispatcher.balance.public.packing import pack
from rollout_dispatcher.balance.public.partition import balanced_partition
from rollout_dispatcher.balance.public.step import plan_step
from rollout_dispatcher.balance.public.unbalance import log_seqlen_unbalance
from rollout_dispatcher.balance.split.karmarkar_karp import (
    get_seqlen_balanced_partitions,
    karmarkar_karp,
)
from rollout_dispatcher.errors import UnequalPartitions

__all__ = [
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
