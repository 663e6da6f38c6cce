"""Producers: every push is answered once, held back rather than lost, and never stored twice."""

from typing import Any

from rollout_dispatcher.protocol import messages as m
from tests.service.conftest import Serve
from tests.support.client import Producer, Trainer, make_push

ACCEPTED = ["accepted"]


def test_a_producer_is_told_its_limits(serve: Serve) -> None:
    server = serve(producer_credits=3, max_frame_bytes="3GiB", heartbeat_interval="2s")
    welcome = Producer(server.endpoint, "p").welcome
    assert welcome == m.WelcomeProducer(
        run_id=server.status()["run_id"], credits=3, max_payload_bytes=3 * 2**30,
        heartbeat_interval_s=2.0,
    )  # fmt: skip


def test_a_push_that_is_sent_again_is_a_duplicate(serve: Serve) -> None:
    server = serve()
    first = Producer(server.endpoint, "p")
    assert first.push([3, 4]).outcomes == ACCEPTED * 2
    first.close()
    again = Producer(server.endpoint, "p")
    assert again.push([3, 4, 5], seq=0).outcomes == ["duplicate", "duplicate", "accepted"]
    assert Producer(server.endpoint, "other").push([3], seq=0).outcomes == ACCEPTED
    assert server.status()["accepted"] == 4


def test_a_number_below_the_floor_is_never_stored(serve: Serve) -> None:
    producer = Producer(serve().endpoint, "p", first_seq=10)
    assert producer.push([3], floor=10).outcomes == ACCEPTED
    assert producer.push([3], seq=9, floor=10).outcomes == ["duplicate"]


def test_a_push_without_room_is_blocked_and_pushed_once_there_is(serve: Serve) -> None:
    server = serve()
    producer = Producer(server.endpoint, "p")
    producer.push([3, 3, 3, 3])
    late = producer.send_push([5])
    blocked = producer.expect(m.Blocked)
    assert blocked.waits_for.startswith("DP ranks 0, 1 not joined yet")
    assert blocked.model_copy(update={"waits_for": ""}) == m.Blocked(
        first_seq=late, cap="samples", held=4, capacity=4
    )
    server.await_scrape(lambda found: found["backpressure_seconds_total"] > 0, "it is counted")
    with Trainer(server.endpoint, 2) as trainer:
        trainer.train()
        answer = producer.expect(m.Pushed)
    assert (answer.first_seq, answer.outcomes) == (late, ACCEPTED)
    server.await_status(buffered=1, samples_committed=4, pushes_held=0)


def test_a_push_that_finds_room_for_a_part_is_answered_as_a_whole(serve: Serve) -> None:
    server = serve()
    producer = Producer(server.endpoint, "p")
    producer.send_push([3] * 6)
    assert producer.expect(m.Blocked).held == 4
    with Trainer(server.endpoint, 2) as trainer:
        trainer.train()
        answer = producer.expect(m.Pushed)
    assert answer.outcomes == ACCEPTED  # one for all
    assert answer.of_each(6) == ACCEPTED * 6


def test_every_cap_holds_producers_back_by_its_name(serve: Serve) -> None:
    server = serve(buffer_tokens=20, buffer_capacity=8)
    producer = Producer(server.endpoint, "p")
    producer.push([10, 8])
    producer.push([3])  # no step could be planned of two samples: a soft cap holds nobody back
    producer.push([1])
    producer.send_push([3])
    tokens = producer.expect(m.Blocked)
    assert (tokens.first_seq, tokens.cap, tokens.held, tokens.capacity) == (4, "tokens", 22, 20)
    server = serve(buffer_bytes="200B")
    other = Producer(server.endpoint, "p")
    other.push([10])
    other.send_push([10])
    nbytes = other.expect(m.Blocked)
    held = server.status()["buffered_bytes"]
    assert (nbytes.cap, nbytes.held, nbytes.capacity) == ("bytes", held, 200)
    assert 100 < held < 200


def test_a_blocked_push_of_a_lost_connection_was_never_accepted(serve: Serve) -> None:
    server = serve()
    producer = Producer(server.endpoint, "p")
    producer.push([3] * 3)
    producer.send_push([3, 3])
    producer.expect(m.Blocked)
    producer.close()
    server.await_status(pushes_held=0, accepted=4)  # its first sample had found room
    again = Producer(server.endpoint, "p")
    again.send_push([3, 3], seq=3)
    again.expect(m.Blocked)
    with Trainer(server.endpoint, 2) as trainer:
        trainer.train()
        assert again.expect(m.Pushed).outcomes == ["duplicate", "accepted"]
    assert server.status()["accepted"] == 5


def test_a_client_that_connects_again_replaces_its_older_connection(serve: Serve) -> None:
    server = serve()
    older = Producer(server.endpoint, "p")
    older.push([3])
    newer = Producer(server.endpoint, "p")
    older.expect_end()
    assert newer.push([3], seq=1).outcomes == ACCEPTED
    assert server.status()["accepted"] == 2


def test_a_group_may_learn_its_size_when_it_is_closed(serve: Serve) -> None:
    server = serve(buffer_capacity=20)
    producer = Producer(server.endpoint, "p")
    group: dict[str, Any] = {"group_ids": ["g"], "group_sizes": [0]}
    for _ in range(3):
        assert producer.push([3], **group).outcomes == ACCEPTED
    assert server.status()["open_groups"] == 1
    producer.send(m.CloseGroup(group_id="g", size=4))
    assert producer.push([3], **group).outcomes == ACCEPTED
    status = server.status()
    assert (status["ready"], status["open_groups"]) == (4, 0)
    for name in ("whole", "kept"):
        producer.push([3, 3], group_ids=[name] * 2, group_sizes=[3 * (name == "kept")] * 2)
        producer.send(m.CloseGroup(group_id=name, keep=True if name == "kept" else None))
        producer.ping()
    status = server.status()
    assert (status["ready"], status["open_groups"]) == (8, 0)


def test_payloads_of_held_pushes_are_asked_for_again_when_their_turn_comes(serve: Serve) -> None:
    server = serve(blocked_push_bytes="100B")
    producer = Producer(server.endpoint, "p")
    producer.push([3] * 4)
    seqs, held = [], []
    for _ in range(3):
        seqs.append(producer.send_push([10]))
        producer.expect(m.Blocked)
        held.append(server.scrape()["pushes_held_bytes"])
    assert held[0] > 0
    assert held == held[:1] * 3  # of the first alone
    with Trainer(server.endpoint, 2) as trainer:
        trainer.train()
        assert producer.expect(m.Pushed).first_seq == seqs[0]
        for seq in seqs[1:]:
            assert producer.expect(m.Resend).first_seq == seq
        for seq in seqs[1:]:
            producer.send_push([10], seq=seq)
            answer = producer.expect(m.Pushed)
            assert (answer.first_seq, answer.outcomes) == (seq, ACCEPTED)
    assert server.status()["pushes_held"] == 0


def test_a_group_of_a_producer_that_is_gone_is_dropped_whole(serve: Serve) -> None:
    server = serve(group_timeout="100ms", producer_timeout="100ms")
    producer, other = Producer(server.endpoint, "p"), Producer(server.endpoint, "q")
    producer.push([3, 3], group_ids=["g", "g"], group_sizes=[3, 3])
    other.push([3, 3], group_ids=["h", "h"], group_sizes=[3, 3])
    producer.close()
    server.await_status(open_groups=1, buffered=2, balanced=True)
    other.bye()
    server.await_status(open_groups=0, buffered=0, balanced=True)


def test_an_empty_push_is_answered(serve: Serve) -> None:
    producer = Producer(serve().endpoint, "p")
    producer.send(*make_push("p", 0, []))
    assert producer.expect(m.Pushed) == m.Pushed(first_seq=0, outcomes=[])
