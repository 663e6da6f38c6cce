"""Who is silent is noticed and reported, and who only pauses is left alone: in virtual time.

A real router and a real connection, whose transport is memory and whose clock says what it is told.
"""

import logging

import pytest

from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.service.dispatcher import LAG_PROBE_SECONDS
from rollout_dispatcher.service.router import Router
from rollout_workers.client.role import Heartbeat
from tests.service.conftest import Serve
from tests.service.wires import Wire, make_router
from tests.support.client import Producer, Rank
from tests.support.server import eventually

MINUTE = 60.0


class Clock:
    """Virtual time."""

    reading = 0.0

    def __call__(self) -> float:
        return self.reading


def two_ranks(router: Router) -> list[Wire]:
    ranks = ((0, None), (1, 1))
    return [
        Wire(router, m.HelloRank(client_id=f"r{at}", dp_rank=at, dp_size=2, generation=generation))
        for at, generation in ranks
    ]


def silent_ranks(router: Router) -> float:
    found = router.metrics.registry.get_sample_value(
        "dispatcher_connection_errors_total", {"role": "rank", "reason": "silent"}
    )
    return found or 0.0


async def test_a_pause_of_an_hour_with_heartbeats_trips_nothing() -> None:
    clock = Clock()
    router = make_router(clock=clock, dp_size=2, global_batch_size=4)
    ranks = two_ranks(router)
    hearts = [Heartbeat(router.config.heartbeat_interval, clock()) for _ in ranks]
    while clock() < 60 * MINUTE:
        clock.reading += min(LAG_PROBE_SECONDS, *(heart.wait(clock()) for heart in hearts))
        for rank, heart in zip(ranks, hearts, strict=True):
            if heart.ping_due(clock()):
                rank.say(m.Ping())
                heart.received()
            heart.check(clock())
        router.close_silent(away=0.0)
    assert not any(rank.is_closing() for rank in ranks)
    assert (list(router.core.statistics().absent_ranks), silent_ranks(router)) == ([], 0)
    router.close()


async def test_silence_is_noticed_after_the_timeout_and_not_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    router = make_router(clock=clock, dp_size=2, global_batch_size=4)
    silent, alive = two_ranks(router)
    clock.reading = router.config.rank_timeout
    alive.say(m.Ping())
    router.close_silent(away=0.0)
    assert not silent.is_closing()
    clock.reading += LAG_PROBE_SECONDS
    with caplog.at_level(logging.WARNING):
        router.close_silent(away=0.0)
    assert (silent.is_closing(), alive.is_closing()) == (True, False)
    silent.lose()
    assert "rank r0 was silent for 60 s" in caplog.text
    assert (list(router.core.statistics().absent_ranks), silent_ranks(router)) == ([0], 1)
    router.close()


async def test_time_in_which_the_dispatcher_itself_was_stopped_is_nobodys_silence() -> None:
    clock = Clock()
    router = make_router(clock=clock, dp_size=2, global_batch_size=4)
    rank, _ = two_ranks(router)
    stopped = 10 * MINUTE
    clock.reading += stopped + LAG_PROBE_SECONDS
    router.close_silent(away=stopped)
    assert not rank.is_closing()
    clock.reading += router.config.rank_timeout + LAG_PROBE_SECONDS
    router.close_silent(away=0.0)
    assert rank.is_closing()
    router.close()


def test_a_silent_ranks_step_is_kept_and_all_that_tells_an_operator_does(serve: Serve) -> None:
    server = serve(rank_timeout="500ms", heartbeat_interval="50ms")
    producer = Producer(server.endpoint, "p")
    alive = Rank(server.endpoint, 0, 2)
    silent = Rank(server.endpoint, 1, 2, generation=alive.generation)
    assert producer.push([3] * 4).outcomes == ["accepted"] * 4
    for rank in (alive, silent):
        rank.demand(taken=-1)
        rank.hold(0)
        rank.prepare(0)

    def is_reported() -> bool:
        alive.settle()
        return bool(server.status()["absent_ranks"] == [1])

    eventually(is_reported, "the silent rank is reported")
    assert server.scrape()["connection_errors_total{reason=silent,role=rank}"] == 1
    first, waits_for, lost, absent = server.get("/readyz").text.splitlines()
    assert (first, absent) == ("ok: running", "absent DP ranks: 1")
    assert lost.startswith("lost: ")
    assert "DP rank 1 lost the connection" in waits_for
    assert "was silent for 0.5 s; closing its connection" in server.log()
    status = server.status()
    assert (status["open_steps"], status["in_flight"]) == (1, 4)
    successor = Rank(server.endpoint, 1, 2, generation=alive.generation)
    assert successor.hold(0).header == alive.steps[0].header
    successor.prepare(0)
    for rank in (alive, successor):
        rank.await_release(0)
        rank.commit(0)
    server.await_status(steps_committed=1, balanced=True)
