"""Balancing as pure functions: arrays in, indices out; no IO, no clock, no state.

`planner.plan` is the door for the dispatcher itself; `karmarkar_karp`,
`get_seqlen_balanced_partitions` and `balance_batch` serve trainers that run without it.
"""

from dispatcher.balance.batch import balance_batch
from dispatcher.balance.cost import Quadratic, parse_cost, tokens
from dispatcher.balance.karmarkar_karp import (
    UnequalPartitions,
    get_seqlen_balanced_partitions,
    karmarkar_karp,
)
from dispatcher.balance.planner import plan, plan_digest, validate_config
from dispatcher.balance.transformer import TransformerCost, transformer_cost

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
