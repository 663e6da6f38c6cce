"""A scrape has one name for each family, series of single ranks, and no times of creation."""

from typing import Any

import pytest
from prometheus_client import disable_created_metrics, enable_created_metrics, generate_latest

from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.steps.rank_state import RankHello
from rollout_dispatcher.service.config.serve import ServeConfig, core_config
from rollout_dispatcher.service.http.probes import Snapshot
from rollout_dispatcher.service.metrics.registry import Metrics

RANKS = 3


def snapshot(**options: Any) -> Snapshot:
    """A scrape of a dispatcher whose ranks have joined."""
    config = ServeConfig(dp_size=RANKS, global_batch_size=6, micro_batch_size=2, **options)
    core = DispatcherCore(core_config(config))
    metrics = Metrics(config, core, lambda: 7.0)
    for dp_rank in range(RANKS):
        generation = 1 if dp_rank else None
        core.join(RankHello(f"r{dp_rank}", dp_rank, RANKS, generation), 1.0)
    return Snapshot(metrics.registry.collect())


def test_no_family_has_the_name_of_another_in_any_format() -> None:
    """Neither its own, which a counter has without `_total` in OpenMetrics, nor its series'."""
    suffixes = {
        "counter": ["_total"],
        "info": ["_info"],
        "histogram": ["_bucket", "_sum", "_count"],
    }
    names = [
        family.name + suffix
        for family in snapshot().collect()
        for suffix in ["", *suffixes.get(family.type, [])]
    ]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("per_rank_metrics", [True, False])
def test_series_of_single_ranks_can_be_switched_off(per_rank_metrics: bool) -> None:
    text = generate_latest(snapshot(per_rank_metrics=per_rank_metrics))
    assert (b'dp_rank="' in text) == per_rank_metrics


def test_no_series_has_a_time_of_creation_whatever_the_process_has_set() -> None:
    enable_created_metrics()  # type: ignore[no-untyped-call]
    try:
        text = generate_latest(snapshot())
    finally:
        disable_created_metrics()  # type: ignore[no-untyped-call]
    assert b"_created" not in text
