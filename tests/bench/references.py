"""Payloads by reference, beside the engine used bare: put, handed over, read and released.

    python -m tests.bench.references --store file|ray|mooncake [--bytes 10485760] [--samples 96]
                                     [--pairs 3] [--json FILE]

One producer, one consumer, each a process. Bare, keys go through a queue and nothing is decided;
ours push, are planned into steps of 8, and trained on by one rank, with a journal. Both read every
byte once, and have as many samples under way. Runs alternate; rates count from when both are warm
to the last sample read. Bytes through the dispatcher are those that the rank has from it. An engine
has to be there: build/frameworks/ray/bin/python runs this for `ray`.
"""

import argparse
import json
import multiprocessing as mp
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from rollout_dispatcher.payload import Reference
from rollout_workers import MicroBatchStream, RolloutProducer
from rollout_workers.stores.interface import Missing
from rollout_workers.stores.registry import open_store
from tests.support.mooncake import mooncake_store
from tests.support.server import ServeProcess

BATCH, MICRO_BATCH = 8, 4
#: Samples under way at the most, in either way.
AHEAD = 3 * BATCH
#: Samples that a producer puts at the same time, either way.
PUT_AT_ONCE = 2
#: Values of a token's hidden state.
WIDTH = 2048
#: Samples before the clock starts, of both.
WARM_UP = 2 * BATCH
PROCESSES = mp.get_context("spawn")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--store", choices=sorted(STORES), default="file")
    parser.add_argument("--bytes", type=int, default=10 << 20, help="of a sample")
    parser.add_argument("--samples", type=int, default=96, help="a run")
    parser.add_argument("--pairs", type=int, default=3, help="of runs, ours and bare")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    with TemporaryDirectory() as folder, STORES[args.store](Path(folder)) as address:
        pairs = []
        for pair in range(args.pairs):
            both = [ours, bare] if pair % 2 else [bare, ours]
            rates = {run: run(address, args.bytes, args.samples) for run in both}
            pairs.append((rates[ours], rates[bare]))
            print(f"ours {rates[ours][0]:.1f} samples/s, bare {rates[bare][0]:.1f}", flush=True)
    ratio = median(mine[0] / theirs[0] for mine, theirs in pairs)
    wire = median(mine[1] for mine, _ in pairs)
    print(f"{args.store}: ratio {ratio:.2f}, {wire:.0f} bytes a sample through the dispatcher")
    if args.json is not None:
        found = {
            "store": args.store,
            "bytes": args.bytes,
            "ratio": ratio,
            "ratios": [mine[0] / theirs[0] for mine, theirs in pairs],
            "ours": median(mine[0] for mine, _ in pairs),
            "bare": median(theirs[0] for _, theirs in pairs),
            "wire_bytes": wire,
        }
        args.json.write_text(json.dumps(found, indent=2) + "\n")


@contextmanager
def file_store(folder: Path) -> Iterator[str]:
    """Files in memory, so that no disk is measured, or where temporary ones are said to lie."""
    with TemporaryDirectory(dir=tempfile.tempdir or "/dev/shm") as root:
        yield f"file://{root}"


@contextmanager
def ray_store(folder: Path) -> Iterator[str]:
    """A cluster of this machine."""
    import ray  # noqa: PLC0415  only here is it needed

    memory = 1 << 30
    context = ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=memory, log_to_driver=False
    )
    os.environ["RAY_ADDRESS"] = context.address_info["gcs_address"]  # there may be others here
    try:
        yield "ray://rollouts/payloads"
    finally:
        ray.shutdown()


STORES: dict[str, Callable[[Path], Any]] = {
    "file": file_store,
    "mooncake": mooncake_store,
    "ray": ray_store,
}


def sample(nbytes: int) -> dict[str, np.ndarray]:
    """Tokens, and a hidden state of each: the most of its bytes."""
    tokens = max(nbytes // (8 + 4 * WIDTH), 1)
    width = (nbytes // tokens - 8) // 4
    return {
        "input_ids": np.arange(1, tokens + 1),
        "hidden_states": np.ones((tokens, width), np.float32),
    }


# -- ours


@contextmanager
def serving(address: str, nbytes: int, **options: Any) -> Iterator[str]:
    """A dispatcher with a journal, for one rank and samples of so many bytes; yields where."""
    with (
        TemporaryDirectory() as folder,
        ServeProcess(
            Path(folder),
            dp_size=1,
            micro_batch_size=MICRO_BATCH,
            max_sample_tokens=nbytes,
            payload_stores=address,
            journal_dir=f"{folder}/journal",
            sample_retention="commit",
            checked=False,
            **options,
        ) as server,
    ):
        yield server.endpoint


def ours(address: str, nbytes: int, samples: int) -> tuple[float, float]:
    """Samples a second, and bytes a sample that the rank had from the dispatcher."""
    window = AHEAD / BATCH - 1
    with serving(
        address, nbytes, global_batch_size=BATCH, window=window, inline_limit="1B"
    ) as endpoint:
        found = PROCESSES.Queue()
        rank = PROCESSES.Process(target=train, args=(endpoint, found))
        producer = PROCESSES.Process(target=push, args=(endpoint, nbytes, samples))
        rank.start()
        producer.start()
        rate, wire = found.get(timeout=600)
        producer.join()
        rank.join()
        return rate, wire


def push(endpoint: str, nbytes: int, samples: int) -> None:
    """One sample a push; the next one is put while the answer to the last is under way."""
    values = sample(nbytes)
    with RolloutProducer(endpoint) as producer, ThreadPoolExecutor(PUT_AT_ONCE) as threads:
        for pushed in [threads.submit(producer.push, values) for _ in range(samples)]:
            pushed.result()
        producer.end_stream()


def train(endpoint: str, found: Any) -> None:
    """Read every micro-batch once."""
    seen, marks = 0, []
    with MicroBatchStream(endpoint, epochs=1) as stream:
        for step in stream:
            for micro_batch in step:
                seen += len(micro_batch.sample_ids)
                read(micro_batch["input_ids"].numpy())
                read(micro_batch["hidden_states"].numpy())
                marks.append((time.monotonic(), seen))
            step.commit()
        wire = stream.statistics().bytes_received / seen
    found.put((rate_of(marks), wire))


# -- bare


def bare(address: str, nbytes: int, samples: int) -> tuple[float, float]:
    """Samples a second; nothing goes through a dispatcher."""
    keys, found, room = PROCESSES.Queue(), PROCESSES.Queue(), PROCESSES.Semaphore(AHEAD)
    consumer = PROCESSES.Process(target=consume, args=(address, samples, keys, room, found))
    producer = PROCESSES.Process(target=produce, args=(address, nbytes, samples, keys, room))
    consumer.start()
    producer.start()
    rate = found.get(timeout=600)
    producer.join()
    consumer.join()
    return rate, 0.0


def produce(address: str, nbytes: int, samples: int, keys: Any, room: Any) -> None:
    """Put, as many at once as ours does, and tell the keys."""
    store, values = open_store(address), sample(nbytes)
    spans = [array.data.cast("B") for array in values.values()]
    word = f"bare-{time.monotonic_ns()}"

    def put(at: int) -> None:
        room.acquire()
        keys.put(store.put(f"{word}/{at}", spans))

    with ThreadPoolExecutor(PUT_AT_ONCE) as threads:
        list(threads.map(put, range(samples)))
    keys.close()
    keys.join_thread()


def consume(address: str, samples: int, keys: Any, room: Any, found: Any) -> None:
    """Get as many at a time as a micro-batch has, read them, release them."""
    store, marks = open_store(address), []
    for start in range(0, samples, MICRO_BATCH):
        stored = [keys.get() for _ in range(min(MICRO_BATCH, samples - start))]
        for data in store.get([Reference(item, 0, item.nbytes) for item in stored]):
            assert not isinstance(data, Missing)
            read(np.frombuffer(data[: data.nbytes // 4 * 4], np.float32))
        store.release([item.key for item in stored])
        for _ in stored:
            room.release()
        marks.append((time.monotonic(), start + len(stored)))
    found.put(rate_of(marks))


def read(values: np.ndarray) -> None:
    """Look at every byte."""
    assert values.max() > 0


def rate_of(marks: list[tuple[float, int]]) -> float:
    """Samples a second, once warm."""
    began, before = next(mark for mark in marks if mark[1] >= WARM_UP)
    ended, seen = marks[-1]
    return (seen - before) / (ended - began)


if __name__ == "__main__":
    main()
