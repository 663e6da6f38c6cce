"""Our histograms show what prometheus-client's own would have shown."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import Metric

from rollout_dispatcher.service.metrics.histogram import Histogram as Ours

BOUNDS = (0, 0.001, 0.5, 1, 2.5, 60, 7200, 1_000_000)


@pytest.fixture(scope="module", autouse=True)
def _no_created_series() -> None:
    disable_created_metrics()  # type: ignore[no-untyped-call]


def pair(*roles: str) -> tuple[CollectorRegistry, Ours, CollectorRegistry, Histogram]:
    """Ours and theirs, each in a registry of its own; roles: with that label."""
    ours, theirs = CollectorRegistry(auto_describe=True), CollectorRegistry()
    labels = ("role", roles) if roles else ()
    mine = Ours("h_seconds", "Some help.", BOUNDS, *labels)

    class Only:
        def collect(self) -> list[Metric]:
            return [mine.family()]

    ours.register(Only())
    other = Histogram("h_seconds", "Some help.", labels[:1], buckets=BOUNDS, registry=theirs)
    for role in roles:
        other.labels(role)
    return ours, mine, theirs, other


numbers = st.sampled_from(BOUNDS) | st.integers(0, 10**9) | st.integers(0, 64).map(lambda n: n / 64)


@given(batches=st.lists(st.lists(numbers, max_size=20), max_size=4), at_once=st.booleans())
def test_it_shows_what_the_clients_histogram_shows(
    batches: list[list[float]], at_once: bool
) -> None:
    ours, mine, theirs, other = pair()
    for batch in batches:
        if at_once:
            mine.observe_all(batch)
        for value in batch:
            other.observe(value)
            if not at_once:
                mine.observe(value)
    assert exposition(ours) == pytest.approx(exposition(theirs))


@given(st.lists(st.tuples(st.sampled_from(["producer", "rank"]), numbers), max_size=20))
def test_one_with_a_label_does_too(values: list[tuple[str, float]]) -> None:
    ours, mine, theirs, other = pair("producer", "rank")
    for role, value in values:
        mine.observe(value, role)
        other.labels(role).observe(value)
    assert exposition(ours) == pytest.approx(exposition(theirs))


def test_an_empty_one_shows_every_bucket() -> None:
    ours, _, theirs, _ = pair()
    assert generate_latest(ours) == generate_latest(theirs)


def test_bounds_are_inclusive_and_what_is_beyond_counts_as_infinite() -> None:
    registry, histogram, *_ = pair()
    histogram.observe_all(np.array([1, 1.0000001, 2_000_000]))
    found = exposition(registry)
    assert found['h_seconds_bucket{le="1.0"}'] == 1
    assert found['h_seconds_bucket{le="2.5"}'] == 2
    assert found['h_seconds_bucket{le="1e+06"}'] == 2
    assert found['h_seconds_bucket{le="+Inf"}'] == found["h_seconds_count"] == 3


def exposition(registry: CollectorRegistry) -> dict[str, float]:
    lines = generate_latest(registry).decode().splitlines()
    return {
        series: float(value)
        for series, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
    }
