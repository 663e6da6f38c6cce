"""Runs trainers and producers as processes, and reads the diaries that trainers keep."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.source import PYTHONPATH, ROOT
from tests.support.torchrun import torchrun_command

HERE = Path(__file__).parent
#: Far above what any of these runs needs on a slow machine, and below the test's own timeout.
PATIENCE = 100.0


@contextmanager
def running(*argv: str, **env: str) -> Iterator["subprocess.Popen[str]"]:
    """A process in a session of its own; whatever is left of it is killed on the way out."""
    process = subprocess.Popen(
        argv,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            signal_family(process, signal.SIGKILL)
        process.communicate()


def signal_family(process: "subprocess.Popen[str]", number: signal.Signals) -> None:
    """Signal a process and all its descendants: torchrun gives each worker its own session."""
    for pid in _family(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _family(pid: int) -> list[int]:
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    family = [pid]
    for member in family:  # grows on the way
        family += [child for child, parent in parents.items() if parent == member]
    return family


def torchrun(ranks: int, endpoint: str, out: Path, *options: str, max_restarts: int = 0) -> Any:
    """`ranks` trainers under torchrun, as a context manager.

    By default torchrun gives restarted workers the store of their predecessors, where gloo finds
    the addresses of the dead; the variable makes it start a store for each attempt.
    """
    return running(
        *torchrun_command(ranks, out), "--max-restarts", str(max_restarts),
        str(HERE / "trainer.py"), "--endpoint", endpoint, "--out", str(out), *options,
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )  # fmt: skip


def producer(endpoint: str, name: str, samples: int, *options: str) -> Any:
    """A producer process, as a context manager."""
    return running(
        sys.executable, str(HERE / "producer.py"), "--endpoint", endpoint, "--name", name,
        "--samples", str(samples), *options,
    )  # fmt: skip


def finish(process: "subprocess.Popen[str]", code: int = 0, within: float = PATIENCE) -> str:
    """Wait for a process and return what it printed; fails with that if it ended otherwise."""
    output, _ = process.communicate(timeout=within)
    assert process.returncode == code, f"exit code {process.returncode}\n{output}"
    return output


@dataclass(slots=True)
class Attempt:
    """What one start of one rank saw and applied, by step number."""

    taken: dict[int, dict[str, Any]] = field(default_factory=dict)
    committed: dict[int, list[list[str]]] = field(default_factory=dict)


@dataclass(slots=True)
class Diaries:
    """attempts[a][rank] is what that rank wrote in its a-th start."""

    attempts: dict[int, dict[int, Attempt]]

    def committed(self) -> dict[int, list[str]]:
        """Sample ids of every step that all ranks of one start applied; fails on a repeat."""
        steps: dict[int, list[str]] = {}
        for ranks in self.attempts.values():
            applied = [set(attempt.committed) for attempt in ranks.values()]
            for number in sorted(set.intersection(*applied)):
                assert number not in steps, f"step {number} was committed in two starts"
                parts = [part for rank in ranks.values() for part in rank.committed[number]]
                steps[number] = [name for part in parts for name in part]
        return steps

    def disagreements(self) -> list[int]:
        """Steps that two ranks of one start saw differently, or with another plan on restart."""
        seen: defaultdict[int, set[tuple[str, int]]] = defaultdict(set)
        for ranks in self.attempts.values():
            for attempt in ranks.values():
                for number, line in attempt.taken.items():
                    seen[number].add((line["digest"], line["count"]))
        return sorted(number for number, plans in seen.items() if len(plans) > 1)


def read_diaries(out: Path) -> Diaries:
    """Everything that the trainers wrote into this folder."""
    attempts: defaultdict[int, dict[int, Attempt]] = defaultdict(dict)
    for path in sorted(out.glob("rank*.attempt*.jsonl")):
        rank, number = (int("".join(filter(str.isdigit, part))) for part in path.stem.split("."))
        attempt = attempts[number][rank] = Attempt()
        for line in map(json.loads, path.read_text().splitlines()):
            if line["event"] == "taken":
                attempt.taken[line["step"]] = line
            else:
                attempt.committed[line["step"]] = line["samples"]
    return Diaries(dict(attempts))


def assert_each_exactly_once(diaries: Diaries, expected: set[str]) -> None:
    """Every expected sample is in exactly one committed step, and no other sample is."""
    counts = Counter(name for names in diaries.committed().values() for name in names)
    assert {name: count for name, count in counts.items() if count > 1} == {}
    assert set(counts) == expected
