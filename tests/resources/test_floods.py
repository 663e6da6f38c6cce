"""A great deal of small words, or of one thing in one message: what it costs is bounded too."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rollout_dispatcher.core.admission.ends import MAX_ENDS
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
        told = talks.expect(m.Error)
        assert f"the ends of {MAX_ENDS} phases were asked for" in told.message
        grew(server, before, MARGIN)
    no_stall(server)


def test_pushes_of_as_many_samples_as_there_may_be(start: Callable[..., ServeProcess]) -> None:
    server, pushes, many = start(buffer_capacity=1_000_000), 50, m.MAX_SAMPLES
    before = settled(server)
    with Producer(server.endpoint, "many") as producer:
        for at in range(pushes):
            names = [f"{at}/{number}" for number in range(many)]
            producer.send(*make_push("m", at * many, [1] * many, sample_ids=names))
        for _ in range(pushes):
            producer.expect(m.Pushed)
        grew(server, before, pushes * many * 4096 + MARGIN)
    no_stall(server)


def test_a_push_of_more_samples_than_there_may_be(start: Callable[..., ServeProcess]) -> None:
    server, number = start(buffer_capacity=1_000_000), 50_000
    before = settled(server)
    push, payload = make_push("m", 0, [1])
    header = push.model_dump_json().replace('"tokens":[1]', f'"tokens":{[1] * number}')
    with Producer(server.endpoint, "many") as producer:
        producer.send_bytes(encode_frame(m.Push.type_code, header.encode(), len(payload)) + payload)
        producer.expect_error("protocol")
        grew(server, before, MARGIN)
    no_stall(server)
