"""One sample's way through the dispatcher in calls: how many, and how many from part to part.

    python -m tests.bench.calls [--samples 200] [--json FILE]

One rank, a dispatch batch of one sample, no journal: a sample is pushed, planned, delivered and
committed before the next one comes. Counted are calls of the package's own functions on the event
loop's thread; a crossing is one whose nearest caller of the package is in another part (`core`,
`protocol`...). What a process does without samples is taken off: the difference of two runs is
divided by the difference of their samples.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from types import FrameType

import numpy as np

import rollout_dispatcher
from rollout_dispatcher.cli.main import main
from rollout_workers import RankClient, RolloutProducer
from tests.support.server import eventually

PACKAGE = Path(rollout_dispatcher.__file__).parent
OPTIONS = (
    "--dp-size", "1", "--global-batch-size", "1", "--micro-batch-size", "1",
    "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0",
)  # fmt: skip
#: Samples of the shorter run.
FEW = 20

Counts = dict[str, float]


class Profile:
    """A profile function: calls by part, and crossings by their two parts."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.crossings: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """See one event of the interpreter."""
        if event != "call" or (part := part_of(frame.f_code.co_filename)) is None:
            return
        self.calls[part] += 1
        above = self._caller(frame)
        if above not in (None, part):
            self.crossings[f"{above} -> {part}"] += 1

    def _caller(self, frame: FrameType) -> str | None:
        above = frame.f_back
        while above is not None:
            if (part := part_of(above.f_code.co_filename)) is not None:
                return part
            above = above.f_back
        return None


@cache
def part_of(name: str) -> str | None:
    """The part of the package that a file belongs to; None for others' files."""
    if not Path(name).is_relative_to(PACKAGE):
        return None
    parts = Path(name).relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "words"


def serve(folder: Path) -> None:
    """Serve with every call counted, and leave the counts in the folder."""
    profile = Profile()
    sys.setprofile(profile)
    try:
        main(["serve", *OPTIONS, "--ready-file", str(folder / "ready")])
    finally:
        sys.setprofile(None)
        found = {"calls": profile.calls, "crossings": profile.crossings}
        (folder / "counts").write_text(json.dumps(found))


def counts(samples: int) -> dict[str, Counts]:
    """What a whole process counted that saw so many samples."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "tests.bench.calls", "--serve", name]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as child:
            eventually((folder / "ready").exists, "the dispatcher is ready")
            drive(json.loads((folder / "ready").read_text())["listen"][0], samples)
            child.terminate()
        found: dict[str, Counts] = json.loads((folder / "counts").read_text())
        return found


def drive(endpoint: str, samples: int) -> None:
    """Push, take and commit one sample after the other."""
    ids = np.arange(64, dtype=np.int64)
    rank = RankClient(endpoint, dp_rank=0, dp_size=1)
    with RolloutProducer(endpoint) as producer, rank:
        for _ in range(samples):
            producer.push({"input_ids": ids})
            step = rank.next_step()
            assert step is not None
            assert len(list(step)) == 1
            step.commit()


def a_sample(samples: int) -> dict[str, Counts]:
    """Calls and crossings of one sample, with their totals."""
    few, many = counts(FEW), counts(FEW + samples)
    found: dict[str, Counts] = {}
    for what, counted in many.items():
        parts = {name: (n - few[what].get(name, 0)) / samples for name, n in counted.items()}
        most_first = sorted(parts.items(), key=lambda item: -item[1])
        found[what] = {"all": sum(parts.values())} | {k: n for k, n in most_first if n >= 0.5}
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.bench.calls", description=__doc__)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve is not None:
        serve(asked.serve)
    else:
        shown = a_sample(asked.samples)
        for what, parts in shown.items():
            for name, number in parts.items():
                print(f"{what:10} {name:24} {number:8.1f}")
        if asked.json is not None:
            asked.json.write_text(json.dumps(shown, indent=1) + "\n")
