"""The settings of one running dispatcher, and the configurations of core and planner.

Building a `ServeConfig` raises ConfigError, with cause and remedy, for settings that contradict
each other (checks.py).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import ClassVar, Self

from pydantic import ValidationInfo, model_validator

from rollout_dispatcher.core.buffer.entry import NO_LIMITS, BufferLimits, MicroBatchLimits
from rollout_dispatcher.core.config import DispatchConfig
from rollout_dispatcher.core.measuring.cost_in_use import CostConfig
from rollout_dispatcher.core.planning.trigger import TriggerConfig
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.hints import renamed_in
from rollout_dispatcher.sample import Schema
from rollout_dispatcher.service.access import Access, open_access
from rollout_dispatcher.service.config.checks import problems
from rollout_dispatcher.service.config.options import ServeOptions
from rollout_dispatcher.service.config.values import (
    IncompleteGroups,
    LastBatch,
    Retain,
    schema_of,
)
from rollout_dispatcher.service.connections.descriptors import ConnectionLimits
from rollout_dispatcher.service.process import machine_memory
from rollout_planner.cost import AUTO, parse_cost
from rollout_planner.planner import validate_config
from rollout_planner.strategies import looks_ahead
from rollout_planner.types import (
    Grouping,
    Layout,
    MicroBatchOrder,
    Oversize,
    PlanConfig,
    longest_in_budget,
)

#: Default shares of the memory, as divisors: of buffered samples; of blocked pushes and of frames
#: being received.
BUFFER_SHARE, HELD_SHARE = 4, 16
#: Default bytes in payload stores, as a multiple of the bytes in memory.
REFERENCED_TIMES = 16
#: Options with the same names in the planner's config, and in the core's.
_PLANNED_AS_GIVEN = (
    "dp_size", "micro_batch_size", "micro_batch_tokens", "layout", "sync", "strategy",
    "micro_batch_multiple", "min_micro_batches", "sample_length_multiple", "rank_tokens",
    "pipeline_stages", "planning_budget", "max_split",
)  # fmt: skip
_DISPATCHED_AS_GIVEN = (
    "dp_size", "sync", "by_groups", "group_timeout", "producer_timeout", "rank_timeout",
    "max_staleness", "steps_per_version", "max_open_steps", "producer_credits",
)  # fmt: skip
#: In the context of a validation: names of options that are known to be wrong.
WRONG = "wrong"


class ServeConfig(ServeOptions):
    """The settings of one running dispatcher."""

    #: Options that `--help` shows, by theme.
    COMMON: ClassVar[dict[str, tuple[str, ...]]] = {
        "what every run sets": (
            "dp_size", "global_batch_size", "micro_batch_tokens", "micro_batch_size",
        ),
        "as the trainer works": (
            "sync", "layout", "pipeline_stages", "global_batch_groups", "cost",
        ),
        "window": (
            "window", "max_wait", "max_imbalance", "max_delay", "max_step_variation",
        ),
        "samples": (
            "groups", "group_size", "on_oversize", "max_staleness", "steps_per_version",
        ),
        "memory and disk": ("buffer_bytes", "journal_dir", "payload_stores", "record_dir"),
        "addresses and access": (
            "listen", "http", "token_file", "producer_token_file", "tls_cert", "tls_key",
            "tls_client_ca",
        ),
    }  # fmt: skip
    #: Headings of all options, each at the first one under it.
    HEADINGS: ClassVar[dict[str, str]] = {
        "dp_size": "steps",
        "window": "window and buffer",
        "fields": "samples",
        "cost": "planning",
        "max_imbalance": "when to dispatch",
        "max_staleness": "freshness, groups and the end of the stream",
        "listen": "addresses",
        "token_file": "security",
        "journal_dir": "journal",
        "payload_stores": "payloads by reference",
        "max_sample_tokens": "limits and deadlines",
        "record_dir": "observability",
    }

    @property
    def batch(self) -> int:
        """Samples in one step, or groups if `by_groups`."""
        return self.global_batch_size or self.global_batch_groups or 0

    @property
    def by_groups(self) -> bool:
        """Whether batch, window and capacity count groups."""
        return self.global_batch_groups is not None

    @property
    def window_samples(self) -> int:
        """Samples (or groups) in the window, floor(W * B), in decimals: 1.15 * 100 is 115."""
        return math.floor(Fraction(str(self.window)) * self.batch)

    @property
    def buffer_samples(self) -> int:
        """The cap of the buffer in samples (or groups)."""
        return self.window_samples if self.buffer_capacity is None else self.buffer_capacity

    @property
    def buffer_memory(self) -> int:
        """`buffer_bytes`, or its default."""
        share = machine_memory() // BUFFER_SHARE
        return share if self.buffer_bytes is None else self.buffer_bytes

    @property
    def held_memory(self) -> int:
        """`blocked_push_bytes`, or its default."""
        share = machine_memory() // HELD_SHARE
        return share if self.blocked_push_bytes is None else self.blocked_push_bytes

    @property
    def referenced_capacity(self) -> int:
        """`referenced_bytes`, or its default."""
        default = REFERENCED_TIMES * self.buffer_memory
        return default if self.referenced_bytes is None else self.referenced_bytes

    @property
    def retains(self) -> bool:
        """Whether committed steps are kept until a checkpoint covers them."""
        if self.sample_retention is None:
            return self.journal_dir is not None
        return self.sample_retention is Retain.CHECKPOINT

    @property
    def received_bytes(self) -> int:
        """`receive_bytes`, or its default."""
        default = max(self.max_frame_bytes, self.max_body_bytes, machine_memory() // HELD_SHARE)
        return default if self.receive_bytes is None else self.receive_bytes

    @property
    def connection_limits(self) -> ConnectionLimits:
        """The configured limits on connections, which descriptors may not allow."""
        most = self.max_connections
        return ConnectionLimits(most, most, self.max_pending_connections)

    @property
    def longest_in_budget(self) -> int | None:
        """Tokens of the longest sample that fits the budget once padded; None without a budget."""
        return longest_in_budget(
            self.micro_batch_tokens, self.sample_length_multiple, self.max_split
        )

    @property
    def order_in_step(self) -> MicroBatchOrder:
        """`micro_batch_order`, or its default."""
        pipeline = self.pipeline_stages > 1
        default = MicroBatchOrder.ENDS_SMALL if pipeline else MicroBatchOrder.PEAK_FIRST
        return self.micro_batch_order or default

    @property
    def skips_bound(self) -> int:
        """`max_delay`, or its default: four windows of dispatches, and six at the least."""
        default = max(6, math.ceil(4 * self.window))
        return default if self.max_delay is None else self.max_delay

    def plan_config(self) -> PlanConfig:
        """The planner's configuration. Raises ConfigError if the cost cannot be read."""
        variation = self.max_step_variation
        return PlanConfig(
            dispatch_batch_size=self.batch * ((self.group_size or 1) if self.by_groups else 1),
            by_groups=self.by_groups,
            cost=parse_cost(self.cost, _read),
            grouping=self.groups,
            micro_batch_order=self.order_in_step,
            max_skips=self.skips_bound,
            outlier_max_skips=self.outlier_max_delay,
            oversize=self.on_oversize,
            max_step_variation=None if variation == "off" else variation,
            **{name: getattr(self, name) for name in _PLANNED_AS_GIVEN},
        )

    def access(self) -> Access:
        """Credentials that clients must show; reads the files. Raises ConfigError."""
        return open_access(self)

    def check_size(self) -> Callable[[int], None]:
        """A function that raises ConfigError for a number of DP ranks without legal plans."""
        plan_config = self.plan_config()

        def check(dp_size: int) -> None:
            if dp_size > self.max_connections:
                raise ConfigError(
                    f"they would need as many connections, and --set max-connections is "
                    f"{self.max_connections}; raise it"
                )
            try:
                validate_config(replace(plan_config, dp_size=dp_size), self.window)
            except ConfigError as error:
                raise ConfigError(*map(renamed_in, error.problems)) from None

        return check

    @property
    def declared_schema(self) -> Schema | None:
        """The schema of all samples, if it is declared."""
        return schema_of(self.fields)

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> Self:
        wrong = (info.context or {}).get(WRONG, frozenset())
        if found := list(problems(self, wrong)):
            raise ConfigError(*found)
        return self


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


def core_config(config: ServeConfig) -> DispatchConfig:
    """The core's configuration."""
    batch = config.batch
    # Without a choice, a larger window would only delay samples.
    ahead = looks_ahead(config.strategy, config.max_split)
    window = config.window_samples if ahead else batch
    budget = config.longest_in_budget
    longest = config.max_sample_tokens
    if budget is not None and config.on_oversize is Oversize.ERROR:
        longest = min(longest, budget)
    return DispatchConfig(
        **{name: getattr(config, name) for name in _DISPATCHED_AS_GIVEN},
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
            group_size=config.group_size,
        ),
        trigger=TriggerConfig(batch=batch, window=window, max_wait=config.max_wait),
        target_excess=config.max_imbalance,
        groups_matter=config.groups is not Grouping.IGNORE,
        keep_incomplete=config.incomplete_groups is IncompleteGroups.KEEP,
        flush_partial=config.final_batch is LastBatch.FLUSH,
        check_size=config.check_size() if config.allow_dp_resize else None,
        drop_above=budget if config.on_oversize is Oversize.DROP else None,
        staleness_policy=config.on_stale,
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
        reports_accepted=config.record_dir is not None,
    )


def _micro_batch(config: ServeConfig) -> MicroBatchLimits:
    """Limits of a group, if groups stay in one micro-batch."""
    if config.groups is not Grouping.MICRO_BATCH:
        return NO_LIMITS
    return MicroBatchLimits(
        samples=config.micro_batch_size,
        tokens=None if config.on_oversize is Oversize.ALONE else config.longest_in_budget,
        length_multiple=config.sample_length_multiple,
        drops=config.on_oversize is Oversize.DROP,
    )
