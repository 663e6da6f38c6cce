"""A DP rank's core, message by message."""

from typing import Any

from rollout_dispatcher.protocol import messages as m
from rollout_workers.rank.core import RankCore
from tests.workers.support.peers import arrived, micro_batch, rank_welcome

NOTHING = memoryview(b"")


def connected(prefetch: int = 1, **welcome: Any) -> RankCore:
    """DP rank 0 of two, welcomed."""
    core = RankCore("me", 0, 2, None, prefetch=prefetch)
    core.hello()
    core.receive(rank_welcome(**welcome), NOTHING, 0.0)
    return core


def reconnect(core: RankCore, **welcome: Any) -> None:
    """It loses its connection, and is welcomed on another one."""
    core.lost()
    core.hello()
    core.receive(rank_welcome(**welcome), NOTHING, 0.0)


def spoken(core: RankCore) -> list[m.Message]:
    return [message for message, _ in core.take_messages(0.0)]


def hear(core: RankCore, *messages: m.Message) -> list[m.Message]:
    """Give the core messages; return what it says."""
    for message in messages:
        core.receive(message, NOTHING, 0.0)
    return spoken(core)


def deliver(core: RankCore, number: int, index: int = 0, *samples: Any, attempt: int = 0) -> None:
    """The next micro-batch of a step."""
    core.receive(*arrived(micro_batch(number, index, *samples, attempt=attempt)), 0.0)


def take(core: RankCore) -> int:
    """The training loop takes the next step."""
    held = core.ready()
    assert held is not None
    core.take(held)
    return held.header.step
