"""From which size on a payload had better go by reference: `inline_limit`, and its default.

    python -m tests.bench.inline_limit [--kib 64 1024 ...] [--pushes 1 8] [--pairs 5]
                                       [--folder /dev/shm] [--json FILE]

One producer and two ranks, with a journal, as references need one: each size goes inline and by
reference in turn, by one and by eight samples a push. All is in memory, the journal and a store of
files too: no disk is measured. Compared is the CPU time that a sample takes each process; by
reference over inline, below 1 where a reference is cheaper. A run has ended when the store is empty
again. Linux only.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from tests.bench.plane.children.whole import WARM_UP, spent
from tests.bench.plane.load.loads import LOADS, PUSHES, SIZES_KIB, Load
from tests.bench.plane.measure.end_to_end import RANK
from tests.bench.plane.planes.plane import Plane, plane
from tests.support.server import eventually

DEFAULT_KIB = (64, 256, 1024, 4096)
INLINE, REFERENCE = "1TiB", "1B"


@dataclass(frozen=True, slots=True)
class Run:
    """CPU seconds of a run by process, and how long it took."""

    used: dict[str, float]
    seconds: float


class Way:
    """A plane that is ready, of one of both ways. store: of its payloads, None for inline."""

    def __init__(self, moving: Plane, store: PayloadStore | None) -> None:
        self._moving, self._store = moving, store
        moving.join()
        for _ in range(WARM_UP):
            self.run()

    def run(self) -> Run:
        """One more of the load."""
        before, seconds = spent(self._moving), self._moving.run()
        if (store := self._store) is not None:
            eventually(lambda: not store.list(""), "every object is released")
        used = {name: after - before[name] for name, after in spent(self._moving).items()}
        return Run({"all": sum(used.values()), **used}, seconds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kib", type=int, nargs="+", choices=SIZES_KIB, default=DEFAULT_KIB)
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
        for found in measure(args):
            rows.append(found)
            print(line(found), flush=True)
            if args.json is not None:
                args.json.write_text(json.dumps(rows, indent=1) + "\n")


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row a size of a push, and a size."""
    for push, kib in product(args.pushes, args.kib):
        load = LOADS[f"{kib}k-by-{push}"]
        load = load.quick if args.quick else load
        with ways(load) as (inline, reference):
            pairs = list(in_turn(inline, reference, lambda way, _: way.run(), args.pairs))
        yield {"push": push, "kib": kib} | figures(load, pairs)


@contextmanager
def ways(load: Load) -> Iterator[tuple[Way, Way]]:
    """All inline, and all by reference."""
    with TemporaryDirectory() as folder:
        store_folder = Path(folder, "store")
        store_folder.mkdir()
        address = f"file://{store_folder}"

        def options(limit: str) -> dict[str, str]:
            return {
                "payload_stores": address,
                "journal_dir": f"{folder}/{limit}",
                "sample_retention": "commit",
                "inline_limit": limit,
            }

        with (
            plane(load, rank=RANK, **options(INLINE)) as inline,
            plane(load, rank=RANK, **options(REFERENCE)) as reference,
        ):
            store = open_store(address)
            yield Way(inline, None), Way(reference, store)
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
        f"{of['kib']:5} KiB by {of['push']} {words['all']}, "
        f"dispatcher {words['dispatcher']}, rate {in_words(of['rate'], 2)}; us/sample: {used}"
    )


def _each(load: Load, runs: Sequence[Run]) -> dict[str, float]:
    return {
        name: 1e6 * median(run.used[name] for run in runs) / load.samples for name in runs[0].used
    }


if __name__ == "__main__":
    main()
