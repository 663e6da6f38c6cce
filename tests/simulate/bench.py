"""What the tests of the simulator share: small traces, settings, and recorded steps."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from rollout_dispatcher.core.buffer.entry import BufferLimits
from rollout_dispatcher.core.config import DispatchConfig
from rollout_dispatcher.core.planning.trigger import TriggerConfig
from rollout_dispatcher.simulate.replay import Setting
from rollout_dispatcher.simulate.trace import Trace
from rollout_planner.cost import Quadratic
from rollout_planner.types import Grouping, Oversize, PlanConfig, Strategy, Sync

HEADER = "arrival_s,group,run,prompt_tokens,response_tokens,truncated"


def make_trace(
    tokens: Iterable[int],
    group: Sequence[int] | None = None,
    arrival: Sequence[float] | None = None,
) -> Trace:
    lengths = np.fromiter(tokens, np.int64)
    count = len(lengths)
    groups = np.full(count, -1) if group is None else np.array(group)
    times = np.full(count, np.nan) if arrival is None else np.array(arrival, dtype=np.float64)
    return Trace("made", np.arange(count), lengths, groups.astype(np.int64), times)


def make_setting(
    window: float = 1.5,
    strategy: Strategy = Strategy.WINDOW,
    *,
    ranks: int = 2,
    batch: int = 8,
    tokens: int | None = None,
    sync: Sync = Sync.MICRO_STEP,
    grouping: Grouping = Grouping.IGNORE,
    oversize: Oversize = Oversize.ALONE,
    max_skips: int = 6,
    target_excess: float = 0.0,
    max_wait: float = 2.0,
) -> Setting:
    """One sample a micro-batch, or a token budget."""
    size = int(window * batch)
    plan = PlanConfig(
        dp_size=ranks,
        dispatch_batch_size=batch,
        cost=Quadratic(),
        micro_batch_size=1 if tokens is None else None,
        micro_batch_tokens=tokens,
        sync=sync,
        strategy=strategy,
        grouping=grouping,
        oversize=oversize,
        max_skips=max_skips,
    )
    core = DispatchConfig(
        dp_size=ranks,
        limits=BufferLimits(size, batch, None, 1 << 30, 2**31 - 1),
        trigger=TriggerConfig(batch, size, max_wait),
        target_excess=target_excess,
        groups_matter=grouping is not Grouping.IGNORE,
        group_timeout=1e9,
    )
    return Setting(strategy, window, plan, core)


def shared_trace(root: Path, name: str) -> Path:
    """A real trace beside the checkout; skips the test without it."""
    path = root.parent / "shared" / "traces" / f"{name}.csv.gz"
    if not path.exists():
        pytest.skip(f"the trace {path.name} is not beside this checkout")
    return path
