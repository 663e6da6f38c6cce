"""Child processes of a chaos run: one, and a process group of ranks with what it wrote so far.

Each has an operating system's process group of its own, which is killed whole, and a standard input
that ends when its starter does.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from tests.chaos.verdict.history import RankHistory, Tail
from tests.support.source import ROOT

DISK_MB = 64


class Stalled(Exception):
    """The run does not go on: something ended by itself, or nothing came in time."""


class NotInTime(Stalled):
    """Everything runs, and what was to come did not."""


class Process:
    """One child process; may be stopped, continued, killed."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str] = {}) -> None:
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env=os.environ | env,
            )

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code, once it has ended."""
        return self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Signal it, if it is there; what is to stop has stopped when this returns."""
        self._process.send_signal(number)
        if number is signal.SIGSTOP and self._process.returncode is None:
            # Its end is not taken from who waits for that.
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def release(self) -> None:
        """Close its standard input."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def kill(self) -> None:
        """End it, and everything that it started, at once."""
        if self.code is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.release()

    def wait(self, patience: float) -> int:
        """Its exit code; raises Stalled if it does not end."""
        try:
            return self._process.wait(patience)
        except subprocess.TimeoutExpired:
            raise Stalled(f"process {self._process.args!r} does not end") from None


class Killable(Protocol):
    """What faults are done to."""

    @property
    def code(self) -> int | None:
        """The exit code, once it has ended."""

    def signal(self, number: signal.Signals) -> None:
        """Signal it, if it is there."""

    def release(self) -> None:
        """Close its standard input."""

    def kill(self) -> None:
        """End it at once."""

    def wait(self, patience: float) -> int:
        """Its exit code; raises Stalled if it does not end."""


class Group:
    """One process group of ranks, and what it has written so far."""

    def __init__(self, launch: int, folder: Path, size: int) -> None:
        self.launch, self.folder = launch, folder
        folder.mkdir(exist_ok=True)
        self.ranks: Sequence[Killable] = ()
        self.seen = [RankHistory(launch, rank) for rank in range(size)]
        self._tails = [Tail(folder / f"rank-{rank}.jsonl") for rank in range(size)]

    def look(self) -> None:
        """Read what is new."""
        for history, tail in zip(self.seen, self._tails, strict=True):
            for line in tail.lines():
                history.add(line)

    @property
    def newest(self) -> int:
        """The newest step that any rank has taken."""
        self.look()
        return max((step for one in self.seen for step in one.takes), default=-1)

    def committed_beyond(self, step: int) -> float | None:
        """When all ranks had committed some step after `step`; None if they have not."""
        self.look()
        times = [min((at for n, at in one.committed.items() if n > step), default=None)
                 for one in self.seen]  # fmt: skip
        known = [at for at in times if at is not None]
        return max(known) if len(known) == len(times) else None


def start_group(
    launch: int,
    folder: Path,
    endpoints: Sequence[str],
    options: Sequence[str],
    env: Mapping[str, str],
) -> Group:
    """Start ranks that know nothing of torch, as one process group."""
    size = len(endpoints)
    group = Group(launch, folder, size)
    group.ranks = [
        Process(
            ["tests.chaos.actors.rank", endpoint, str(rank), str(size), str(folder), *options],
            folder / f"rank-{rank}.log",
            env,
        )
        for rank, endpoint in enumerate(endpoints)
    ]
    return group


def mount(folder: Path) -> None:
    """Mount a file system in memory that is soon full. Raises CalledProcessError if it may not."""
    size = f"size={DISK_MB}m"
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "none", folder], check=True, capture_output=True
    )
