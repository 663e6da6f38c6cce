"""What producers and ranks write down while they run, and how it is read again.

One JSON array a line: time (monotonic, the same clock in all processes), event, values. A line is
one write to an append-only file, so a process that is killed leaves whole lines: what is written
has happened, or is about to where the event says so (`push`, `committing`).
"""

import json
import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

Line = list[Any]


class Writer:
    """Appends events to a history."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, event: str, *values: object) -> None:
        """Append one event; it outlives this process when this returns."""
        line = json.dumps([monotonic(), event, *values], separators=(",", ":"))
        os.write(self._file, line.encode() + b"\n")


class Tail:
    """Reads a history that is being written, each line once."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._rest = path, 0, b""

    def lines(self) -> list[Line]:
        """The whole lines that have come since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._at)
            found = file.read()
        self._at += len(found)
        *whole, self._rest = (self._rest + found).split(b"\n")
        return [json.loads(line) for line in whole]


@dataclass(frozen=True, slots=True)
class Take:
    """A rank's training loop has a step. samples: this rank's; num_samples: of all ranks.

    own_loss: tokens of this rank's samples that the loss counts; loss_tokens: of all ranks, as the
    step's header says. attempt: at the step; it rises where samples of it were gone.
    """

    at: float
    digest: str
    micro_batches: int
    num_samples: int
    samples: tuple[str, ...]
    own_loss: int = 0
    loss_tokens: int = 0
    attempt: int = 0


@dataclass(slots=True)
class RankHistory:
    """One rank process. launch: number of the process group that it belongs to.

    resumed: the step of the checkpoint that it has loaded; saved: of the last one that it saved.
    """

    launch: int
    rank: int
    pid: int | None = None
    generation: int | None = None
    began: float | None = None
    takes: dict[int, Take] = field(default_factory=dict)
    committing: dict[int, float] = field(default_factory=dict)
    committed: dict[int, float] = field(default_factory=dict)
    fenced: float | None = None
    resumed: int | None = None
    saved: int = -1
    ended: bool = False
    faults: list[str] = field(default_factory=list)

    def add(self, line: Line) -> None:
        """Take one line of its file."""
        at, event, *values = line
        match event:
            case "process":
                self.pid = values[0]
            case "began":
                self.began, self.generation = at, values[0]
            case "take":
                step, digest, micro_batches, num_samples, samples, *sums = values
                if step in self.takes:
                    self.faults.append(f"took step {step} twice")
                self.takes[step] = Take(
                    at, digest, micro_batches, num_samples, tuple(samples), *sums
                )
            case "resumed":
                self.resumed = values[0]
            case "saved":
                self.saved = values[0]
            case "committing":
                self.committing[values[0]] = at
            case "committed":
                self.committed[values[0]] = at
            case "fenced":
                self.fenced = at
            case "end":
                self.ended = True
            case "fault":
                self.faults.append(values[0])


@dataclass(slots=True)
class ProducerHistory:
    """One producer over all its processes: samples and when that was; and its groups."""

    pushed: dict[str, float] = field(default_factory=dict)
    acknowledged: dict[str, float] = field(default_factory=dict)
    withdrawn: set[str] = field(default_factory=set)
    groups: list[list[str]] = field(default_factory=list)

    def add(self, line: Line) -> None:
        """Take one line of its file."""
        at, event, samples, *_ = line
        match event:
            case "push":
                self.pushed |= dict.fromkeys(samples, at)
            case "grouped":
                self.pushed |= dict.fromkeys(samples, at)
                self.groups.append(samples)
            case "acknowledged":
                for sample in samples:
                    self.acknowledged.setdefault(sample, at)
            case "withdrawn":
                self.withdrawn.update(samples)


@dataclass(slots=True)
class History:
    """Everything that was written down about one run.

    returned: (launch, rank) of processes that were stopped while their group was replaced, and
    continued after. looks: /statusz now and then; final: once all was committed, None if the run
    did not get there; stuck: when nothing moved for long, None if something always did. ended:
    whether the end of the stream was said for all.
    longest_wait: dispatches that may pass between a sample's acknowledgement and its own step.
    batch: samples of a step; most_buffered: that may be in the buffer.
    deleted: samples that were removed from a payload store behind everybody's back; left: objects
    that are still there when all is over, by key, with the samples in them.
    """

    max_open_steps: int
    longest_wait: int
    batch: int
    most_buffered: int
    ranks: list[RankHistory] = field(default_factory=list)
    producers: list[ProducerHistory] = field(default_factory=list)
    returned: set[tuple[int, int]] = field(default_factory=set)
    looks: Sequence[Mapping[str, Any]] = ()
    final: Mapping[str, Any] | None = None
    stuck: Mapping[str, Any] | None = None
    ended: bool = False
    deleted: Set[str] = frozenset()
    left: Mapping[str, Sequence[str]] = field(default_factory=dict)


def read_rank(path: Path, launch: int, rank: int) -> RankHistory:
    """The history of one rank process; empty if it wrote none."""
    history = RankHistory(launch, rank)
    for line in Tail(path).lines():
        history.add(line)
    return history


def read_producer(path: Path) -> ProducerHistory:
    """The history of one producer; empty if it wrote none."""
    history = ProducerHistory()
    for line in Tail(path).lines():
        history.add(line)
    return history
