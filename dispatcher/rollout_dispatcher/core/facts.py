"""Facts: the changes that have to outlive the process, and the state that a new process recovers
from them.

The core appends a fact for each change that a restart must not lose; the shell makes them durable,
in order, before it performs the effects that came with them. A new core starts from a
`RecoveredState`, the sum of all facts. Times are of the core's clock.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, TypeVar, cast, dataclass_transform

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.payload import StoredObject
from rollout_dispatcher.sample import Schema
from rollout_planner.cost import Quadratic

if TYPE_CHECKING:
    from rollout_dispatcher.core.steps.step import OpenStep


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
    """A change that a restart must not lose. kind: of its row in the journal."""

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
    """A producer never again sends a sequence number below `floor`."""

    producer: str
    floor: int


@fact("keyed")
class ProducerKeyed(Fact):
    """A producer has bound its name to a key; digest: of that key."""

    producer: str
    digest: str


@fact("left")
class ProducerLeft(Fact):
    """A producer closed for good: nothing waits for it until it pushes again."""

    producer: str


@fact("sized")
class GroupSized(Fact):
    """The group of these buffered samples has `size` members in all."""

    tickets: tuple[int, ...]
    size: int


@fact("group-ended")
class GroupEnded(Fact):
    """A group is closed: later members are refused. why: the group was abandoned, for people; empty
    if it is complete.
    """

    group_id: str
    why: str


@fact("said")
class EndsReported(Fact):
    """A producer has ended phases up to `phase` (a policy version, 0 for none), or its stream."""

    producer: str
    phase: int
    ended: bool


@fact("planned")
class Planned(Fact):
    """A step has this plan: tickets by DP rank and micro-batch; `passed_over` stay in the buffer.

    It replaces an earlier plan of that step. An empty digest is no plan: the step has lost its own,
    and has these tickets now. usual_loss, cp_sizes: as in `OpenStep`.
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
    """The last step has lost all samples and is withdrawn; the next plan has its number, and is the
    attempt after this one.
    """

    step: int
    attempt: int


@fact("committed")
class Committed(Fact):
    """Every DP rank has applied a step. retained: its samples are kept for a rewind."""

    step: int
    retained: bool = False


@fact("dropped")
class Dropped(Fact):
    """Samples with these tickets are dropped."""

    tickets: tuple[int, ...]
    reason: DropReason


@fact("run")
class RunBegan(Fact):
    """The run has this name, which its checkpoints carry."""

    run_id: str


@fact("generation")
class GenerationBegan(Fact):
    """A new process group of `dp_size` DP ranks has joined."""

    generation: int
    dp_size: int


@fact("resumed")
class Resumed(Fact):
    """The current generation resumes after this step: retained steps after it are open again."""

    after: int


@fact("saved")
class CheckpointSaved(Fact):
    """A saved checkpoint covers the steps up to this one: they are no longer retained."""

    step: int


@fact("evicted")
class RetainedEvicted(Fact):
    """The retained steps up to this one are evicted, and no saved checkpoint covers them."""

    step: int


@fact("version")
class VersionReported(Fact):
    """The trainer's weights have this version. first_step: the first one that trains with it."""

    version: int
    first_step: int = 0


@fact("phase")
class PhaseEnded(Fact):
    """No producer pushes anything older than this version any more."""

    version: int


@fact("size")
class GroupSizeSet(Fact):
    """Size of groups whose samples carry none; None: every sample has to carry it."""

    size: int | None


@fact("fixed")
class SchemaFixed(Fact):
    """Every sample of the run has this schema. set_by: who decided on it, for people."""

    schema: Schema
    set_by: str


@fact("cost")
class CostFitted(Fact):
    """Steps from `first_step` on are planned with this cost, fitted to measured micro-batches.

    version: number of the fit, from 1. error: typical relative deviation of a micro-batch.
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
    """No sample needs these objects of payload stores: they are to be deleted."""

    objects: tuple[StoredObject, ...]


@fact("forgotten")
class Deleted(Fact):
    """These objects are deleted from their stores."""

    objects: tuple[StoredObject, ...]


@fact("incarnation")
class IncarnationBegan(Fact):
    """A process of this producer connected and may put objects; their keys begin with
    `incarnation`.
    """

    producer: str
    incarnation: str


@fact("swept")
class IncarnationSwept(Fact):
    """An ended incarnation has no unknown objects in any store."""

    incarnation: str


@fact("ended")
class StreamEnded(Fact):
    """No producer pushes anything any more."""


@fact("finished")
class Finished(Fact):
    """The DP ranks have finished the run. pending: the finish was not sent to every peer yet;
    afterwards the next process continues with the unused samples.
    """

    pending: bool


AppendFact = Callable[[Fact], None]


@dataclass(frozen=True, slots=True)
class RecoveredState:
    """The sum of all facts.

    entries: buffered samples, by ticket; payloads of the youngest may be in the journal only.
    steps: open steps, by number; rewound: whether some of them were committed before. retained:
    committed steps kept for a rewind. Payloads of rewound and retained steps are in the journal
    only. withdrawn: last attempt at each withdrawn step that is not planned again. resumed: the
    step after which the current generation resumed, None if it loaded no checkpoint. saved: the
    last step that a saved checkpoint covers; evicted: the last retained step that was evicted
    before that; -1 for none.
    producers: by name, the floor and the accepted numbers at or above it. ends: by name, the newest
    ended phase (0: none) and whether the stream has ended. given_ids, checksums, ended_groups (as
    in `GroupEnded`): oldest first. totals: as in `Decision`. dp_size: of the last generation, None
    if there was none. policy_step: the first step that trains with `policy_version`; None with it.
    group_size: as last set. cost, speeds: that plans were made with. schema: of all samples, None
    before it was decided; set_by: who decided. finished: the run is finished, and some peers were
    not sent that; was_finished: all were, and no DP rank has joined since.
    """

    entries: tuple[Entry, ...] = ()
    steps: "tuple[OpenStep, ...]" = ()
    rewound: bool = False
    retained: "tuple[OpenStep, ...]" = ()
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
