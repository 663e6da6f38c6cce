"""Balancing as pure functions: arrays in, indices out; no IO, no clock, no state.

`planner.plan` is the door for the dispatcher itself; `karmarkar_karp`,
`get_seqlen_balanced_partitions` and `balance_batch` serve trainers that run without it.
"""

from rollout_dispatcher.balance.batch import balance_batch
from rollout_dispatcher.balance.cost.models import Quadratic, parse_cost, tokens
from rollout_dispatcher.balance.cost.transformer import TransformerCost, transformer_cost
from rollout_dispatcher.balance.planner import plan, plan_digest, validate_config
from rollout_dispatcher.balance.split.karmarkar_karp import (
    UnequalPartitions,
    get_seqlen_balanced_partitions,
    karmarkar_karp,
)

__all__ = [
    "Quadratic",
    "TransformerCost",
    "UnequalPartitions",
    "balance_batch",
    "get_seqlen_balanced_partitions",
    "karmarkar_karp",
    "parse_cost",
    "plan",
    "plan_digest",
    "tokens",
    "transformer_cost",
    "validate_config",
]
