"""Facts: what has to outlive the process, and what a new process is told of it.

The core notes a fact for each change that a restart must not forget; the shell makes them durable,
in order, before it performs the effects that came with them. `Remembered` is the other direction:
everything that facts add up to, from which a new core starts. Times are of the core's clock.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dispatcher.core.buffer import Entry
from dispatcher.core.events import DropReason


@dataclass(frozen=True, slots=True)
class Accepted:
    """A sample is in the buffer. given_id: its id, if the user gave it."""

    entry: Entry
    producer: str
    seq: int
    given_id: str | None


@dataclass(frozen=True, slots=True)
class FloorRaised:
    """A producer will never again send a sequence number below `floor`."""

    producer: str
    floor: int


@dataclass(frozen=True, slots=True)
class Planned:
    """A step holds these tickets, by DP rank and micro-batch; others were passed over once more.

    Of a step that is open already it is the new plan.
    """

    step: int
    digest: str
    planned_at: float
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    passed_over: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    """A step is done, and its samples with it."""

    step: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """These tickets are given up."""

    tickets: tuple[int, ...]
    reason: DropReason


@dataclass(frozen=True, slots=True)
class GenerationBegan:
    """A new process group has this number, and so many DP ranks."""

    generation: int
    dp_size: int


@dataclass(frozen=True, slots=True)
class VersionReported:
    """The trainer's weights have this version."""

    version: int


@dataclass(frozen=True, slots=True)
class PhaseEnded:
    """Nothing older than this version comes any more."""

    version: int


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """Nothing comes any more."""


Fact = (
    Accepted
    | FloorRaised
    | Planned
    | Committed
    | Dropped
    | GenerationBegan
    | VersionReported
    | PhaseEnded
    | StreamEnded
)
Note = Callable[[Fact], None]


@dataclass(frozen=True, slots=True)
class RememberedStep:
    """An open step: its entries by DP rank and micro-batch."""

    number: int
    digest: str
    planned_at: float
    micro_batches: tuple[tuple[tuple[Entry, ...], ...], ...]


@dataclass(frozen=True, slots=True)
class Remembered:
    """What facts add up to.

    entries: what is buffered, by ticket. steps: what is open, by number. producers: floor and
    accepted numbers at or above it. given_ids: oldest first. totals: as `Dispatch.totals` gave it.
    dp_size: of the last generation, None if there was none.
    """

    entries: tuple[Entry, ...] = ()
    steps: tuple[RememberedStep, ...] = ()
    next_ticket: int = 0
    next_step: int = 0
    generation: int = 0
    dp_size: int | None = None
    policy_version: int | None = None
    phases: tuple[int, ...] = ()
    ended: bool = False
    producers: Mapping[str, tuple[int, frozenset[int]]] = field(default_factory=dict)
    given_ids: tuple[str, ...] = ()
    totals: Mapping[str, object] = field(default_factory=dict)
