"""Producers hear back: where the trainer is, and which of their samples are dropped."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from rollout_dispatcher.errors import ClientClosed
from rollout_dispatcher.protocol import messages as m
from rollout_workers import (
    AsyncRolloutProducer,
    DroppedSample,
    Feedback,
    RankClient,
    RolloutProducer,
    RolloutSample,
)
from rollout_workers.feedback import DROPPED_KEPT, FlowControlState
from tests.support.client import WireClient
from tests.support.server import ServeProcess, eventually

FIELDS = {"input_ids": [1, 2, 3]}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServeProcess]:
    options: dict[str, Any] = {"dp_size": 1, "global_batch_size": 4, "micro_batch_tokens": 64}
    with ServeProcess(
        tmp_path, warm=True, buffer_capacity=8, max_staleness=1, **options
    ) as process:
        yield process


def other_than(producer: RolloutProducer, known: Feedback) -> Feedback:
    """The next feedback, which has to come."""
    found = producer.next_feedback(known, timeout=20)
    assert found != known
    return found


# -- what is put together of what is said ----------------------------------------------------------


def test_what_is_not_said_again_is_as_it_was() -> None:
    hearing = FlowControlState()
    hearing.welcomed(
        m.WelcomeProducer(
            run_id="run", credits=1, max_payload_bytes=1, heartbeat_interval_s=1.0, max_staleness=2
        )
    )
    hearing.update(m.Feedback(policy_version=4, expected_version=6, remaining=8))
    hearing.update(m.Pushed(first_seq=0, outcomes=[], staleness=3, remaining=7))
    assert hearing.feedback() == Feedback(4, 6, 2, 3, 7, 0)
    assert hearing.feedback().is_too_stale
    assert [hearing.feedback().expected_staleness(version) for version in (3, 6, 9)] == [3, 0, 0]
    assert [hearing.feedback().would_expire(version) for version in (3, 4)] == [True, False]


def test_of_dropped_samples_that_nobody_asks_for_the_newest_are_kept() -> None:
    hearing, each = FlowControlState(), 1024
    for at in range(DROPPED_KEPT // each + 1):
        hearing.update(m.Dropped(reason="stale", sample_ids=[f"{at}"] * each))
    kept = hearing.take_dropped()
    assert len(kept) == DROPPED_KEPT
    assert kept[0] == DroppedSample("1", None, "stale")
    assert hearing.feedback().num_dropped == DROPPED_KEPT + each
    assert hearing.take_dropped() == []


# -- against a dispatcher --------------------------------------------------------------------------


def test_answers_say_where_the_trainer_is(server: ServeProcess) -> None:
    with (
        RankClient(server.endpoint, dp_rank=0, dp_size=1) as rank,
        RolloutProducer(server.endpoint) as producer,
    ):
        said = producer.feedback()
        assert (said.policy_version, said.max_staleness, said.remaining) == (None, 1, 8)
        rank.set_policy_version(5)
        said = other_than(producer, said)
        assert (said.policy_version, said.expected_version) == (5, 5)
        producer.push(FIELDS, policy_version=4)
        assert producer.feedback().staleness == 1
        producer.push_many([RolloutSample(FIELDS, policy_version=5)] * 4)
        said = producer.feedback()
        assert (said.staleness, said.policy_version) == (0, 5)
        assert said.expected_version is not None
        assert said.expected_version > 5


def test_stale_samples_are_told_to_who_pushed_them_and_to_nobody_else(server: ServeProcess) -> None:
    with (
        RankClient(server.endpoint, dp_rank=0, dp_size=1) as rank,
        RolloutProducer(server.endpoint) as producer,
        RolloutProducer(server.endpoint) as other,
    ):
        producer.push(FIELDS, sample_id="old", policy_version=1)
        other.push(FIELDS, sample_id="new", policy_version=4)
        before = producer.feedback()
        rank.set_policy_version(4)
        eventually(lambda: producer.feedback().num_dropped == 1, "it is told")
        assert producer.feedback() != before
        assert producer.dropped() == [DroppedSample("old", None, "stale")]
        assert producer.dropped() == []
        eventually(lambda: other.feedback().policy_version == 4, "the other hears of the version")
        assert (other.dropped(), other.feedback().num_dropped) == ([], 0)


def test_so_are_members_of_a_group_that_is_given_up(server: ServeProcess) -> None:
    with RolloutProducer(server.endpoint) as one, RolloutProducer(server.endpoint) as two:
        one.push(FIELDS, sample_id="a", group_id="g", group_size=3, policy_version=1)
        two.push(FIELDS, sample_id="b", group_id="g", group_size=3, policy_version=1)
        two.close_group("g", keep=False)
        eventually(lambda: one.feedback().num_dropped == 1, "the other contributor is told")
        eventually(lambda: two.feedback().num_dropped == 1, "and who closed it")
        assert one.dropped() == [DroppedSample("a", "g", "incomplete-group")]
        assert two.dropped() == [DroppedSample("b", "g", "incomplete-group")]


def test_what_is_dropped_while_its_producer_is_away_is_counted_alone(server: ServeProcess) -> None:
    with RankClient(server.endpoint, dp_rank=0, dp_size=1) as rank:
        with RolloutProducer(server.endpoint) as producer:
            producer.push(FIELDS, policy_version=1)
        rank.set_policy_version(9)
        server.await_scrape(
            lambda found: found["samples_dropped_total{reason=stale}"] == 1, "it is counted"
        )
        with RolloutProducer(server.endpoint) as again:
            assert (again.dropped(), again.feedback().num_dropped) == ([], 0)


def test_a_client_that_does_not_ask_hears_nothing_of_it(server: ServeProcess) -> None:
    client = WireClient(server.endpoint)
    client.send(m.HelloProducer(client_id="plain"))
    client.expect(m.WelcomeProducer)
    with RankClient(server.endpoint, dp_rank=0, dp_size=1) as rank:
        rank.set_policy_version(4)
        with RolloutProducer(server.endpoint) as producer:
            eventually(lambda: producer.feedback().policy_version == 4, "others are told")
    client.send(m.Ping())
    client.expect(m.Pong)


def test_waiting_ends_with_the_time_or_with_the_producer(server: ServeProcess) -> None:
    with RolloutProducer(server.endpoint) as producer:
        said, began = producer.feedback(), monotonic()
        assert producer.next_feedback(said, timeout=0.2) == said
        assert monotonic() - began >= 0.2
        raised: list[BaseException] = []

        def wait() -> None:
            try:
                producer.next_feedback(said)
            except ClientClosed as error:
                raised.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
    waiting.join(20)
    assert len(raised) == 1
    with pytest.raises(ClientClosed):
        producer.next_feedback(said)


async def test_several_may_wait_and_one_may_be_cancelled(server: ServeProcess) -> None:
    async with AsyncRolloutProducer(server.endpoint) as producer:
        said = producer.feedback()
        waits = [asyncio.create_task(producer.next_feedback(said)) for _ in range(3)]
        await asyncio.sleep(0)
        waits[0].cancel()
        await producer.push(FIELDS, policy_version=1)
        first, second = await asyncio.gather(*waits[1:])
        assert first == second
        assert first.remaining == 7
        assert waits[0].cancelled()
