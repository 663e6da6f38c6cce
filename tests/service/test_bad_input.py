"""Bad input: each kind gets a clear error, and whoever behaves well never notices."""

import json
from collections.abc import Iterator

import pytest

from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.frame import MAGIC, PREFIX, encode_frame
from tests.support.client import Producer, Trainer, WireClient, make_push
from tests.support.server import ServeProcess


class Witness:
    """A producer and two ranks that go on training, whatever others do."""

    def __init__(self, server: ServeProcess) -> None:
        self.server = server
        self.producer = Producer(server.endpoint, "witness")
        self.trainer = Trainer(server.endpoint, dp_size=2)

    def push(self, count: int) -> list[str]:
        """Push some samples; returns their ids."""
        first = self.producer.next_seq
        assert self.producer.push([5] * count).outcomes == ["accepted"] * count
        return [f"witness/{first + at}" for at in range(count)]

    def train(self, expected: list[str]) -> None:
        """Train the next step, which has to consist of these samples."""
        parts = self.trainer.train()
        assert sorted(name for part in parts for name in part.sample_ids) == sorted(expected)

    def goes_on(self) -> None:
        """A whole step, from push to commit."""
        self.train(self.push(4))
        self.trainer.ranks[0].settle()
        self.trainer.ranks[1].settle()
        assert self.server.status()["balanced"]


@pytest.fixture(scope="module")
def witness(shared: ServeProcess) -> Iterator[Witness]:
    witness = Witness(shared)
    yield witness
    witness.goes_on()
    witness.producer.bye()
    witness.trainer.bye()


def frame(code: int, header: object, payload: bytes = b"") -> bytes:
    return encode_frame(code, json.dumps(header).encode(), len(payload)) + payload


HELLO = codec.encode(m.HelloProducer(client_id="mallory"))
PUSH, PAYLOAD = make_push("mallory", 0, [2])
PUSH_HEADER = PUSH.model_dump(mode="json", exclude_none=True)


def push_frame(**changes: object) -> bytes:
    return HELLO + frame(m.Push.type_code, PUSH_HEADER | changes, PAYLOAD)


BAD = {
    "random bytes": (b"\x93\x1f\x00\xfe" * 64, "protocol", "expected a frame"),
    "HTTP": (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", "protocol", "HTTP is served on another"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00", "protocol", "sample plane"),
    "a payload that is too large": (
        HELLO + PREFIX.pack(MAGIC, 5, 0, 8, 1 << 40), "frame-too-large",
        "payload of 1099511627776 bytes exceeds the limit of 65536 bytes"),
    "a header that would take long to read": (
        HELLO + PREFIX.pack(MAGIC, 5, 0, 1 << 21, 8), "frame-too-large",
        "exceeds the limit of 1048576 bytes"),
    "more bytes described than sent": (
        push_frame(tokens=[4]), "protocol", "the header describes 48 payload bytes"),
    "an unknown key": (push_frame(colour="red"), "protocol", "colour"),
    "unknown message type": (HELLO + frame(99, {}), "protocol", "unknown message type 99"),
    "a message before the hello": (
        frame(m.Demand.type_code, {"taken": -1, "hungry": True}), "protocol",
        "Demand is not legal in state await-hello"),
    "a rank's message from a producer": (
        HELLO + frame(m.Commit.type_code, {"step": 0}), "protocol",
        "Commit is not legal in state producer"),
    "another protocol version": (
        frame(1, {"version": 4, "client_id": 1, "new": 1}), "version",
        "the client speaks protocol version 4, the dispatcher version 3"),
    "no protocol version": (
        frame(1, {"client_id": "p"}), "protocol", "HelloProducer: version: Field required"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_peer_that_breaks_the_protocol_is_told_why_and_harms_nobody(
    name: str, shared: ServeProcess, witness: Witness
) -> None:
    data, code, words = BAD[name]
    with WireClient(shared.endpoint) as client:
        client.send_bytes(data)
        assert words in client.expect_error(code).message
    witness.goes_on()


RANK = {"client_id": "mallory", "dp_rank": 0, "dp_size": 2}


@pytest.mark.parametrize(
    ("hello", "code", "words"),
    [
        ({"dp_rank": 2}, "rank-refused", "DP rank 2 is out of range"),
        ({"dp_size": 5000}, "rank-refused", "no steps for 5000 DP ranks"),
        ({"dp_rank": 1}, "rank-refused", "only DP rank 0 may"),
        ({"generation": 2**31 - 1}, "fenced", "has not begun here, the latest is 1: leave out"),
        (
            {"dp_rank": 1, "generation": 1, "run_id": "before"},
            "fenced",
            "generation 1 is of run before, this dispatcher serves run ",
        ),
    ],
    ids=[
        "out of range",
        "wrong dp_size",
        "rank 1 asks for a generation",
        "unknown generation",
        "other run",
    ],
)
def test_a_rank_that_may_not_join_is_told_why_and_harms_nobody(
    hello: dict[str, object], code: str, words: str, shared: ServeProcess, witness: Witness
) -> None:
    with WireClient(shared.endpoint) as client:
        client.send(m.HelloRank.model_validate(RANK | hello))
        assert words in client.expect_error(code).message
    witness.goes_on()


def test_every_bad_connection_is_counted_by_its_reason(
    shared: ServeProcess, witness: Witness
) -> None:
    series = "connection_errors_total{reason=protocol,role=unknown}"
    before = shared.scrape().get(series, 0)
    with WireClient(shared.endpoint) as client:
        client.send_bytes(b"nonsense")
        client.expect_error("protocol")
    shared.await_scrape(lambda found: found.get(series) == before + 1, f"{series} counts it")
