"""A trainer's rank that does nothing with its tensors but check them.

    python -m tests.bench.plane.children.rank '{"endpoint": "...", "load": "26k", "dp_rank": 0}'

It iterates a `MicroBatchStream` like any training loop and commits every step; the parent hands
DP rank 0's generation to the others, as a process group would.
"""

import time
from itertools import islice

import torch

from rollout_workers import MicroBatchStream
from tests.bench.plane.children.children import Answer, answer, arguments, obey
from tests.bench.plane.load.check import Checker
from tests.bench.plane.load.loads import find

DP_SIZE = 2


class Trainer:
    """One rank's stream, joined and left as often as told."""

    def __init__(self, given: Answer) -> None:
        self._endpoint, self._dp_rank = given["endpoint"], given["dp_rank"]
        self._prefetch_steps = given.get("prefetch_steps", 1)
        self._measure = given.get("measure", True)
        load = find(given)
        self._checker = Checker(load)
        self._fields = tuple(load.fields(0))
        self._stream: MicroBatchStream | None = None

    def join(self, order: Answer) -> Answer:
        """Open a stream, in the generation given if any."""
        began = time.monotonic()
        self._stream = MicroBatchStream(
            self._endpoint,
            dp_rank=self._dp_rank,
            dp_size=DP_SIZE,
            generation=order.get("generation"),
            prefetch_steps=self._prefetch_steps,
            epochs=1,  # as `run` does
            measure=self._measure,
        )
        return {"generation": self._stream.generation, "began": began}

    def run(self, order: Answer) -> Answer:
        """Train so many steps, or all that come; then tell what came."""
        assert self._stream is not None
        arrived: list[float] = []
        for step in islice(self._stream, order.get("steps")):
            for micro_batch in step:
                arrived.append(time.monotonic())
                if not micro_batch.is_filler:
                    tensors = {name: micro_batch[name].numpy() for name in self._fields}
                    bounds = micro_batch.cu_seqlens.numpy()
                    self._checker.packed(tensors, bounds, micro_batch.sample_ids)
                if micro_batch.is_last:
                    with step.waiting():  # as DDP does: the other rank, as far as times tell
                        pass
            step.commit()
        ended = time.monotonic()
        ids, seen = self._checker.take()
        return {"ended": ended, "arrived": arrived, "ids": ids, "seen": seen}

    def leave(self, _: Answer) -> Answer:
        """Close the stream."""
        assert self._stream is not None
        self._stream.close()
        return {}


def main() -> None:
    """Join, train and leave when told."""
    torch.set_num_threads(1)
    trainer = Trainer(arguments())
    answer(ready=True)
    obey({"join": trainer.join, "run": trainer.run, "leave": trainer.leave})


if __name__ == "__main__":
    main()
