"""A dispatcher between bare sockets: pushes encoded beforehand, ranks that look at nothing.

Each push is one step. What comes at a rank is counted, and cut by the headers that came with it;
contents are checked where the users' clients are measured.
"""

import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_workers.producer.encode import EncodedSample, Encoder, RolloutSample
from rollout_workers.producer.pushes import payload
from tests.bench.plane.children.children import Child, all_of
from tests.bench.plane.children.rank import DP_SIZE
from tests.bench.plane.load.loads import Load
from tests.bench.plane.planes.plane import settings
from tests.support.client import Producer
from tests.support.server import ServeProcess


class BarePlane:
    """A producer in this process and one process a rank."""

    def __init__(self, load: Load, producer: Producer, ranks: list[Child]) -> None:
        self._load, self._producer, self._ranks = load, producer, ranks
        encode = Encoder().encode
        self._pool = [encode(RolloutSample(load.fields(at))) for at in range(load.pool)]
        self._next = 0

    def pace(self, rate: float) -> list[float]:
        """Push one run at `rate` bytes a second; the seconds that each micro-batch took."""
        load = self._load
        floor = self._next  # everything before this run is answered
        frames = [self._frame(step, floor) for step in range(load.steps)]
        for rank in self._ranks:
            rank.tell(do="follow", steps=load.steps)
        began = []
        due = time.monotonic()
        for frame in frames:
            time.sleep(max(0.0, due - time.monotonic()))
            due += len(frame) / rate
            began.append(time.monotonic())
            self._producer.send_bytes(frame)
            self._hear()
        told = [rank.hear()["arrived"] for rank in self._ranks]
        self._hear()
        return [at - start for arrived in told for start, at in zip(began, arrived, strict=True)]

    def _frame(self, step: int, floor: int) -> bytes:
        """The push that is this step of the run, with the next sequence numbers."""
        load, first = self._load, self._next
        members: list[EncodedSample] = [
            self._pool[at % load.pool] for at in range(step * load.push, (step + 1) * load.push)
        ]
        self._next += len(members)
        push = m.Push(
            fields=m.field_headers(members[0].schema),
            tokens=[it.tokens for it in members],
            loss_tokens=[it.loss_tokens for it in members],
            sample_ids=[f"bare/{first + at}" for at in range(len(members))],
            first_seq=first,
            floor=floor,
        )
        spans = b"".join(payload(members))
        return codec.encode(push, len(spans)) + spans

    def _hear(self) -> None:
        """Take the answers that are there; a refusal fails."""
        while select.select([self._producer._sock], [], [], 0)[0]:
            answer, _ = self._producer.receive()
            if isinstance(answer, m.Pushed):
                assert set(answer.outcomes) == {"accepted"}, answer


@contextmanager
def bare_plane(load: Load) -> Iterator[BarePlane]:
    """Start everything, joined."""
    # A whole run may wait at the dispatcher: bare sockets send nothing twice.
    options = {"window": 1, "producer_credits": load.steps}
    with (
        TemporaryDirectory(prefix="plane-") as folder,
        ServeProcess(Path(folder), checked=False, **settings(load, options)) as server,
    ):
        ranks = [
            Child(
                "tests.bench.plane.children.bare_ranks",
                {"endpoint": server.endpoint, "ranks": [at, at + 1], "dp_size": DP_SIZE},
            )
            for at in range(DP_SIZE)
        ]
        with all_of(*ranks), Producer(server.endpoint, "bare") as producer:
            generation = None
            for rank in ranks:
                rank.hear()
                generation = rank.ask(do="join", generation=generation)["generation"]
            yield BarePlane(load, producer, ranks)
