"""A dispatcher with one producer and two ranks, all of them real processes, for runs of one load.

A run pushes whole batches and has as many steps: it begins and ends with an empty window. Every
sample of all runs has to have come exactly once.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tests.bench.plane.children.children import Answer, Child, all_of
from tests.bench.plane.children.rank import DP_SIZE
from tests.bench.plane.load.loads import Load
from tests.support.server import ServeProcess

#: A window as a user has it; a step is planned when it is full.
WINDOW_MULTIPLE = 1.25
OPTIONS = {
    "dp_size": DP_SIZE,
    "window": WINDOW_MULTIPLE,
    "max_sample_tokens": 2**24,
}


def settings(load: Load, others: Mapping[str, object]) -> dict[str, Any]:
    """Options of the dispatcher for a load."""
    sizes = {"global_batch_size": load.batch, "micro_batch_size": load.micro_batch}
    return {**OPTIONS, **sizes, **others}


class Plane:
    """Everything connected, ready to run."""

    def __init__(
        self, load: Load, server: ServeProcess, producer: Child, ranks: list[Child]
    ) -> None:
        self.load, self.server, self.producer, self._ranks = load, server, producer, ranks
        self._ids: Counter[str] = Counter()
        self._seen = np.zeros(load.pool, np.int64)
        self._pushed = np.zeros(load.pool, np.int64)

    def run(self) -> float:
        """Seconds from the first push to the last step's commit."""
        for rank in self._ranks:
            rank.tell(do="run", steps=self.load.steps)
        began = self.push(self.load.samples)
        ended = max(self._take(rank.hear()) for rank in self._ranks)
        return ended - began

    def push(self, count: int) -> float:
        """Push so many samples; returns when that began."""
        self._count(count)
        return float(self.producer.ask(do="run", count=count)["began"])

    def fill(self, count: int) -> None:
        """Have so many samples accepted."""
        self._count(count)
        self.producer.ask(do="fill", count=count)

    def pace(self, rate: float) -> tuple[list[float], list[list[float]]]:
        """Push one run at `rate` bytes a second.

        Returns when each push began and, for each rank, when each micro-batch arrived.
        """
        self._count(self.load.samples)
        for rank in self._ranks:
            rank.tell(do="run", steps=self.load.steps)
        pushed = self.producer.ask(do="pace", rate=rate)["pushed"]
        told = [rank.hear() for rank in self._ranks]
        for item in told:
            self._take(item)
        return pushed, [item["arrived"] for item in told]

    def join(self) -> None:
        """Have the ranks join, as one generation."""
        first, *others = self._ranks
        generation = first.ask(do="join")["generation"]
        for rank in others:
            rank.ask(do="join", generation=generation)

    def train(self, steps: int) -> None:
        """Train so many steps of what is there."""
        for rank in self._ranks:
            rank.tell(do="run", steps=steps)
        for rank in self._ranks:
            self._take(rank.hear())

    def unload(self) -> float:
        """Seconds from when the last rank begins to join until a run that is held is committed."""
        first, *others = self._ranks
        generation = first.ask(do="join")["generation"]
        for rank in others:
            rank.tell(do="join", generation=generation)
        for rank in self._ranks:
            rank.tell(do="run", steps=self.load.steps)
        began = max(rank.hear()["began"] for rank in others)
        ended = max(self._take(rank.hear()) for rank in self._ranks)
        for rank in self._ranks:
            rank.ask(do="leave")
        return ended - float(began)

    def _count(self, count: int) -> None:
        self._pushed += np.bincount(np.arange(count) % self.load.pool, minlength=self.load.pool)

    def finish(self) -> None:
        """End the stream; raises AssertionError unless every sample came exactly once."""
        for rank in self._ranks:
            rank.tell(do="run")
        self.producer.ask(do="end")
        for rank in self._ranks:
            self._take(rank.hear())
            rank.ask(do="leave")
        assert max(self._ids.values()) == 1, "a sample came twice"
        assert np.array_equal(self._seen, self._pushed), "samples are missing, or came in excess"

    def _take(self, told: Answer) -> float:
        self._ids.update(told["ids"])
        self._seen += told["seen"]
        return float(told["ended"])


@contextmanager
def plane(
    load: Load, *, rank: Mapping[str, object] | None = None, **options: object
) -> Iterator[Plane]:
    """Start everything for a load; the ranks have not joined yet."""
    with (
        TemporaryDirectory(prefix="plane-") as folder,
        ServeProcess(Path(folder), checked=False, **settings(load, options)) as server,
    ):
        common = {"endpoint": server.endpoint, **load.order()}
        producer = Child("tests.bench.plane.children.producer", common)
        ranks = [
            Child("tests.bench.plane.children.rank", {**common, **(rank or {}), "dp_rank": dp_rank})
            for dp_rank in range(DP_SIZE)
        ]
        with all_of(producer, *ranks):
            for child in (producer, *ranks):
                child.hear()
            yield Plane(load, server, producer, ranks)
