"""DP ranks as users have them: a `MicroBatchStream` each, here in threads of one process."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout_workers import MicroBatchStream
from tests.e2e.groups.rollouts import tokens_of

DP_SIZE = 2
#: Nobody has to wait so long for a step, or for the end: stuck.
STALL_S = 15.0


@dataclass(frozen=True, slots=True)
class Trained:
    """One step as one rank applied it."""

    number: int
    digest: str
    samples: list[str]


class Ranks:
    """A process group as threads, each with a `MicroBatchStream`; checks each sample's tokens.

    pace: waits as long as a step takes. version: policy version that a step trains with, if any.
    """

    def __init__(
        self, endpoint: str, pace: Callable[[], object], version: Callable[[int], int] | None = None
    ) -> None:
        self._pace, self._version = pace, version
        first = MicroBatchStream(endpoint, dp_rank=0, dp_size=DP_SIZE)
        second = MicroBatchStream(endpoint, dp_rank=1, dp_size=DP_SIZE, generation=first.generation)
        self._streams = [first, second]
        self.diaries: list[list[Trained]] = [[], []]
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._guarded, args=(rank,), name=f"rank {rank}")
            for rank in range(DP_SIZE)
        ]
        for thread in self._threads:
            thread.start()

    def await_end(self) -> dict[int, list[str]]:
        """Wait for the stream's end; the samples of each step. Fails where ranks disagree."""
        for thread in self._threads:
            thread.join(STALL_S)
            assert not thread.is_alive(), f"{thread.name} waits for a step, or for the end"
        assert self._errors == []
        first, second = self.diaries
        assert [(at.number, at.digest) for at in first] == [(at.number, at.digest) for at in second]
        return {a.number: a.samples + b.samples for a, b in zip(first, second, strict=True)}

    def close(self) -> None:
        """End the streams, wherever they are, and the threads."""
        for stream in self._streams:
            stream.close()
        for thread in self._threads:
            thread.join(STALL_S)

    def _guarded(self, rank: int) -> None:
        try:
            self._train(rank)
        except BaseException as error:  # told by whoever waits for this rank
            self._errors.append(error)

    def _train(self, rank: int) -> None:
        stream = self._streams[rank]
        self._report(stream, 0)
        for step in stream:
            samples: list[str] = []
            for micro_batch in step:
                if not micro_batch.is_filler:
                    _check_tokens(micro_batch)
                    samples += micro_batch.sample_ids
            self._pace()
            # Before the commit: the next step may be planned as soon as that is heard.
            self._report(stream, step.number + 1)
            step.commit()
            self.diaries[rank].append(Trained(step.number, step.digest, samples))

    def _report(self, stream: MicroBatchStream, step: int) -> None:
        if self._version is not None:
            stream.set_policy_version(self._version(step))


def _check_tokens(micro_batch: Any) -> None:
    bounds = micro_batch.cu_seqlens.tolist()
    ids = micro_batch.input_ids.numpy().reshape(-1)
    for at, name in enumerate(micro_batch.sample_ids):
        assert np.array_equal(ids[bounds[at] : bounds[at + 1]], tokens_of(name)), name
