"""Ranks under torchrun, which starts them again whenever one dies; another one for another size.

torchrun counts its restarts, and each of them is a process group: ranks write into the folder of
that number, counted on from the torchrun before. A rank's process is known by what it writes
down itself.
"""

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.chaos.cluster.processes import Group, Process
from tests.chaos.verdict.history import RankHistory

#: Far more than there are faults.
RESTARTS = 1000


class TorchRank:
    """One rank of one process group, as `Process` is; torchrun is whose end counts."""

    def __init__(self, torchrun: Process, group: Group, rank: int) -> None:
        self._torchrun, self._group, self._rank = torchrun, group, rank

    @property
    def _history(self) -> RankHistory:
        self._group.look()
        return self._group.seen[self._rank]

    @property
    def code(self) -> int | None:
        """The exit code of torchrun."""
        return self._torchrun.code

    def signal(self, number: signal.Signals) -> None:
        """Signal it, if it is there."""
        if (pid := self._history.pid) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """End it at once; torchrun notices."""
        self.signal(signal.SIGKILL)

    def release(self) -> None:
        """Let it, and all others, leave."""
        self._torchrun.release()

    def wait(self, patience: float) -> int:
        """The exit code of torchrun, once all its ranks have left."""
        return self._torchrun.wait(patience)


def start_torchrun(folder: Path, launch: int, max_split: int, endpoints: Sequence[str]) -> Process:
    """Start it on ranks that reach the dispatcher through these endpoints.

    launch: number of its first process group. max_split: ranks that train a sample together.

    By default torchrun gives restarted workers the store of their predecessors, where gloo finds
    the addresses of the dead; the variable makes it start a store for each attempt.
    """
    size = str(len(endpoints))
    return Process(
        [
            "torch.distributed.run", "--standalone", "--nproc-per-node", size,
            "--max-restarts", str(RESTARTS), "--log-dir", str(folder / "logs"),
            "-m", "tests.chaos.actors.torch_rank", str(folder), str(launch), str(max_split),
            *endpoints,
        ],
        folder / "torchrun.log",
        {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def torch_group(launch: int, folder: Path, torchrun: Process, size: int) -> Group:
    """The process group that torchrun makes after so many restarts."""
    group = Group(launch, folder, size)
    group.ranks = [TorchRank(torchrun, group, rank) for rank in range(size)]
    return group
