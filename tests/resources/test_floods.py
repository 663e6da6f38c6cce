"""A great deal of small words, or of one thing in one message: what it costs is bounded too."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.frame import encode_frame
from tests.resources.measured import MIB, grew, no_stall, settled
from tests.service.conftest import SMALL
from tests.support.client import Producer, make_push
from tests.support.server import ServeProcess

MARGIN = 12 * MIB

pytestmark = pytest.mark.e2e


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ServeProcess]]:
    """A dispatcher without Python's own checks, which take memory themselves."""
    with ExitStack() as stack:

        def begin(**options: Any) -> ServeProcess:
            settings = {**SMALL, **options}
            return stack.enter_context(ServeProcess(tmp_path, checked=False, **settings))

        yield begin


def test_many_phases_end(start: Callable[..., ServeProcess]) -> None:
    server, number = start(), 50_000
    before = settled(server)
    with Producer(server.endpoint, "controller") as producer:
        words = [m.EndPhase(policy_version=at, force=True) for at in range(1, number)]
        producer.send_bytes(b"".join(map(codec.encode, words)))
        producer.ping()
        grew(server, before, MARGIN)
    no_stall(server)


def test_many_phases_are_said_to_end_by_one_of_two(start: Callable[..., ServeProcess]) -> None:
    server, number = start(buffer_capacity=1000), 20_000
    with Producer(server.endpoint, "silent") as other, Producer(server.endpoint, "talks") as talks:
        other.push([3], policy_versions=[0])
        talks.push([3], policy_versions=[0])
        before = settled(server)
        words = [m.EndPhase(policy_version=at) for at in range(1, number)]
        talks.send_bytes(b"".join(map(codec.encode, words)))
        assert "were asked for" in talks.expect_error("protocol").message
        grew(server, before, MARGIN)
    no_stall(server)


def test_one_push_of_a_great_many_samples(start: Callable[..., ServeProcess]) -> None:
    server, number = start(buffer_capacity=1_000_000), 50_000
    before = settled(server)
    with Producer(server.endpoint, "many") as producer:
        push, payload = make_push("m", 0, [1])
        columns: dict[str, list[object]] = {"tokens": [1], "loss_tokens": [1], "sample_ids": ["s"]}
        header = push.model_dump(mode="json") | {name: at * number for name, at in columns.items()}
        frame = encode_frame(m.Push.type_code, json.dumps(header).encode(), len(payload) * number)
        producer.send_bytes(frame)  # its payload need not come for it to be refused
        producer.expect_error("protocol")
        grew(server, before, MARGIN)
    no_stall(server)
