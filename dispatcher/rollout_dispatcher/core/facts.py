"""Facts: the changes that have to outlive the process, and the state that a new process recovers
from them.

The core notes a fact for each change that a restart must not forget; the shell makes them durable,
in order, before it performs the effects that came with them. `RecoveredState` is the other
direction: everything that facts add up to, from which a new core starts. Times are of the core's
clock.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, TypeVar, cast, dataclass_transform

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.payload import StoredObject
from rollout_dispatcher.sample import Schema
from rollout_planner.cost import Quadratic


class DropReason(StrEnum):
    """Why an accepted sample will never be trained on."""

    INCOMPLETE_GROUP = "incomplete-group"
    SUPERSEDED = "superseded"
    NO_ROOM = "no-room"
    STALE = "stale"
    OVERSIZE = "oversize"
    SCHEMA = "schema"
    LAST_BATCH = "last-batch"
    SHUTDOWN = "shutdown"
    UNRESOLVED = "unresolved"
    UNREADABLE = "unreadable"
    UNUSED = "unused"


class Fact:
    """What a restart must not forget. kind: what its row in the journal is called."""

    __slots__: ClassVar[tuple[str, ...]] = ()
    kind: ClassVar[str]


F = TypeVar("F", bound=type[Fact])


@dataclass_transform(frozen_default=True)
def fact(kind: str) -> Callable[[F], F]:
    """A frozen dataclass of that kind; its row has its fields, in their order."""

    def declare(cls: F) -> F:
        made = cast("F", dataclass(frozen=True, slots=True)(cls))
        made.kind = kind
        return made

    return declare


@fact("accepted")
class Accepted(Fact):
    """A sample is in the buffer. given_id: its id, if the user gave it (with a checksum)."""

    entry: Entry
    producer: str
    seq: int
    given_id: str | None


@fact("floor")
class FloorRaised(Fact):
    """A producer will never again send a sequence number below `floor`."""

    producer: str
    floor: int


@fact("keyed")
class ProducerKeyed(Fact):
    """A producer's name is its own from now on; digest: of the key that it has to show."""

    producer: str
    digest: str


@fact("left")
class ProducerLeft(Fact):
    """A producer said goodbye: it is not waited for until it pushes again."""

    producer: str


@fact("sized")
class GroupSized(Fact):
    """The group that these buffered samples form has `size` members in all."""

    tickets: tuple[int, ...]
    size: int


@fact("group-ended")
class GroupEnded(Fact):
    """A group is closed: later members are refused. why: it was abandoned, in words; empty if it is
    complete.
    """

    group_id: str
    why: str


@fact("said")
class EndsReported(Fact):
    """The ends that a producer has announced: its newest ended phase, and whether its stream has
    ended.

    phase: a policy version, 0 for none.
    """

    producer: str
    phase: int
    ended: bool


@fact("planned")
class Planned(Fact):
    """A step holds these tickets, by DP rank and micro-batch; others were passed over once more.

    Of a step that is open already it is the new plan. Without a digest it is none: the step has
    lost its plan, and has these tickets now. usual_loss, cp_sizes: as in `OpenStep`.
    """

    step: int
    digest: str
    planned_at: float
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    passed_over: tuple[int, ...]
    attempt: int = 0
    usual_loss: float = 0.0
    cp_sizes: tuple[tuple[int, ...], ...] = ()


@fact("withdrawn")
class Withdrawn(Fact):
    """The last step has nothing left, and is none; the next plan has its number, and is the attempt
    after this one.
    """

    step: int
    attempt: int


@fact("committed")
class Committed(Fact):
    """A step is done, and its samples with it unless they are retained."""

    step: int
    retained: bool = False


@fact("dropped")
class Dropped(Fact):
    """Samples with these tickets are dropped."""

    tickets: tuple[int, ...]
    reason: DropReason


@fact("run")
class RunBegan(Fact):
    """The run has this name, by which checkpoints know it."""

    run_id: str


@fact("generation")
class GenerationBegan(Fact):
    """A new process group has this number, and so many DP ranks."""

    generation: int
    dp_size: int


@fact("resumed")
class Resumed(Fact):
    """This generation goes on after this step: retained steps after it are open again."""

    after: int


@fact("saved")
class CheckpointSaved(Fact):
    """A checkpoint covers the steps up to this one: what is retained of them is not needed."""

    step: int


@fact("evicted")
class RetainedEvicted(Fact):
    """The retained steps up to this one are gone, though no saved checkpoint covers them."""

    step: int


@fact("version")
class VersionReported(Fact):
    """The trainer's weights have this version. first_step: the first one that trains with it."""

    version: int
    first_step: int = 0


@fact("phase")
class PhaseEnded(Fact):
    """Nothing older than this version comes any more."""

    version: int


@fact("size")
class GroupSizeSet(Fact):
    """From now on groups whose samples do not say have this size; None: they have to say."""

    size: int | None


@fact("fixed")
class SchemaFixed(Fact):
    """Every sample of the run has this schema from now on. set_by: who has decided, in words."""

    schema: Schema
    set_by: str


@fact("cost")
class CostFitted(Fact):
    """Steps from `first_step` on are planned with this cost, fitted to what micro-batches took.

    version: how often that has happened. error: typical relative deviation of a micro-batch.
    """

    version: int
    cost: Quadratic
    error: float
    first_step: int


@fact("speeds")
class SpeedsMeasured(Fact):
    """Steps from `first_step` on are planned for DP ranks of this slowness, in this generation.

    slowness: seconds that each takes for what the median rank takes one for.
    """

    generation: int
    slowness: tuple[float, ...]
    first_step: int


@fact("unneeded")
class Releasable(Fact):
    """Nobody needs these objects of payload stores: they are on the list of releases."""

    objects: tuple[StoredObject, ...]


@fact("forgotten")
class Deleted(Fact):
    """These objects are not in their stores any more, and not on the list."""

    objects: tuple[StoredObject, ...]


@fact("incarnation")
class IncarnationBegan(Fact):
    """A process of this producer is there, and may put objects: their keys begin with its name."""

    producer: str
    incarnation: str


@fact("swept")
class IncarnationSwept(Fact):
    """It has ended, and all objects of it that there are are known."""

    incarnation: str


@fact("ended")
class StreamEnded(Fact):
    """Nothing comes any more."""


@fact("finished")
class Finished(Fact):
    """The DP ranks have finished the run. pending: not everybody has been told; if not, the next
    process goes on with what is left.
    """

    pending: bool


AppendFact = Callable[[Fact], None]


@dataclass(frozen=True, slots=True)
class RecoveredStep:
    """An open or retained step: its entries by DP rank and micro-batch.

    rewound: it was committed, and is open again. Of such steps and of retained ones the journal
    alone has the payloads.
    """

    number: int
    digest: str
    planned_at: float
    micro_batches: tuple[tuple[tuple[Entry, ...], ...], ...]
    rewound: bool = False
    attempt: int = 0
    usual_loss: float = 0.0
    cp_sizes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class RecoveredState:
    """What facts add up to.

    entries: what is buffered, by ticket; of the youngest the journal alone may have the payloads.
    steps: what is open, by number; retained: what is committed and retained. withdrawn: the last
    attempt at each step that is withdrawn and not planned again. resumed: the step
    after which the current generation goes on, if it loaded a checkpoint; saved: the last step that
    a saved checkpoint covers; evicted: the last retained step that had to go before one did.
    producers: floor and accepted numbers at or above it. ends: of the
    producers that have ended a phase or their stream, the newest such phase (0: none) and whether
    the stream. given_ids, checksums: oldest first. ended_groups: with why, as in `GroupEnded`,
    likewise. totals: as `DispatcherCore.totals` gave it. dp_size: of the last generation, None if
    there was none. policy_step: the first step that trains with `policy_version`, None if that is.
    group_size: as it was last set. cost: fitted, that plans were made with.
    schema: of all samples, None while that was not decided; set_by: who
    has, in words. finished: the run is, and not everybody has been told; was_finished: everybody
    has, and no DP rank came since.
    """

    entries: tuple[Entry, ...] = ()
    steps: tuple[RecoveredStep, ...] = ()
    retained: tuple[RecoveredStep, ...] = ()
    next_ticket: int = 0
    next_step: int = 0
    withdrawn: Mapping[int, int] = field(default_factory=dict)
    run_id: str = ""
    generation: int = 0
    dp_size: int | None = None
    resumed: int | None = None
    saved: int = -1
    evicted: int = -1
    policy_version: int | None = None
    policy_step: int | None = None
    group_size: int | None = None
    schema: Schema | None = None
    cost: CostFitted | None = None
    speeds: SpeedsMeasured | None = None
    set_by: str = ""
    phases: tuple[int, ...] = ()
    ended: bool = False
    finished: bool = False
    was_finished: bool = False
    producers: Mapping[str, tuple[int, frozenset[int]]] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    left: frozenset[str] = frozenset()
    ends: Mapping[str, tuple[int, bool]] = field(default_factory=dict)
    given_ids: tuple[str, ...] = ()
    checksums: tuple[int | None, ...] = ()
    ended_groups: tuple[tuple[str, str], ...] = ()
    totals: Mapping[str, object] = field(default_factory=dict)
    unneeded: tuple[StoredObject, ...] = ()
    incarnations: Mapping[str, str] = field(default_factory=dict)
