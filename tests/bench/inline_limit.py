"""From which size on a payload had better go by reference: `inline_limit`, and its default.

    python -m tests.bench.inline_limit [--stores file ray mooncake] [--kib 64 1024 ...]
                                       [--sockets tcp unix] [--pushes 1 8] [--pairs 5]
                                       [--folder /dev/shm] [--json FILE]

One producer and two ranks, with a journal, as references need one: each size goes inline and by
reference in turn, by one and by eight samples a push, over TCP or a Unix socket. All is in memory,
the journal and a store of files too: no disk is measured. Compared is the CPU time that a sample
takes each process, and an engine's own processes with them; by reference over inline, below 1 where
a reference is cheaper. A run has ended when the store is empty again. Each engine is run by an
interpreter that has it. Linux only.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from rollout_dispatcher.cli.demo.processes import signals_unwind
from rollout_workers.stores.interface import PayloadStore
from rollout_workers.stores.registry import open_store
from tests.bench.pairs import in_turn, in_words, spread
from tests.bench.plane.children.whole import WARM_UP, cpu_seconds, spent
from tests.bench.plane.load.loads import LOADS, PUSHES, SIZES_KIB, Load
from tests.bench.plane.measure.end_to_end import RANK
from tests.bench.plane.planes.plane import Plane, plane
from tests.bench.stores import STORES, figures_of, python_of
from tests.support.server import eventually

SOCKETS = ("tcp",)
DEFAULT_KIB = (64, 256, 1024, 4096)
INLINE, REFERENCE = "1TiB", "1B"


@dataclass(frozen=True, slots=True)
class Run:
    """CPU seconds of a run by process, and how long it took."""

    used: dict[str, float]
    seconds: float


class Way:
    """A plane that is ready, of one of both ways.

    store: where its payloads lie, None for inline. engine: the processes that this consists of.
    """

    def __init__(self, moving: Plane, store: PayloadStore | None, engine: Sequence[int]) -> None:
        self._moving, self._store, self._engine = moving, store, engine
        moving.join()
        for _ in range(WARM_UP):
            self.run()

    def run(self) -> Run:
        """One more of the load."""
        before, seconds = self._spent(), self._moving.run()
        if self._store is not None:
            eventually(self._is_empty, "every object is released")
        after = self._spent()
        return Run({name: after[name] - used for name, used in before.items()}, seconds)

    def _is_empty(self) -> bool:
        assert self._store is not None
        return not self._store.list("")

    def _spent(self) -> dict[str, float]:
        each = spent(self._moving)
        if self._engine:
            each["store"] = cpu_seconds([*self._engine, *descendants(self._engine)])
        return {"all": sum(each.values()), **each}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--stores", nargs="+", choices=sorted(STORES), default=["file"])
    parser.add_argument("--here", action="store_true", help="run stores by this interpreter")
    parser.add_argument("--kib", type=int, nargs="+", choices=SIZES_KIB, default=DEFAULT_KIB)
    parser.add_argument("--sockets", nargs="+", choices=SOCKETS, default=SOCKETS)
    parser.add_argument(
        "--pushes", type=int, nargs="+", choices=PUSHES, default=PUSHES, help="samples of a push"
    )
    parser.add_argument("--pairs", type=int, default=5, help="of runs, at least 2")
    parser.add_argument("--folder", default="/dev/shm", help="where files and journals lie")
    parser.add_argument("--quick", action="store_true", help="short runs: whether it works at all")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    tempfile.tempdir = args.folder
    rows = []
    with signals_unwind():
        for store in args.stores:
            for found in of_store(store, args):
                rows.append(found)
                print(line(found), flush=True)
                if args.json is not None:
                    args.json.write_text(json.dumps(rows, indent=1) + "\n")


def of_store(store: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of one, by the interpreter that has its engine."""
    python = Path(sys.executable) if args.here else python_of(store)
    if python == Path(sys.executable):
        yield from rows_of(store, args)
    elif python.exists():
        words = ["--here", "--stores", store, "--pairs", str(args.pairs), "--folder", args.folder]
        for name in ("kib", "sockets", "pushes"):
            words += [f"--{name}", *map(str, getattr(args, name))]
        words += ["--quick"] if args.quick else []
        yield from figures_of(python, "tests.bench.inline_limit", words)
    else:
        print(f"SKIPPED: {store}, as there is no {python}; make it with tests.frameworks.run")


def rows_of(store: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row a socket, a size of a push, and a size."""
    with TemporaryDirectory() as folder, STORES[store](Path(folder)) as address:
        engine = children(os.getpid())
        for socket, push, kib in product(args.sockets, args.pushes, args.kib):
            load = LOADS[f"{kib}k-by-{push}"]
            load = load.quick if args.quick else load
            with ways(load, socket, address, engine) as (inline, reference):
                pairs = list(in_turn(inline, reference, lambda way, _: way.run(), args.pairs))
            said = {"store": store, "socket": socket, "push": push, "kib": kib}
            yield said | figures(load, pairs)


@contextmanager
def ways(load: Load, socket: str, address: str, engine: Sequence[int]) -> Iterator[tuple[Way, Way]]:
    """All inline, and all by reference."""
    with TemporaryDirectory() as folder:

        def options(name: str, limit: str) -> dict[str, str]:
            own = Path(folder, name)
            own.mkdir()
            listen = "127.0.0.1:0" if socket == "tcp" else f"unix:{own}/socket"
            return {
                "payload_stores": address, "journal_dir": f"{own}/journal",
                "sample_retention": "commit",
                "inline_limit": limit, "listen": listen,
            }  # fmt: skip

        with (
            plane(load, rank=RANK, **options("inline", INLINE)) as inline,
            plane(load, rank=RANK, **options("reference", REFERENCE)) as reference,
        ):
            store = open_store(address)
            yield Way(inline, None, ()), Way(reference, store, engine)
            store.close()
            inline.finish()
            reference.finish()


def figures(load: Load, pairs: Sequence[tuple[Run, Run]]) -> dict[str, Any]:
    """Microseconds of CPU a sample, the medians, and what a reference costs over inline.

    rate: samples a second by reference over those inline.
    """
    inline, reference = zip(*pairs, strict=True)
    return {
        "inline_us": _each(load, inline),
        "reference_us": _each(load, reference),
        "ratios": {
            name: spread([other.used[name] / one.used[name] for one, other in pairs])
            for name in inline[0].used
        },
        "rate": spread([one.seconds / other.seconds for one, other in pairs]),
    }


def line(of: dict[str, Any]) -> str:
    """A row as it is printed."""
    used = " ".join(
        f"{name} {of['inline_us'].get(name, 0):.0f} -> {us:.0f}"
        for name, us in of["reference_us"].items()
    )
    words = {name: in_words(at, 2) for name, at in of["ratios"].items()}
    return (
        f"{of['store']:8} {of['kib']:5} KiB by {of['push']} {of['socket']:4} {words['all']}, "
        f"dispatcher {words['dispatcher']}, rate {in_words(of['rate'], 2)}; us/sample: {used}"
    )


def children(pid: int) -> list[int]:
    """Processes that one has started, and that are there."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread ended meanwhile
            found += [int(word) for word in file.read_text().split()]
    return found


def descendants(pids: Iterable[int]) -> Iterator[int]:
    """Processes that these have started, and those that they have."""
    for pid in pids:
        started = children(pid)
        yield from started
        yield from descendants(started)


def _each(load: Load, runs: Sequence[Run]) -> dict[str, float]:
    return {
        name: 1e6 * median(run.used[name] for run in runs) / load.samples for name in runs[0].used
    }


if __name__ == "__main__":
    main()
