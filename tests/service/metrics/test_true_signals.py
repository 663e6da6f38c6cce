"""What metrics say is so, while it is so: seen from outside."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_dispatcher.protocol import messages as m
from tests.service.conftest import SMALL, Serve
from tests.support.client import Producer, Trainer
from tests.support.server import ServeProcess, eventually


def test_a_wait_shows_in_its_rate_while_it_lasts(serve: Serve) -> None:
    server = serve()
    with Trainer(server.endpoint, 2) as trainer:
        for rank in trainer.ranks:
            rank.demand(taken=-1)
            rank.settle()
        Producer(server.endpoint, "p").push([3, 4, 5, 6])
        trainer.train()
        for rank in trainer.ranks:
            rank.demand(taken=0)
            rank.settle()
        wait = "rank_time_seconds_total{cause=no-samples}"
        first, begun = server.scrape()[wait], time.monotonic()
        server.await_scrape(lambda found: found[wait] > first + 0.3, "it grows")
        assert server.scrape()[wait] <= first + 2 * (time.monotonic() - begun + 0.5)
        assert server.scrape()["rank_wait_duration_seconds_count"] == 2


def test_a_heartbeat_is_a_sign_of_life(serve: Serve) -> None:
    server = serve()
    seen = "rank_last_seen_timestamp_seconds{dp_rank=0}"
    assert seen not in server.scrape()
    with Trainer(server.endpoint, 2) as trainer:
        first = server.scrape()[seen]
        time.sleep(0.15)  # the metric has tenths
        trainer.ranks[0].ping()
        assert server.scrape()[seen] > first
        assert server.scrape()["rank_last_seen_timestamp_seconds{dp_rank=1}"] < time.time()


def test_who_has_said_goodbye_is_not_silent(serve: Serve) -> None:
    server = serve()
    with Trainer(server.endpoint, 2) as trainer:
        trainer.ranks[1].bye()
        server.await_status(ranks_connected=1)
        found = server.scrape()
        assert "rank_last_seen_timestamp_seconds{dp_rank=0}" in found
        assert "rank_last_seen_timestamp_seconds{dp_rank=1}" not in found


def test_no_sample_is_newer_than_the_weights_that_it_trains(serve: Serve) -> None:
    """Rollouts may have new weights before DP rank 0 has reported them; a sum must not fall."""
    server = serve()
    with Producer(server.endpoint, "p") as producer, Trainer(server.endpoint, 2) as trainer:
        trainer.ranks[0].send(m.PolicyVersion(policy_version=3, first_step=0))
        trainer.ranks[0].settle()
        producer.push([3, 4, 5, 6], policy_versions=[4] * 4)
        trainer.train()
        found = server.scrape()
        assert found["sample_staleness_versions_count"] == 4
        assert found["sample_staleness_versions_sum"] == 0


@pytest.mark.parametrize(("strategy", "window"), [("window", 6), ("kk", 4), ("greedy", 4)])
def test_the_window_is_the_one_that_the_strategy_uses(
    serve: Serve, strategy: str, window: int
) -> None:
    server = serve(strategy=strategy, window=1.5)
    assert server.scrape()["window_samples"] == window


def test_what_is_ready_is_counted_as_the_window_is(serve: Serve) -> None:
    by_groups = {"global_batch_size": "none", "global_batch_groups": 4, "group_size": 3}
    server = serve(progress_interval="250ms", **by_groups)
    Producer(server.endpoint, "p").push([3] * 6, group_ids=[*"aaabbb"])
    found = server.scrape()
    assert (found["ready_samples"], found["window_samples"]) == (2, 4)
    assert found["buffer_samples"] == 6
    assert (server.status()["ready"], server.status()["ready_units"]) == (6, 2)
    shown = server.get("/statusz", ("Accept", "text/plain")).text
    assert "6 samples, 2 ready of a window of 4 groups, " in shown
    eventually(lambda: "2 ready of a window of 4" in server.log(), "so says the log")


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, float]]:
    folder: Path = tmp_path_factory.mktemp("fresh")
    with ServeProcess(folder, warm=True, journal_dir=folder / "journal", **SMALL) as server:
        yield server.scrape()


@pytest.mark.parametrize(
    "series",
    [
        "connections_total{role=rank}",
        "connection_errors_total{reason=silent,role=rank}",
        "connection_errors_total{reason=malformed,role=http}",
        "redeliveries_total{reason=reconnect}",
        "redeliveries_total{reason=new-size}",
        "journal_errors_total{reason=full}",
        "message_duration_seconds_count{role=producer}",
        "message_duration_seconds_bucket{le=+Inf,role=rank}",
        "planned_cost_total{split=baseline}",
        "rank_time_seconds_total{cause=slow-rank}",
        "backpressure_seconds_total",
        "rank_dispatched_cost_total{dp_rank=1}",
        "samples_dropped_total{reason=stale}",
        "samples_received_total{outcome=accepted}",
        "steps_planned_total{trigger=max-wait}",
        "producers_connected",
    ],
)
def test_a_series_begins_at_0_so_that_the_first_event_shows(
    fresh: dict[str, float], series: str
) -> None:
    assert fresh[series] == 0


@pytest.mark.parametrize("name", ["policy_version", "rank_last_seen", "slowness", "cost_loss"])
def test_what_is_not_known_is_absent(fresh: dict[str, float], name: str) -> None:
    assert [series for series in fresh if name in series] == []


def test_buckets_do_not_depend_on_what_was_seen_or_on_settings(serve: Serve) -> None:
    def buckets(found: dict[str, float]) -> set[str]:
        return {series for series in found if "_bucket{" in series}

    server = serve()
    before = buckets(server.scrape())
    Producer(server.endpoint, "p").push([60])
    assert buckets(server.scrape()) == before
    assert {"sample_tokens_bucket{le=15.0}", "sample_tokens_bucket{le=1048575.0}"} <= before
