"""A run with one slow rank, over real sockets: its ranks sleep instead of training.

with SlowRankRun(server.endpoint):
...                             # steps are trained in a thread
run.pause()                     # nothing is pushed any more, until run.go_on()
"""

import threading
from contextlib import suppress
from itertools import count
from typing import Any, Self

import numpy as np

from rollout_dispatcher.protocol import messages as m
from rollout_planner.types import FloatArray
from tests.support.client import HeldStep, Producer, Trainer

RANKS, SLOW, FACTOR = 4, 2, 1.4
BATCH = 32
#: Options of a dispatcher that such a run fits.
OPTIONS: dict[str, Any] = {
    "dp_size": RANKS,
    "global_batch_size": BATCH,
    "micro_batch_tokens": 16384,
    "cost": "tokens",
    "groups": "ignore",
    "window": 2,
    "heartbeat_interval": "1s",
}
#: Seconds a token, so that a step takes a quarter of a second.
_PACE = 2e-5
_TRANSPORT_S = 0.01
_STALE = 2
#: Batches that are pushed before the first step: a window, and some that wait for room.
_AHEAD = 4


class SlowRankRun(threading.Thread):
    """Trains until the block is left. Lengths are lognormal, as those of rollouts are."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(name="slow rank", daemon=True)
        self._trainer = Trainer(endpoint, RANKS)
        self._producer = Producer(endpoint, "rollout-0")
        self._lengths = np.random.default_rng(7)
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()
        for client in (self._producer, *self._trainer.ranks):
            client.close()

    def run(self) -> None:
        """Push more than a window, then what each step takes; without a dispatcher it ends."""
        with suppress(OSError, EOFError):
            for _ in range(_AHEAD):
                self._push(0)
            for version in count(1):
                if self._ended.is_set():
                    return
                self._step(version)

    def _step(self, version: int) -> None:
        self._push(version - 1)
        self._trainer.ranks[0].send(m.PolicyVersion(policy_version=version, first_step=version))
        parts = self._trainer.take()
        step = parts[0].header.step
        for rank in self._trainer.ranks:
            rank.demand(taken=step, hungry=False)
        compute = _compute(parts)
        busy = compute.max(axis=0) + _TRANSPORT_S
        self._ended.wait(float(busy.sum()))  # the training
        self._trainer.commit(step)
        for rank, own in zip(self._trainer.ranks, compute, strict=True):
            inside = (busy - own).tolist()
            rank.send(m.StepTimes(step=step, busy_s=busy.tolist(), collective_s=inside))

    def _push(self, version: int) -> None:
        lengths = np.clip(self._lengths.lognormal(7.0, 0.8, BATCH), 16, 16000).astype(int).tolist()
        versions = [max(0, version - _STALE)] * BATCH
        self._producer.send_push(lengths, policy_versions=versions)


def _compute(parts: list[HeldStep]) -> FloatArray:
    """Seconds of each micro-batch by rank; a rank's last ones may be missing."""
    tokens = np.zeros((RANKS, max(len(part.micro_batches) for part in parts)))
    for rank, part in enumerate(parts):
        for at, (head, _) in enumerate(part.micro_batches):
            tokens[rank, at] = sum(head.tokens)
    return tokens * _PACE * np.where(np.arange(RANKS) == SLOW, FACTOR, 1.0)[:, None]
