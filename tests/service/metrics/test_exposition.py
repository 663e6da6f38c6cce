"""What is scraped says the same as prometheus-client's own text would."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Info,
    disable_created_metrics,
    enable_created_metrics,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families as read_text

from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.steps.rank_state import RankHello
from rollout_dispatcher.service.config.serve import ServeConfig, core_config
from rollout_dispatcher.service.metrics.exposition import RankFamily, render
from rollout_dispatcher.service.metrics.registry import Metrics

RANKS = 3


@pytest.fixture(scope="module", autouse=True)
def _no_created_series() -> None:
    disable_created_metrics()  # type: ignore[no-untyped-call]


def of_a_dispatcher(**options: Any) -> CollectorRegistry:
    """What a dispatcher shows whose ranks have joined."""
    config = ServeConfig(dp_size=RANKS, global_batch_size=6, micro_batch_size=2, **options)
    core = DispatcherCore(core_config(config))
    metrics = Metrics(config, core, lambda: 7.0)
    for dp_rank in range(RANKS):
        generation = 1 if dp_rank else None
        core.join(RankHello(f"r{dp_rank}", dp_rank, RANKS, generation), 1.0)
    metrics.plan_duration.observe(0.003)
    metrics.connection_errors.labels("rank", "eof").inc()
    return metrics.registry


def of_anything() -> CollectorRegistry:
    """Values and labels that none of ours has."""
    registry = CollectorRegistry()
    gauge = Gauge("odd", 'A "gauge" with \\ and a\nline.', ["what", "why"], registry=registry)
    for at, value in enumerate((float("inf"), -float("inf"), float("nan"), -0.5, 1e300, 123456789)):
        gauge.labels(f'"{at}"\n', "\\ü").set(value)
    Counter("never", "Labelled, and nothing happened.", ["why"], registry=registry)
    Info("about", "Facts.", registry=registry).info({"version": "1.0"})
    return registry


def told(families: Iterable[Metric]) -> dict[object, str]:
    """Each series and its type -> its value, as text: not-a-number equals nothing."""
    return {
        (family.type, family.documentation, sample.name, *sorted(sample.labels.items())): repr(
            sample.value
        )
        for family in families
        if not family.name.startswith(("process_", "dispatcher_rank_last_seen"))
        for sample in family.samples
    }


@pytest.mark.parametrize("make", [of_a_dispatcher, of_anything])
def test_it_says_what_the_client_library_says(make: Callable[[], CollectorRegistry]) -> None:
    registry = make()
    text = render(list(registry.collect())).decode()
    assert told(read_text(text)) == told(read_text(generate_latest(registry).decode()))


def test_no_family_has_the_name_of_another_in_any_format() -> None:
    """Neither its own, which a counter has without `_total` in OpenMetrics, nor its series'."""
    suffixes = {
        "counter": ["_total"],
        "info": ["_info"],
        "histogram": ["_bucket", "_sum", "_count"],
    }
    names = [
        family.name + suffix
        for family in of_a_dispatcher().collect()
        for suffix in ["", *suffixes.get(family.type, [])]
    ]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("per_rank_metrics", [True, False])
def test_series_of_single_ranks_can_be_switched_off(per_rank_metrics: bool) -> None:
    families = of_a_dispatcher(per_rank_metrics=per_rank_metrics).collect()
    labels = {label for family in families for sample in family.samples for label in sample.labels}
    assert ("dp_rank" in labels) == per_rank_metrics


def test_a_family_of_ranks_can_be_asked_for_one() -> None:
    family = RankFamily("dispatcher_x", "Text.", "counter", {0: 1.5, 7: 2})
    family.add({7: 0.25}, cost_key='"log-prob"')
    registry = CollectorRegistry()

    class Only:
        def collect(self) -> list[Metric]:
            return [family]

    registry.register(Only())
    assert registry.get_sample_value("dispatcher_x_total", {"dp_rank": "7"}) == 2
    labels = {"dp_rank": "7", "cost_key": '"log-prob"'}
    assert registry.get_sample_value("dispatcher_x_total", labels) == 0.25
    assert render([family]) == generate_latest(registry)


def test_when_a_series_was_created_is_not_told_whatever_the_process_has_set() -> None:
    enable_created_metrics()  # type: ignore[no-untyped-call]
    try:
        families = list(of_a_dispatcher().collect())
    finally:
        disable_created_metrics()  # type: ignore[no-untyped-call]
    assert any(each.name.endswith("_created") for family in families for each in family.samples)
    assert b"_created" not in render(families)
