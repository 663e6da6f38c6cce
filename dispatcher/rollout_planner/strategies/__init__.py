"""The strategies: each is a file here that ends with its `STRATEGY`, under its name in `Strategy`.

A new one is one file and one line: `BEST_FIT = "best-fit"` in `plan.Strategy` is looked for in
`best_fit.py`. Nothing else asks which strategy it is.
"""

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module

from rollout_planner.split.group_items import group_items, members_of_items
from rollout_planner.split.parts import Batch, Parts
from rollout_planner.strategies.strategy import PlanningStrategy
from rollout_planner.types import Grouping, PlanConfig, Strategy
from rollout_planner.work import Work

STRATEGIES: Mapping[Strategy, PlanningStrategy] = {
    name: import_module(f"{__name__}.{name.name.lower()}").STRATEGY for name in Strategy
}


def looks_ahead(strategy: str) -> bool:
    """Whether the strategy of this name chooses from a window; the others take the oldest."""
    return STRATEGIES[Strategy(strategy)].looks_ahead


def split(batch: Batch, config: PlanConfig, work: Work) -> Parts:
    """By the config's strategy; groups that stay in one micro-batch as samples are elsewhere."""
    strategy = STRATEGIES[config.strategy]
    if batch.group is None or config.grouping is not Grouping.MICRO_BATCH:
        return strategy.split(batch, config, work)
    items, own = group_items(batch, batch.group, config)
    return members_of_items(strategy.split(items, own, work), batch.group)


def plain_split(batch: Batch, config: PlanConfig) -> Parts:
    """What a trainer does without any of this: samples dealt to ranks as they came."""
    alone = batch if batch.group is None else replace(batch, group=None)
    return STRATEGIES[Strategy.ROUND_ROBIN].split(alone, config, Work(0.0))
