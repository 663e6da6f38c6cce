"""One DP rank of the chaos run under torchrun: trains a small model with DDP over gloo.

    torchrun ... -m tests.chaos.actors.torch_rank FOLDER LAUNCH MAX_SPLIT ENDPOINT...

One endpoint a rank. It writes down what `rank.py` does, into the folder of its process group:
LAUNCH is the number of the first one of this torchrun. A collective that fails because
another rank was killed is no fault of the dispatcher's: torchrun starts all of them again.
"""

import os
import sys
import threading
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rollout_dispatcher.errors import DispatcherError, GenerationFenced
from rollout_workers import MicroBatch, MicroBatchStream
from rollout_workers.micro_batch.blocks import gather_block
from tests.chaos.actors.rank import FENCED, PATIENCE_S, watch_lifeline
from tests.chaos.actors.samples import ballast_of, names_of, tokens_of
from tests.chaos.verdict.history import Writer
from tests.support.ddp import learn, network


def samples_of(micro_batch: MicroBatch) -> list[str]:
    """The names of the samples that count on this rank, from the tensors of their block."""
    if micro_batch.is_filler:
        return []
    starts = zip(micro_batch.cu_seqlens.tolist(), micro_batch.lengths, strict=False)
    rows = torch.cat([torch.arange(start, start + tokens) for start, tokens in starts])
    tokens, ballast = (
        gather_block(micro_batch[name], micro_batch)[rows].numpy()
        for name in ("input_ids", "ballast")
    )
    assert np.array_equal(ballast, ballast_of(tokens)), "ballast got mixed up"
    names = names_of(tokens, micro_batch.lengths)
    for name, given in zip(names, micro_batch.sample_ids, strict=True):
        assert name == given or "/" in given, f"sample {name} came under the id {given}"
    return names if micro_batch.owns_samples else []


def train(stream: MicroBatchStream, history: Writer) -> None:
    """Take, train and commit steps until the stream ends."""
    model = DistributedDataParallel(network(width=8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in stream:
        micro_batches = list(step)
        names = [name for one in micro_batches for name in samples_of(one)]
        own = sum(len(tokens_of(name)) - 1 for name in names)  # nothing predicts a first token
        history.write(
            "take", step.number, step.digest, len(step), step.num_samples, names,
            own, step.loss_tokens,
        )  # fmt: skip
        for one in micro_batches:
            learn(model, one)
        optimizer.step()
        optimizer.zero_grad()
        history.write("committing", step.number)
        step.commit()
        history.write("committed", step.number)
    history.write("end")


def main(folder: Path, first: int, max_split: int, endpoints: list[str]) -> int:
    """Run one rank of one process group; the exit code."""
    rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    own = folder / str(first + restarts)
    own.mkdir(exist_ok=True)
    history = Writer(own / f"rank-{rank}.jsonl")
    history.write("process", os.getpid())
    done, released = threading.Event(), threading.Event()
    watch_lifeline(done, released)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        with MicroBatchStream(
            endpoints[rank], reconnect_timeout=PATIENCE_S, max_split=max_split
        ) as stream:
            history.write("began", stream.generation)
            train(stream, history)
            done.set()
            released.wait()
    except GenerationFenced as error:
        history.write("fenced", str(error))
        return FENCED
    except (DispatcherError, AssertionError) as error:
        history.write("fault", repr(error))
        raise
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    _, place, launch, most, *addresses = sys.argv
    sys.exit(main(Path(place), int(launch), int(most), addresses))
