"""A producer's core, message by message."""

from typing import Any

from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import Outcome
from rollout_workers.producer.core import ProducerCore, Settled
from rollout_workers.producer.encode import EncodedSample, Encoder, RolloutSample
from tests.workers.support.peers import producer_welcome

NOTHING = memoryview(b"")


def encoded(
    tokens: int = 1, sample_id: str | None = None, group_id: str | None = None, size: Any = None
) -> EncodedSample:
    return Encoder().encode(
        [RolloutSample({"input_ids": [1] * tokens}, sample_id, group_id, size)]
    )[0]


def hear(core: ProducerCore, message: m.Message, now: float = 0.0) -> list[Settled]:
    """Give the core a message; return what it settles."""
    core.receive(message, NOTHING, now)
    return core.take_settled()


def connected(**welcome: Any) -> ProducerCore:
    core = ProducerCore("me")
    connect(core, **welcome)
    return core


def connect(core: ProducerCore, **welcome: Any) -> None:
    """It is welcomed, with two credits unless it is said otherwise."""
    core.hello()
    hear(core, producer_welcome(**{"credits": 2} | welcome))


def said(core: ProducerCore, now: float = 0.0) -> list[m.Message]:
    return [message for message, _ in core.take_messages(now)]


def pushes(core: ProducerCore, now: float = 0.0) -> list[int]:
    """First sequence numbers of the pushes that go out now."""
    return [message.first_seq for message in said(core, now) if isinstance(message, m.Push)]


def pushed(first: int, *outcomes: str) -> m.Pushed:
    return m.Pushed(first_seq=first, outcomes=list(map(Outcome, outcomes)))
