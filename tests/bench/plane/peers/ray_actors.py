"""What both peers share: a Ray cluster of this machine, a producer actor and two consumers.

This runs in a peer's own environment, which has Ray, numpy and torch, and not this project's
dependencies. The driver is a `Child` that is asked for runs.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from tests.bench.plane.children.children import answer, arguments, orders
from tests.bench.plane.load.check import Checker
from tests.bench.plane.load.loads import LOADS, Array, Load

CONSUMERS = 2
OBJECT_STORE_BYTES = 2 * 2**30


def load() -> Load:
    """What is sent."""
    return LOADS["26k"]


def make_pool() -> list[dict[str, Array]]:
    """The samples that a producer sends, one dict of arrays each."""
    return [load().fields(index) for index in range(load().pool)]


def serve(make_actors: Callable[[], tuple[Any, Sequence[Any]]]) -> None:
    """Start Ray, make a producer and consumers, and do runs until told to end.

    A run is `producer.send(run, batch, count)` beside `consumer.receive(run, batch, count)`, each
    of which tells when it began or ended.
    """
    arguments()
    ray.init(
        num_cpus=8,  # slots for actors, which all have work at the same time
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=OBJECT_STORE_BYTES,
    )
    producer, consumers = make_actors()
    answer(ready=True)
    for number, order in enumerate(orders()):
        batch, count = order["batch"], order["count"]
        taken = [it.receive.remote(number, batch, count // CONSUMERS) for it in consumers]
        began = ray.get(producer.send.remote(number, batch, count))
        answer(seconds=max(ray.get(taken)) - began)


class Receiving:
    """What a consumer does with what it gets."""

    def __init__(self) -> None:
        self.checker = Checker(load())

    def done(self, count: int) -> float:
        """When this is called, all of a run has to have come."""
        ended = time.monotonic()
        ids, _ = self.checker.take()
        assert len(ids) == count, f"{len(ids)} samples came, not {count}"
        return ended
