"""One DP rank of the chaos run: trains nothing, and writes down what it takes and commits.

    python -m tests.chaos.actors.rank ENDPOINT DP_RANK DP_SIZE FOLDER [--resume N] [--behind N]
        [--max-split N]

DP rank 0 asks for a new generation and shares it through the folder of its process group, as
torchrun's store would. `committing` is written before commit(), so a step without that line was
certainly not committed by this rank. With `--resume` it has loaded a checkpoint taken after that
step; with `--behind` DP rank 0 saves one now and then, so many steps behind the one that it takes:
all ranks have committed that one then. The process leaves when standard input ends: at once while
it trains (its starter is gone), with a goodbye after the end of the stream.
"""

import argparse
import os
import sys
import threading
from pathlib import Path
from time import monotonic, sleep

import numpy as np

from rollout_dispatcher.errors import GenerationFenced
from rollout_dispatcher.protocol.messages import CheckpointPosition, StepTimes
from rollout_dispatcher.protocol.slices import Slicing
from rollout_workers.rank.client import RankClient, RankStep
from rollout_workers.rank.payload import arrays
from tests.chaos.actors.samples import NOT_SENT, ballast_of, names_of, tokens_of
from tests.chaos.verdict.history import Writer

#: How long the others wait for DP rank 0, which may have to wait for a dispatcher itself.
PATIENCE_S = 120.0
#: What an optimizer step would take, so that there is time for faults while one is open.
COMPUTE_S = 0.01
FENCED = 3
#: Steps from one checkpoint to the next.
SAVES_EVERY = 10


def share(folder: Path, generation: int) -> None:
    """Tell the other ranks; whole or not at all."""
    part = folder / "generation.part"
    part.write_text(str(generation))
    part.replace(folder / "generation")


def learn(folder: Path) -> int:
    """Wait for DP rank 0's word."""
    deadline = monotonic() + PATIENCE_S
    while not (folder / "generation").exists():
        assert monotonic() < deadline, "DP rank 0 shared no generation"
        sleep(0.01)
    return int((folder / "generation").read_text())


def samples_of(step: RankStep) -> list[str]:
    """The names of the samples that count on this rank, from tensors; ids must say the same."""
    found = []
    for one in step:
        if one.header.is_filler:
            continue
        fields = arrays(one.payload, one.blocks)
        tokens = fields["input_ids"].astype(np.int64)
        assert np.array_equal(fields["ballast"], ballast_of(tokens)), "ballast got mixed up"
        names = names_of(tokens, one.header.tokens, one.header.ranges)
        for name, given in zip(names, one.header.sample_ids, strict=True):
            # Ids that the dispatcher gave hold a slash: client and number.
            assert name in (given, NOT_SENT) or "/" in given, (
                f"sample {name} came under the id {given}"
            )
        found += names if one.header.cp_rank == 0 else []
    return found


def resume(client: RankClient, history: Writer, step: int) -> None:
    """A checkpoint taken after that step is loaded."""
    client.resume(CheckpointPosition(run_id=client.run_id, step=step))
    history.write("resumed", step)


def save(client: RankClient, history: Writer, step: int) -> None:
    """A checkpoint taken after that step is durable."""
    history.write("saved", step)
    client.checkpoint_saved(step)


def train(client: RankClient, history: Writer, behind: int | None) -> None:
    """Take and commit steps until the stream ends."""
    pause = threading.Event()
    while (step := client.next_step()) is not None:
        header = step.header
        names = samples_of(step)
        own = sum(len(tokens_of(name)) - 1 for name in names)  # nothing predicts a first token
        history.write(
            "take", header.step, header.digest, len(step), header.num_samples, names,
            own, header.loss_tokens, header.attempt,
        )  # fmt: skip
        if behind is not None and header.step % SAVES_EVERY == SAVES_EVERY - 1:
            save(client, history, header.step - behind)
        pause.wait(COMPUTE_S)
        history.write("committing", header.step)
        step.commit()
        seconds = [COMPUTE_S] * len(step)
        client.report_times(StepTimes(step=header.step, busy_s=seconds, collective_s=seconds))
        history.write("committed", header.step)
    history.write("end")


def main(options: argparse.Namespace) -> int:
    """Run one rank; the exit code."""
    dp_rank, folder = options.dp_rank, options.folder
    history = Writer(folder / f"rank-{dp_rank}.jsonl")
    done, released = threading.Event(), threading.Event()
    watch_lifeline(done, released)
    try:
        generation = None if dp_rank == 0 else learn(folder)
        with RankClient(
            options.endpoint,
            dp_rank=dp_rank,
            dp_size=options.dp_size,
            generation=generation,
            reconnect_timeout=PATIENCE_S,
            max_split=options.max_split,
            slicing=Slicing.ZIGZAG if options.max_split > 1 else None,
        ) as client:
            history.write("began", client.generation)
            if dp_rank == 0:
                share(folder, client.generation)
            if options.resume is not None:
                resume(client, history, options.resume)
            train(client, history, options.behind if dp_rank == 0 else None)
            done.set()
            released.wait()
    except GenerationFenced as error:
        history.write("fenced", str(error))
        return FENCED
    except BaseException as error:
        history.write("fault", repr(error))
        raise
    return 0


def watch_lifeline(done: threading.Event, released: threading.Event) -> None:
    """Leave when standard input ends: at once, or if `done` then by what waits for `released`."""
    threading.Thread(target=_lifeline, args=(done, released), daemon=True).start()


def _lifeline(done: threading.Event, released: threading.Event) -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    if not done.is_set():
        os._exit(1)
    released.set()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("endpoint")
    parser.add_argument("dp_rank", type=int)
    parser.add_argument("dp_size", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", type=int)
    parser.add_argument("--behind", type=int)
    parser.add_argument("--max-split", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(_options()))
