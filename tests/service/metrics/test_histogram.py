"""Our histograms show what prometheus-client's own would have shown."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import Metric

from rollout_dispatcher.service.metrics.exposition import Histogram as Ours

BOUNDS = (0, 0.001, 0.5, 1, 2.5, 60, 7200, 1_000_000)


@pytest.fixture(scope="module", autouse=True)
def _no_created_series() -> None:
    disable_created_metrics()  # type: ignore[no-untyped-call]


def shown(histogram: Ours, registry: CollectorRegistry) -> Ours:
    class Only:
        def collect(self) -> list[Metric]:
            return [histogram.family()]

    registry.register(Only())
    return histogram


def pair() -> tuple[CollectorRegistry, Ours, CollectorRegistry, Histogram]:
    ours, theirs = CollectorRegistry(auto_describe=True), CollectorRegistry()
    return (
        ours,
        shown(Ours("h_seconds", "Some help.", BOUNDS), ours),
        theirs,
        Histogram("h_seconds", "Some help.", buckets=BOUNDS, registry=theirs),
    )


numbers = st.sampled_from(BOUNDS) | st.integers(0, 10**9) | st.integers(0, 64).map(lambda n: n / 64)


@given(st.lists(st.lists(numbers, max_size=20), max_size=4))
def test_it_shows_what_the_clients_histogram_shows(batches: list[list[float]]) -> None:
    ours, arrays, theirs, singles = pair()
    for batch in batches:
        arrays.observe_all(batch)
        for value in batch:
            singles.observe(value)
    found, expected = exposition(ours), exposition(theirs)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected)


@given(st.lists(st.tuples(st.sampled_from(["producer", "rank"]), numbers), max_size=20))
def test_one_with_a_label_does_too(values: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(auto_describe=True), CollectorRegistry()
    roles = ("producer", "rank")
    labelled = shown(Ours("h_seconds", "Some help.", BOUNDS, "role", roles), ours)
    others = Histogram("h_seconds", "Some help.", ["role"], buckets=BOUNDS, registry=theirs)
    for role in roles:
        others.labels(role)
    for role, value in values:
        labelled.observe(value, role)
        others.labels(role).observe(value)
    found, expected = exposition(ours), exposition(theirs)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected)


@given(st.lists(numbers, max_size=20))
def test_one_of_single_values_does_too(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(auto_describe=True), CollectorRegistry()
    plain = shown(Ours("h_seconds", "Some help.", BOUNDS), ours)
    others = Histogram("h_seconds", "Some help.", buckets=BOUNDS, registry=theirs)
    for value in values:
        plain.observe(value)
        others.observe(value)
    found, expected = exposition(ours), exposition(theirs)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected)


def test_an_empty_one_shows_every_bucket() -> None:
    ours, _, theirs, _ = pair()
    assert generate_latest(ours) == generate_latest(theirs)


def test_bounds_are_inclusive_and_what_is_beyond_counts_as_infinite() -> None:
    registry, histogram, *_ = pair()
    histogram.observe_all([1, 1.0000001, 2_000_000])
    found = exposition(registry)
    assert found['h_seconds_bucket{le="1.0"}'] == 1
    assert found['h_seconds_bucket{le="2.5"}'] == 2
    assert found['h_seconds_bucket{le="1e+06"}'] == 2
    assert found['h_seconds_bucket{le="+Inf"}'] == found["h_seconds_count"] == 3


def test_it_takes_an_array() -> None:
    registry, histogram, *_ = pair()
    histogram.observe_all(np.arange(4) / 4)
    assert exposition(registry)["h_seconds_sum"] == 1.5


def exposition(registry: CollectorRegistry) -> dict[str, float]:
    lines = generate_latest(registry).decode().splitlines()
    return {
        series: float(value)
        for series, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
    }
