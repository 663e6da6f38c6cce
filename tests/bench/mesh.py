"""What it adds to a micro-batch that a peer of the DP leader gets it from there, on four ranks.

    python -m tests.bench.mesh [--rounds 7] [--steps 40] [--json FILE]

Four processes on this machine train nothing. They take steps of one micro-batch of a megabyte a DP
rank, once as a mesh of (dp=2, tp=2) and once as two DP ranks without a mesh (the other two rest),
in turn, from one dispatcher that has all samples before a run begins. After each step all ranks
meet in a barrier, as tensor-parallel ranks do: what is measured is the time from one barrier to the
next, in DP rank 0, which is that of the slowest of them. The difference of the medians is what is
added.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rollout_workers import MicroBatchStream, RolloutProducer
from tests.support.server import ServeProcess
from tests.support.source import PYTHONPATH, ROOT

RANKS, DP_SIZE = 4, 2
#: int64 values of a micro-batch of a megabyte.
TOKENS = 2**20 // 8
WAYS = ("plain", "mesh")


def rank_main(endpoint: str, store: str, rank: int, rounds: int, steps: int) -> None:
    """One rank; the first prints the milliseconds of every step, by way."""
    torch.set_num_threads(1)
    files = dist.FileStore(store, RANKS)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=files, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (DP_SIZE, RANKS // DP_SIZE), mesh_dim_names=("dp", "tp"))
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            if rank == 0:
                push(endpoint, steps)
            dist.barrier()
            stream = join(endpoint, way, rank, mesh)
            found[way] += run(stream, steps)
            if stream is not None:
                stream.close()
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()


def join(endpoint: str, way: str, rank: int, mesh: DeviceMesh) -> MicroBatchStream | None:
    if way == "mesh":
        return MicroBatchStream(endpoint, mesh=mesh, dp_dims="dp", epochs=1)
    if mesh.get_local_rank("tp"):
        return None
    group = mesh["dp"].get_group()
    return MicroBatchStream(endpoint, process_group=group, epochs=1)


def run(stream: MicroBatchStream | None, steps: int) -> list[float]:
    """Milliseconds of each step but the first ones, barrier to barrier."""
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        if stream is not None:
            step = next(stream)
            for batch in step:
                assert batch.tokens == TOKENS
            step.commit()
        dist.barrier()
        times.append(1000 * (time.perf_counter() - began))
    return times[3:]


def push(endpoint: str, steps: int) -> None:
    ids = np.arange(TOKENS)
    with RolloutProducer(endpoint) as producer:
        for _ in range(steps * DP_SIZE):
            producer.push({"input_ids": ids})


def main() -> None:
    """Start the ranks, print what they measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path, help="also write the row to this file")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        endpoint, store, rank = given.rank
        rank_main(endpoint, store, int(rank), given.rounds, given.steps)
        return
    row = measure(given.rounds, given.steps)
    print(json.dumps(row))
    if given.json is not None:
        given.json.write_text(json.dumps(row, indent=2) + "\n")


def measure(rounds: int, steps: int) -> dict[str, float]:
    """A step's milliseconds and what the mesh adds: medians, and the fastest tenth.

    Where others use the machine the latter says what it would be without them.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {"dp_size": DP_SIZE, "global_batch_size": DP_SIZE, "micro_batch_size": 1}
        with ServeProcess(Path(folder), buffer_capacity=10_000, **options) as server:  # type: ignore[arg-type]
            command = [sys.executable, "-m", "tests.bench.mesh", "--rounds", str(rounds)]
            command += ["--steps", str(steps), "--rank", server.endpoint, f"{folder}/store"]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH}
            ranks = [
                subprocess.Popen(
                    [*command, str(rank)], cwd=ROOT, env=environment, stdout=subprocess.PIPE
                )
                for rank in range(RANKS)
            ]
            said = [rank.communicate()[0] for rank in ranks]
    found = json.loads(said[0])
    row: dict[str, float] = {"steps": len(found["mesh"])}
    for name, nth in (("median", 4), ("decile", 0)):
        plain, mesh = (statistics.quantiles(found[way], n=10)[nth] for way in WAYS)
        row[f"{name}_plain_ms"], row[f"{name}_mesh_ms"] = round(plain, 2), round(mesh, 2)
        row[f"{name}_added_ms"] = round(mesh - plain, 2)
    return row


if __name__ == "__main__":
    main()
