"""Producers: every push is answered once, held back rather than lost, and never stored twice."""

from rollout_dispatcher.protocol import messages as m
from tests.service.conftest import Serve
from tests.support.client import Producer, make_push

ACCEPTED = ["accepted"]


def test_a_producer_is_told_its_limits(serve: Serve) -> None:
    server = serve(producer_credits=3, max_frame_bytes="3GiB", heartbeat_interval="2s")
    welcome = Producer(server.endpoint, "p").welcome
    assert welcome == m.WelcomeProducer(
        run_id=server.status()["run_id"], credits=3, max_payload_bytes=3 * 2**30,
        heartbeat_interval_s=2.0,
    )  # fmt: skip


def test_a_client_that_connects_again_replaces_its_older_connection(serve: Serve) -> None:
    server = serve()
    older = Producer(server.endpoint, "p")
    older.push([3])
    newer = Producer(server.endpoint, "p")
    older.expect_end()
    assert newer.push([3], seq=1).outcomes == ACCEPTED
    assert server.status()["accepted"] == 2


def test_an_empty_push_is_answered(serve: Serve) -> None:
    producer = Producer(serve().endpoint, "p")
    producer.send(*make_push("p", 0, []))
    assert producer.expect(m.Pushed) == m.Pushed(first_seq=0, outcomes=[])
