"""What peers can make a dispatcher hold is bounded by what its options and documents say.

Each case does one thing a great deal, at settings that make its bound small, and compares memory
with that bound and a generous margin: for what the allocator keeps, not for what grows.
"""

import json
import socket
from contextlib import ExitStack

import pytest

from rollout_dispatcher.core.admission.ends import MAX_ENDS
from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.protocol.frame import encode_frame
from tests.resources.measured import MIB, bounded
from tests.service.conftest import Serve
from tests.support.client import Producer, Rank, WireClient, make_push
from tests.support.server import ServeProcess, eventually

MARGIN = 12 * MIB

pytestmark = pytest.mark.e2e


def connect(server: ServeProcess, address: str) -> socket.socket:
    """A connection of a client that is in no hurry."""
    at = Endpoint.parse(address)
    return socket.create_connection((at.host, at.port), timeout=20)


def each(kilobytes: float, number: int) -> int:
    """So much for each of them, and the margin."""
    return int(kilobytes * 1024 * number) + MARGIN


# -- connections


@pytest.mark.parametrize("said", [b"", codec.encode(m.HelloProducer(client_id="x"))[:-3]])
def test_connections_that_say_nothing_or_half_a_hello(start: Serve, said: bytes) -> None:
    server, number = start(), 400
    with ExitStack() as stack, bounded(server, each(96, number)):
        for _ in range(number):
            sock = stack.enter_context(connect(server, server.endpoint))
            sock.sendall(said)


def test_http_connections_that_say_nothing_or_half_a_request(start: Serve) -> None:
    server, number = start(), 300
    with ExitStack() as stack, bounded(server, each(96, number)):
        for at in range(number):
            sock = stack.enter_context(connect(server, server.http))
            sock.sendall(b"POST /v1/samples HTTP/1.1\r\nHost: x\r\nX-Half: " * (at % 2))


# -- what is being received


def test_large_frames_that_are_announced_and_do_not_come(start: Serve) -> None:
    server, number, size = start(receive_bytes="16MiB", max_frame_bytes="8MiB"), 40, 8 * MIB
    tokens = (size - 64) // 9
    push, _ = make_push("x", 0, [1])
    sizes = {"tokens": [tokens], "loss_tokens": [tokens - 1]}
    nbytes = push.schema_.nbytes(tokens)
    head = codec.encode(push.model_copy(update=sizes), nbytes)
    with ExitStack() as stack, bounded(server, 16 * MIB + size + each(96, number)):
        for at in range(number):
            producer = stack.enter_context(Producer(server.endpoint, f"big-{at}"))
            producer.send_bytes(head + bytes(256 << 10))


def test_http_bodies_that_do_not_end(start: Serve) -> None:
    server, number, size = start(receive_bytes="16MiB", max_frame_bytes="4MiB"), 60, 4 * MIB
    head = f"POST /v1/samples HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode()
    # A body grows as it comes, and what it outgrew is free only afterwards.
    with ExitStack() as stack, bounded(server, 2 * 16 * MIB + each(192, number)):
        for _ in range(number):
            sock = stack.enter_context(connect(server, server.http))
            sock.settimeout(0.5)
            try:
                sock.sendall(head + bytes(size - 1))
            except OSError:  # it is told that there is no room, or not read any more
                continue


# -- what is held


def test_pushes_that_are_held_back(start: Serve) -> None:
    server = start(
        buffer_capacity=4, buffer_bytes="4MiB", blocked_push_bytes="8MiB", receive_bytes="16MiB",
        micro_batch_tokens=200_000,
    )  # fmt: skip
    with ExitStack() as stack, bounded(server, (4 + 8 + 16) * MIB + MARGIN):
        for at in range(40):
            producer = stack.enter_context(Producer(server.endpoint, f"held-{at}"))
            producer.send_push([100_000] * 2)  # 1.8 MB
        eventually(lambda: server.status()["pushes_held"] >= 38, "all but two pushes are held")
        assert server.status()["pushes_held_bytes"] <= 8 * MIB + 2 * MIB


# -- names that are remembered


def test_many_producers_come_and_go(start: Serve) -> None:
    server, number = start(buffer_capacity=100_000), 3000
    # The sample itself is buffered too.
    with bounded(server, each(6, number)):
        for at in range(number):
            with Producer(server.endpoint, f"passer-by-{at}") as producer:
                producer.push([3])
                if at % 2:
                    producer.bye()


def test_many_groups_are_begun_and_none_is_whole(start: Serve) -> None:
    server, number = start(buffer_capacity=100_000), 10_000
    with Producer(server.endpoint, "beginner") as producer, bounded(server, each(5, number)):
        for at in range(0, number, 100):
            names = [f"group-{at + index}" for index in range(100)]
            answer = producer.push([3] * 100, group_ids=names, group_sizes=[2] * 100)
            assert set(answer.outcomes) == {"accepted"}
        assert server.status()["open_groups"] == number


def test_many_groups_are_closed_that_never_began(start: Serve) -> None:
    server, number = start(), 50_000
    with Producer(server.endpoint, "closer") as producer, bounded(server, each(1, number)):
        for at in range(number):
            producer.send(m.CloseGroup(group_id=f"g-{at}", size=3, number=7 * at))
        producer.ping()


def test_a_producer_leaves_gaps_between_its_numbers(start: Serve) -> None:
    """Numbers with gaps between them, and a floor that is never raised."""
    server, number = start(buffer_capacity=100_000), 5000
    with Producer(server.endpoint, "gaps") as producer, bounded(server, each(4, number)):
        for at in range(number):
            producer.send_push([3], seq=3 * at)
        for _ in range(number):
            producer.expect(m.Pushed)


# -- many of one thing in one message


def test_a_rank_that_claims_to_have_received_a_great_deal(start: Serve) -> None:
    server = start()
    with bounded(server, 2 * MARGIN):
        hello = m.HelloRank(client_id="r", dp_rank=0, dp_size=2).model_dump(mode="json")
        hello["received"] = [(at, 1) for at in range(60_000)]
        frame = encode_frame(m.HelloRank.type_code, json.dumps(hello).encode(), 0)
        for _ in range(5):
            with WireClient(server.endpoint) as client:
                client.send_bytes(frame[: 64 * 1024])  # the rest is not read
                client.expect_error("frame-too-large")


def test_ranks_that_come_and_go(start: Serve) -> None:
    server, number = start(), 500
    with bounded(server, each(4, number)):
        for at in range(number):
            Rank(server.endpoint, 0, 2, client_id=f"founder-{at}").close()


def test_one_body_with_a_great_many_samples(start: Serve) -> None:
    server = start(buffer_capacity=100_000, max_frame_bytes="8MiB")
    # 60,000 samples may be buffered, of some kilobytes each.
    with bounded(server, each(4, 60_000)):
        sample = {"fields": {"input_ids": [1, 2], "loss_mask": [False, True], "reward": 0.5}}
        body = b"\n".join([json.dumps(sample).encode()] * 20_000)
        for _ in range(3):
            assert server.post("/v1/samples", body).status in {200, 400, 413, 422, 429}


# -- a great deal of small words


def test_many_phases_end(start: Serve) -> None:
    server, number = start(), 50_000
    with Producer(server.endpoint, "controller") as producer, bounded(server, MARGIN):
        words = [m.EndPhase(policy_version=at, force=True) for at in range(1, number)]
        producer.send_bytes(b"".join(map(codec.encode, words)))
        producer.ping()


def test_many_phases_are_said_to_end_by_one_of_two(start: Serve) -> None:
    server, number = start(buffer_capacity=1000), 20_000
    with Producer(server.endpoint, "silent") as other, Producer(server.endpoint, "talks") as talks:
        other.push([3], policy_versions=[0])
        talks.push([3], policy_versions=[0])
        with bounded(server, MARGIN):
            words = [m.EndPhase(policy_version=at) for at in range(1, number)]
            talks.send_bytes(b"".join(map(codec.encode, words)))
            told = talks.expect(m.Error)
            assert f"the ends of {MAX_ENDS} phases were asked for" in told.message


def test_pushes_of_as_many_samples_as_there_may_be(start: Serve) -> None:
    server, pushes, many = start(buffer_capacity=1_000_000), 50, m.MAX_SAMPLES
    with (
        Producer(server.endpoint, "many") as producer,
        bounded(server, pushes * many * 4096 + MARGIN),
    ):
        for at in range(pushes):
            names = [f"{at}/{number}" for number in range(many)]
            producer.send(*make_push("m", at * many, [1] * many, sample_ids=names))
        for _ in range(pushes):
            producer.expect(m.Pushed)


def test_a_push_of_more_samples_than_there_may_be(start: Serve) -> None:
    server, number = start(buffer_capacity=1_000_000), 50_000
    push, payload = make_push("m", 0, [1])
    header = push.model_dump_json().replace('"tokens":[1]', f'"tokens":{[1] * number}')
    with Producer(server.endpoint, "many") as producer, bounded(server, MARGIN):
        producer.send_bytes(encode_frame(m.Push.type_code, header.encode(), len(payload)) + payload)
        producer.expect_error("protocol")
