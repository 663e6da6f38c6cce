"""Checkpoints against a real dispatcher: what ranks are told, what is counted, what a kill does."""

import json
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_dispatcher.errors import (
    CheckpointRefused,
    ProtocolError,
)
from rollout_dispatcher.protocol import messages as m
from rollout_workers import RankClient, RolloutProducer
from tests.support.server import ServeProcess, eventually

BATCH, RANKS = 4, 2


def serve(folder: Path, **options: Any) -> ServeProcess:
    return ServeProcess(
        folder,
        warm=True,
        listen=f"unix:{folder}/samples",
        dp_size=RANKS,
        global_batch_size=BATCH,
        micro_batch_size=1,
        window=1,
        max_wait="100ms",
        journal_dir=folder / "journal",
        **options,
    )


def push(server: ServeProcess, count: int, first: int = 0) -> None:
    with RolloutProducer(server.endpoint) as producer:
        for at in range(first, first + count):
            ids = np.arange(at, at + 3 + at % 5)
            producer.push({"input_ids": ids}, sample_id=f"s{at}")


class Trainer:
    """Both ranks of one generation, in lockstep."""

    def __init__(self, server: ServeProcess) -> None:
        first = RankClient(server.endpoint, dp_rank=0, dp_size=RANKS)
        second = RankClient(server.endpoint, dp_rank=1, dp_size=RANKS, generation=first.generation)
        self.ranks = (first, second)

    def load(self, step: int, *, allow_lost_steps: bool = False) -> None:
        for rank in self.ranks:
            rank.resume(
                m.CheckpointPosition(
                    run_id=rank.run_id, step=step, allow_lost_steps=allow_lost_steps
                )
            )

    def train(self, count: int) -> list[tuple[int, str, dict[str, list[int]]]]:
        """Number, digest and samples of the next steps, over both ranks."""
        return [self._train_one() for _ in range(count)]

    def _train_one(self) -> tuple[int, str, dict[str, list[int]]]:
        with ThreadPoolExecutor() as threads:
            steps = list(threads.map(lambda rank: rank.next_step(20), self.ranks))
        found: dict[str, list[int]] = {}
        for step in steps:
            assert step is not None
            for part in (part for part in step if not part.header.is_filler):
                (name,) = part.header.sample_ids
                (tokens,) = part.header.tokens
                found[name] = np.frombuffer(part.payload, np.int64)[:tokens].tolist()
            step.commit()
        assert steps[0] is not None
        return steps[0].header.step, steps[0].header.digest, found

    def vanish(self) -> None:
        """Leave; what was said is heard."""
        for rank in self.ranks:
            rank.close()


def test_a_rewind_gives_the_same_samples_again_and_survives_kills(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(serve(tmp_path))
        push(server, 4)
        trainer = Trainer(server)
        found = trainer.train(1)
        for step in range(1, 4):  # the buffer holds 4 samples: what is retained takes no room in it
            push(server, 4, 4 * step)
            found += trainer.train(1)
        server.await_status(steps_committed=4, steps_retained=4, samples_retained=16, in_flight=0)
        trainer.vanish()
        trainer = Trainer(server)
        trainer.load(1)
        assert trainer.ranks[1].position == 1
        server.send_signal(signal.SIGKILL)
        server.wait()
        server = stack.enter_context(serve(tmp_path))
        assert trainer.train(1) == found[2:3]
        server.send_signal(signal.SIGKILL)
        server.wait()
        server = stack.enter_context(serve(tmp_path))
        assert trainer.train(1) == found[3:]
        trainer.ranks[0].checkpoint_saved(trainer.ranks[0].position)
        server.await_status(samples_retained=0, samples_rewound=8, in_flight=0, balanced=True)
        at = server.scrape()
        assert at["samples_received_total{outcome=accepted}"] == 16
        assert at["samples_committed_total"] - at["samples_rewound_total"] == 16
        assert at["steps_rewound_total"] == 2
        assert at["retained_bytes"] == at["steps_retained"] == at["steps_lost_total"] == 0
        push(server, 4, 16)
        assert trainer.train(1)[0][0] == 4
        trainer.vanish()


def test_after_a_rewind_the_log_has_the_number_of_the_last_committed_step(tmp_path: Path) -> None:
    with serve(tmp_path, progress_interval="100ms") as server:

        def last(event: str) -> dict[str, Any]:
            lines = [json.loads(line) for line in server.log().splitlines()]
            return next((line for line in lines[::-1] if line["event"] == event), {"step": None})

        trainer = Trainer(server)
        for step in range(3):
            push(server, 4, 4 * step)
            trainer.train(1)
        server.await_status(steps_committed=3)
        trainer.vanish()
        eventually(lambda: last("progress")["step"] == 2, "all are committed")
        trainer = Trainer(server)
        trainer.load(0)
        trainer.train(1)
        server.await_status(steps_committed=4, last_committed=1)
        eventually(lambda: last("progress")["step"] == 1, "two of three are taken back, one came")
        assert last("progress")["message"].startswith("2 steps (")
        text = server.get("/statusz", ("Accept", "text/plain")).text
        assert "steps: 4 committed, 2 of them rewound, 1 open" in text
        server.send_signal(signal.SIGUSR1)
        eventually(lambda: '"state"' in server.log(), "its state")
        assert last("state")["step"] == 1
        trainer.train(1)
        with RolloutProducer(server.endpoint) as producer:
            producer.end_stream(force=True)
        for rank in trainer.ranks:
            assert rank.next_step(20) is None
        trainer.vanish()
        server.wait()
        assert last("drained")["step"] == 2


def test_a_resume_whose_steps_had_to_go_is_refused_unless_it_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Room for two steps of four: the trainer is told, then the oldest go, and nothing stops."""
    step_bytes = sum(8 * (3 + at % 5) for at in range(4))
    with serve(tmp_path, retain_bytes=f"{3 * step_bytes}B") as server:
        push(server, 4)
        trainer = Trainer(server)
        found = trainer.train(1)
        for step in range(1, 6):
            push(server, 4, 4 * step)
            found += trainer.train(1)
        server.await_status(steps_committed=6)
        now = server.status()
        assert 0 < now["steps_retained"] < 5
        assert now["steps_evicted"] == 6 - now["steps_retained"]
        assert server.scrape()["steps_evicted_total"] == now["steps_evicted"]
        assert "to the trainer: no checkpoint was reported as saved" in server.get("/readyz").text
        eventually(
            lambda: "the dispatcher says: no checkpoint was reported" in caplog.text, "it is told"
        )
        assert "committed steps that no saved checkpoint covers: the steps up to" in server.log()
        trainer.vanish()
        kept = now["steps_retained"]
        with (
            RankClient(server.endpoint, dp_rank=0, dp_size=RANKS) as rank,
            pytest.raises(
                CheckpointRefused, match=r"cannot be delivered again, .*--set retain-bytes"
            ),
        ):
            rank.resume(m.CheckpointPosition(run_id=rank.run_id, step=0))
        trainer = Trainer(server)
        trainer.load(0, allow_lost_steps=True)
        assert trainer.ranks[0].position == 5 - kept
        assert trainer.train(kept) == found[-kept:]
        server.await_status(steps_lost=5 - kept, balanced=True)
        trainer.vanish()


def test_an_older_copy_of_the_journal_is_named_by_who_knows_better(tmp_path: Path) -> None:
    journal, older = tmp_path / "journal", tmp_path / "older"
    with ExitStack() as stack:
        server = stack.enter_context(serve(tmp_path))
        producer = stack.enter_context(RolloutProducer(server.endpoint))
        for at in range(4):
            producer.push({"input_ids": np.arange(at, at + 3)})
        trainer = Trainer(server)
        trainer.train(1)
        server.await_status(steps_committed=1)
        server.send_signal(signal.SIGKILL)
        server.wait()
        shutil.copytree(journal, older)
        server = stack.enter_context(serve(tmp_path))
        for at in range(4):
            producer.push({"input_ids": np.arange(at, at + 3)})
        trainer.train(1)
        server.await_status(steps_committed=2)
        server.send_signal(signal.SIGKILL)
        server.wait()
        shutil.rmtree(journal)
        older.rename(journal)
        server = stack.enter_context(serve(tmp_path))
        with pytest.raises(ProtocolError, match="the journal is an older copy"):
            trainer.train(1)
        said = (
            "has an acknowledgement of its sample 7 that the journal lacks (it has none "
            "after sample 3): the journal is an older copy"
        )
        eventually(lambda: said in server.log(), "the producer's word is told", 60)
        trainer.vanish()


def spoil(journal: Path, first: int) -> None:
    """A byte of the sample of `push` whose ids begin so rots on the disk."""
    span = np.arange(first, first + 3 + first % 5).tobytes()
    for segment in journal.glob("*.segment"):
        if (at := segment.read_bytes().find(span)) >= 0:
            with segment.open("r+b") as file:
                file.seek(at + 3)
                file.write(b"\xff")
            return
    raise AssertionError("no segment has that sample")


def test_a_rotten_payload_of_a_retained_step_costs_that_sample(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(serve(tmp_path))
        trainer, found = Trainer(server), []
        for step in range(3):
            push(server, 4, 4 * step)
            found += trainer.train(1)
        server.await_status(steps_committed=3)
        trainer.vanish()
        spoil(tmp_path / "journal", 4)  # of step 1
        trainer = Trainer(server)
        trainer.load(-1)
        again = trainer.train(3)
        assert again[0] == found[0]
        assert {**again[1][2], **again[2][2]}.keys() == {f"s{at}" for at in range(5, 12)}
        assert all((found[1][2] | found[2][2])[name] == ids for name, ids in again[1][2].items())
        server.await_status(steps_committed=6, in_flight=0, balanced=True)
        at = server.scrape()
        assert at["samples_dropped_total{reason=unreadable}"] == 1
        assert "1 are dropped (unreadable), groups whole, sample s4 first" in server.log()
        push(server, 4, 12)
        assert trainer.train(1)[0][0] == 3
        trainer.vanish()


def test_a_rotten_payload_of_what_waits_and_of_an_open_step_costs_that_sample(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(serve(tmp_path, buffer_capacity=20))
        push(server, 4)
        trainer = Trainer(server)
        with ThreadPoolExecutor() as threads:
            taken = list(threads.map(lambda rank: rank.next_step(20), trainer.ranks))
        assert all(step is not None for step in taken)  # released, and not committed
        push(server, 8, 4)
        server.await_status(accepted=12)
        server.send_signal(signal.SIGKILL)
        server.wait()
        trainer.vanish()
        for first in (2, 4):
            spoil(tmp_path / "journal", first)
        server = stack.enter_context(serve(tmp_path, buffer_capacity=20))
        trainer = Trainer(server)
        found = dict[str, list[int]]()
        server.post("/v1/stream/end")
        for _ in range(3):
            found |= trainer.train(1)[0][2]
        assert found.keys() == {f"s{at}" for at in range(12)} - {"s2", "s4"}
        server.await_status(steps_committed=3, balanced=True)
        assert server.scrape()["samples_dropped_total{reason=unreadable}"] == 2
        trainer.vanish()
