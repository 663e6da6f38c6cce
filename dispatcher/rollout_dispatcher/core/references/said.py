"""What is said of payload stores, and of the workers that open them; `Dispatch.hear` is told it.

A worker is any client that opens payload stores: its name is the shell's, and tells DP ranks from
producers.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerThere:
    """A worker is there, maybe again: what it was asked before is void."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerLeaves:
    """It has said goodbye, and waits until we say it too."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """Its connection is over."""

    worker: str


@dataclass(frozen=True, slots=True)
class Freed:
    """A worker answers a `FreeWanted`: these objects are still there."""

    worker: str
    number: int
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Swept:
    """A worker answers a `SweepWanted`: these objects are there, and others if there are more."""

    worker: str
    number: int
    keys: tuple[str, ...] = ()
    more: bool = False
    failed: bool = False


Said = WorkerThere | WorkerLeaves | WorkerGone | Freed | Swept
