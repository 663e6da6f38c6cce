"""What a DP rank waits for samples in a payload store, by `prefetch_bytes`: its default.

    python -m tests.bench.prefetch [--store file|ray|mooncake] [--prefetch 64MiB 2GiB ...]
                                   [--samples 8 32 ...] [--prefetch-steps 1 2] [--compute 0.5]
                                   [--rounds 3] [--folder /dev/shm] [--json FILE]

One rank, and samples of 10 MiB, so many a step, which all lie in the store before it joins. It
computes for a fixed time each step, matrix products beside which the step's bytes are read once, as
a GPU would be busy. Shown is how long a step is waited for in the median, with the quartiles, and
the most memory that the rank had. The first steps, which nothing could have been fetched ahead of,
do not count. Every setting is run in turn, in each round. Linux only.
"""

import argparse
import json
import tempfile
import time
from itertools import islice, product
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from rollout_dispatcher.cli.demo.processes import signals_unwind
from rollout_workers import MicroBatchStream
from tests.bench.references import PROCESSES, STORES, push, read, serving

SAMPLE_BYTES = 10 << 20
#: Steps of a run, the first of which do not count.
STEPS, FIRST = 9, 3
#: Rows of the matrices whose products a step computes: some milliseconds each.
ROWS = 512


class Setting(NamedTuple):
    """What a run is with. prefetch: `prefetch_bytes`. samples: of a step. steps: prefetched."""

    prefetch: str
    samples: int
    steps: int


class Found(NamedTuple):
    """Of a run: seconds that each step was waited for, and bytes that the rank had at the most."""

    waits: list[float]
    memory: int


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--store", choices=sorted(STORES), default="file")
    parser.add_argument("--prefetch", nargs="+", default=["64MiB", "256MiB", "1GiB", "2GiB"])
    parser.add_argument("--samples", type=int, nargs="+", default=[8, 32], help="of a step")
    parser.add_argument("--prefetch-steps", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--compute", type=float, default=0.5, help="seconds of each step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default="/dev/shm", help="where files and journals lie")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    tempfile.tempdir = args.folder
    settings = [Setting(*one) for one in product(args.prefetch, args.samples, args.prefetch_steps)]
    runs: dict[Setting, list[Found]] = {setting: [] for setting in settings}
    with (
        signals_unwind(),
        TemporaryDirectory() as folder,
        STORES[args.store](Path(folder)) as address,
    ):
        for _, setting in product(range(args.rounds), settings):
            runs[setting].append(run(address, setting, args.compute))
            print(line(row(setting, runs[setting])), flush=True)
            if args.json is not None:
                rows = [row(one, found) for one, found in runs.items() if found]
                figures = {"store": args.store, "compute_s": args.compute, "rows": rows}
                args.json.write_text(json.dumps(figures, indent=1) + "\n")


def run(address: str, setting: Setting, compute_s: float) -> Found:
    """One rank's, from an empty store."""
    samples = STEPS * setting.samples
    with serving(
        address,
        SAMPLE_BYTES,
        global_batch_size=setting.samples,
        window=1,
        buffer_capacity=samples,
        max_open_steps=setting.steps + 2,
        referenced_bytes="1TiB",
        prefetch_bytes=setting.prefetch,
    ) as endpoint:
        producer = PROCESSES.Process(target=push, args=(endpoint, SAMPLE_BYTES, samples))
        producer.start()
        producer.join()
        found = PROCESSES.Queue()
        rank = PROCESSES.Process(target=train, args=(endpoint, setting.steps, compute_s, found))
        rank.start()
        of_all = Found(*found.get(timeout=600))
        rank.join()
    return of_all


def train(endpoint: str, prefetch_steps: int, compute_s: float, found: Any) -> None:
    """Compute for so long each step."""
    torch.set_num_threads(1)
    with MicroBatchStream(
        endpoint, epochs=1, prefetch_steps=prefetch_steps, measure=False
    ) as stream:
        before, waits = getrusage(RUSAGE_SELF).ru_maxrss, []
        began = time.monotonic()
        for step in stream:
            at = time.monotonic()
            waits.append(at - began)
            for micro_batch in step:
                read(micro_batch["hidden_states"].numpy())
            compute(at + compute_s)
            began = time.monotonic()
            step.commit()
    assert len(waits) == STEPS
    found.put((waits, (getrusage(RUSAGE_SELF).ru_maxrss - before) << 10))


def compute(until: float) -> None:
    """Multiply matrices."""
    matrix = torch.ones(ROWS, ROWS)
    while time.monotonic() < until:
        torch.mm(matrix, matrix)


def row(setting: Setting, runs: list[Found]) -> dict[str, Any]:
    """What is kept of a setting."""
    waits = [wait for found in runs for wait in islice(found.waits, FIRST, None)]
    low, _, high = quantiles(waits, n=4)
    return {
        "prefetch_bytes": setting.prefetch,
        "step_bytes": setting.samples * SAMPLE_BYTES,
        "prefetch_steps": setting.steps,
        "wait_s": median(waits),
        "low_s": low,
        "high_s": high,
        "waits": len(waits),
        "memory_bytes": max(found.memory for found in runs),
    }


def line(of: dict[str, Any]) -> str:
    """A row as it is printed."""
    return (
        f"{of['prefetch_bytes']:>7} ahead, steps of {of['step_bytes'] >> 20:4} MiB, "
        f"{of['prefetch_steps']} ahead: waits {1e3 * of['wait_s']:6.1f} ms "
        f"({1e3 * of['low_s']:.1f} to {1e3 * of['high_s']:.1f}, {of['waits']} steps), "
        f"rank's memory {of['memory_bytes'] >> 20:5} MiB"
    )


if __name__ == "__main__":
    main()
