"""Fitted costs and speeds of ranks against a real dispatcher: a kill and a rewind change neither
them nor a plan.
"""

import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from rollout_dispatcher.protocol import messages as m
from rollout_workers import RankClient, RolloutProducer
from tests.support.server import ServeProcess

BATCH, RANKS, SLOW = 16, 2, 1.5
#: A fit, and the speed of a rank, are sure by then.
STEPS = 40


def serve(folder: Path) -> ServeProcess:
    return ServeProcess(
        folder,
        warm=True,
        listen=f"unix:{folder}/samples",
        dp_size=RANKS,
        global_batch_size=BATCH,
        micro_batch_tokens=4096,
        buffer_capacity=2 * STEPS * BATCH,
        journal_dir=folder / "journal",
    )


def push(server: ServeProcess) -> None:
    rng = np.random.default_rng(5)
    lengths = np.clip(rng.lognormal(5.5, 0.8, STEPS * BATCH), 8, 4000).astype(int)
    with RolloutProducer(server.endpoint) as producer:
        for at, length in enumerate(lengths.tolist()):
            producer.push({"input_ids": np.arange(length)}, sample_id=f"s{at}")


class Trainer:
    """Both ranks of a new generation; a sample takes them the square of its length."""

    def __init__(self, server: ServeProcess) -> None:
        first = RankClient(server.endpoint, dp_rank=0, dp_size=RANKS)
        second = RankClient(server.endpoint, dp_rank=1, dp_size=RANKS, generation=first.generation)
        self.ranks = (first, second)
        self.run_id = first.run_id

    def train(self, count: int) -> list[tuple[str, list[list[str]]]]:
        """The digests of the next steps, and which samples each rank had."""
        found = []
        for _ in range(count):
            with ThreadPoolExecutor() as threads:
                parts = list(threads.map(self._train_one, range(RANKS)))
            assert parts[0][0] == parts[1][0]
            found.append((parts[0][0], [names for _, names in parts]))
        return found

    def _train_one(self, dp_rank: int) -> tuple[str, list[str]]:
        rank = self.ranks[dp_rank]
        step = rank.next_step(20)
        assert step is not None
        names, busy = list[str](), list[float]()
        for part in step:
            names += part.header.sample_ids
            work = sum(tokens * tokens for tokens in part.header.tokens)
            busy.append(1e-7 * work * (SLOW if dp_rank else 1.0) + 1e-4)
        number = step.header.step
        rank.tell_times(m.StepTimes(step=number, busy_s=busy, collective_s=[0.0] * len(busy)))
        step.commit()
        return step.header.digest, names

    def load(self, step: int) -> None:
        """Go back to behind this one."""
        for rank in self.ranks:
            rank.resume(m.CheckpointPosition(run_id=self.run_id, step=step))

    def vanish(self) -> None:
        """Leave without a word."""
        for rank in self.ranks:
            rank.close()


def in_plans(server: ServeProcess) -> tuple[Any, Any]:
    """The cost that plans are made with, and the ranks' slowness."""
    measured: Any = server.status()["measured"]
    used = {key: measured["cost"][key] for key in ("version", "in_use", "since_step")}
    return used, measured["slowness_in_plans"]


def test_after_a_kill_and_a_rewind_there_are_the_same_fits_plans_and_digests(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(serve(tmp_path))
        push(server)
        trainer = Trainer(server)
        found = trainer.train(STEPS)
        server.await_status(steps_committed=STEPS)
        cost, slowness = in_plans(server)
        assert cost["in_use"] is not None
        assert slowness[1] > slowness[0]
        trainer.vanish()
        server.send_signal(signal.SIGKILL)
        server.wait()
        server = stack.enter_context(serve(tmp_path))
        assert in_plans(server)[0] == cost
        trainer = Trainer(server)
        trainer.load(STEPS - 11)
        assert trainer.train(10) == found[-10:]
        trainer.vanish()
