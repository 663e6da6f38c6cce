"""The part of the settings that the core needs, in its own terms."""

from rollout_dispatcher.core.buffer.entry import NO_LIMITS, BufferLimits, MicroBatchLimits
from rollout_dispatcher.core.config import DispatchConfig
from rollout_dispatcher.core.measuring.cost_in_use import CostConfig
from rollout_dispatcher.core.planning.trigger import TriggerConfig
from rollout_dispatcher.service.config.options import ServeConfig
from rollout_dispatcher.service.config.types import IncompleteGroups, LastBatch
from rollout_planner.cost import AUTO
from rollout_planner.strategies import looks_ahead
from rollout_planner.types import Grouping, Layout, Oversize


def core_config(config: ServeConfig) -> DispatchConfig:
    """The part of the settings that the core needs."""
    batch = config.batch
    # Where nothing is chosen a larger window would be waiting for nothing.
    window = config.window_samples if looks_ahead(config.strategy) else batch
    budget = config.longest_in_budget
    longest = config.max_sample_tokens
    if budget is not None and config.oversize is Oversize.ERROR:
        longest = min(longest, budget)
    return DispatchConfig(
        dp_size=config.dp_size,
        limits=BufferLimits(
            samples=config.buffer_samples,
            group=None if config.by_groups else batch,
            tokens=config.buffer_tokens,
            nbytes=config.buffer_memory,
            max_sample_tokens=longest,
            held_bytes=config.held_memory,
            stores=frozenset(config.payload_stores),
            referenced_bytes=config.referenced_capacity,
            micro_batch=_micro_batch(config),
        ),
        trigger=TriggerConfig(batch=batch, window=window, max_wait=config.max_wait),
        target_excess=config.target_excess,
        sync=config.sync,
        groups_matter=config.groups is not Grouping.IGNORE,
        by_groups=config.by_groups,
        keep_incomplete=config.incomplete_groups is IncompleteGroups.KEEP,
        flush_partial=config.last_batch is LastBatch.FLUSH,
        check_size=config.check_size() if config.elastic else None,
        drop_above=budget if config.oversize is Oversize.DROP else None,
        group_timeout=config.group_timeout,
        producer_timeout=config.producer_timeout,
        rank_timeout=config.rank_timeout,
        max_staleness=config.max_staleness,
        steps_per_version=config.steps_per_version,
        staleness_policy=config.staleness_policy,
        max_open_steps=config.max_open_steps,
        producer_credits=config.producer_credits,
        id_horizon=config.sample_id_horizon,
        schema=config.declared_schema,
        cost=CostConfig(
            config.plan_config().cost,
            adapts=config.cost.partition(":")[0] == AUTO,
            padded=config.layout is Layout.PADDED,
            multiple=config.sample_length_multiple,
        ),
        durable=config.journal_dir is not None,
        retain=config.retains,
        tells_accepted=config.record is not None,
    )


def _micro_batch(config: ServeConfig) -> MicroBatchLimits:
    """What groups have to fit that stay in one micro-batch."""
    if config.groups is not Grouping.MICRO_BATCH:
        return NO_LIMITS
    return MicroBatchLimits(
        samples=config.micro_batch_size,
        tokens=None if config.oversize is Oversize.ALONE else config.longest_in_budget,
        length_multiple=config.sample_length_multiple,
        drops=config.oversize is Oversize.DROP,
    )
