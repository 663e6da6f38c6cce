"""The journal alone against a preallocated append-only file, in one run.

    python -m tests.bench.journal [--directory DIR] [--rounds N] [--batches N] [--json FILE]

Both write batches of 64 records of 26 kB and make each batch durable before the next one begins:
the plain file with one `pwritev` and one `fdatasync`, the journal under `batch` with everything it
does besides. They take turns, each time in new files; medians are compared. Two more lines are
what a run is like: steps are planned and committed eight batches later, so that segments are used
again, and four batches are on their way at a time, which group commit exists for. What was written
(and not committed) is read back and compared after each turn, outside the time taken.
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.facts import Accepted, Committed, Fact, Planned, RecoveredState
from rollout_dispatcher.journal.journal import Journal
from rollout_dispatcher.journal.policy import parse_sync
from rollout_dispatcher.sample import DType, Field, Sample, Schema

TOKENS = 3250
SCHEMA = Schema((Field("input_ids", DType.INT64),))
RECORD = SCHEMA.nbytes(TOKENS)
BATCH = 64
#: Different payloads, so that a record in the wrong place is seen.
PAYLOADS = [memoryview(os.urandom(RECORD)) for _ in range(97)]


def payload(ticket: int) -> memoryview:
    return PAYLOADS[ticket % len(PAYLOADS)]


def plain_file(directory: Path, batches: int) -> float:
    """Seconds for a preallocated file."""
    handle = os.open(directory / "plain", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(handle, 0, batches * BATCH * RECORD)
    os.fsync(handle)
    begun = time.perf_counter()
    for number in range(batches):
        tickets = range(number * BATCH, (number + 1) * BATCH)
        os.pwritev(handle, [payload(ticket) for ticket in tickets], number * BATCH * RECORD)
        os.fdatasync(handle)
    seconds = time.perf_counter() - begun
    for ticket in range(batches * BATCH):
        assert os.pread(handle, RECORD, ticket * RECORD) == payload(ticket)
    os.close(handle)
    return seconds


def journal(directory: Path, batches: int, in_flight: int = 1, lag: int | None = None) -> float:
    """Seconds for the journal, with so many batches on their way at a time.

    lag: after so many batches a batch is committed; None for never.
    """
    directory /= "journal"
    opened, _ = open_journal(directory)
    room = threading.Semaphore(in_flight)
    told = 0

    def on_durable(lsn: int) -> None:
        nonlocal told
        room.release(lsn - told)
        told = lsn

    opened.on_durable = on_durable
    begun = time.perf_counter()
    for number in range(batches):
        room.acquire()
        opened.append(facts(number, lag), {"accepted": number * BATCH})
    for _ in range(in_flight):
        room.acquire()
    seconds = time.perf_counter() - begun
    assert opened.close()
    check(directory, 0 if lag is None else batches - lag, batches)
    return seconds


def facts(number: int, lag: int | None) -> list[Fact]:
    """What a batch brings."""
    tickets = range(number * BATCH, (number + 1) * BATCH)
    found: list[Fact] = [accepted(ticket) for ticket in tickets]
    if lag is not None:
        found.append(Planned(number, "digest", time.monotonic(), ((tuple(tickets),),), ()))
        if number >= lag:
            found.append(Committed(number - lag))
    return found


def check(directory: Path, first: int, last: int) -> None:
    """The journal has the samples of these batches, byte for byte."""
    opened, remembered = open_journal(directory)
    in_steps = [e for step in remembered.steps for e in step.micro_batches[0][0]]
    entries = [*in_steps, *remembered.entries]
    assert [entry.ticket for entry in entries] == list(range(first * BATCH, last * BATCH))
    assert all(entry.sample.payload == payload(entry.ticket) for entry in entries)
    opened.close()


def accepted(ticket: int) -> Accepted:
    sample = Sample(f"run-7/sample-{ticket}", TOKENS, TOKENS // 2, SCHEMA, payload(ticket))
    return Accepted(Entry(sample, ticket, time.monotonic()), "producer-0", ticket, None)


def open_journal(directory: Path) -> tuple[Journal, RecoveredState]:
    return Journal.open(directory, parse_sync("batch"), to_wall=float, from_wall=float)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--json", type=Path, default=Path("build/bench/journal.json"))
    options = parser.parse_args()
    ways: dict[str, Callable[[Path, int], float]] = {
        "plain file": plain_file,
        "journal": journal,
        "journal, committing": lambda directory, batches: journal(directory, batches, lag=8),
        "and 4 in flight": lambda directory, batches: journal(directory, batches, 4, lag=8),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
                seconds = way(Path(scratch), options.batches)
            os.sync()
            rates[name].append(options.batches * BATCH * RECORD / seconds / 1e6)
    base = statistics.median(rates["plain file"])
    size = f"{BATCH} x {RECORD} bytes, each durable before it counts"
    print(f"{options.rounds} rounds of {options.batches} batches of {size}")
    for name, found in rates.items():
        median = statistics.median(found)
        spread = f"{min(found):.0f} to {max(found):.0f}"
        print(
            f"{name:22} {median:6.0f} MB/s ({spread:>12})  {median / base:5.2f} of the plain file"
        )
    alone = {
        name: {
            "mb_per_second": round(statistics.median(found)),
            "share_of_plain_file": round(statistics.median(found) / base, 3),
        }
        for name, found in rates.items()
    }
    note(options.json, alone=alone)


def note(path: Path, **found: object) -> None:
    """Add to what other measurements have noted there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | found, indent=2) + "\n")


if __name__ == "__main__":
    main()
