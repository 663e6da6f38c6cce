"""Why no step is planned, for people: operators, and producers that wait.

`Waiting` names the peers that block the next step: absent ranks, ranks that hang or have not
committed, producers of open groups, producers that have not ended a phase; or the wait for a fuller
window. The text is bounded, whatever the number of peers.

`StallDetector`: the DP ranks that hang are behind the others while no rank progresses.

Training ranks are in lockstep, so when one hangs the others soon stop as well, in a collective or
in `next()`, and all heartbeats continue. Ranks differ in their `Position` then: steps,
micro-batches handed out, collectives begun. Ranks that are all at the same position are paused
(evaluation, weight sync), or hang without a difference that is visible here.

Invariant: no rank is named while any rank progresses, while ranks are absent (another reason), or
while no rank holds a step.

`ProgressReport`: how far producers are ahead of the trainer; sent with every answer to a push, so
it is computed from counts that exist anyway.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.buffer.phases import NextStep
from rollout_dispatcher.core.effects import Advised, Effect
from rollout_dispatcher.core.steps.ledger import StepLedger
from rollout_dispatcher.core.steps.rank_state import Position
from rollout_dispatcher.core.steps.step import OpenStep
from rollout_dispatcher.ends import EndReason
from rollout_dispatcher.hints import harmless, name_some
from rollout_dispatcher.payload import Reference

if TYPE_CHECKING:
    from rollout_dispatcher.core.parts import Parts

#: Ranks stall when none has progressed for so many usual steps, from the first rank's start of a
#: step to the last one's commit: steps of one run differ by less.
USUAL_STEPS = 3
#: At least, in seconds: a checkpoint or a garbage collection is no hang.
LEAST_SECONDS = 30.0
#: Before the generation's first commit, as its first step compiles; torch's own default for
#: collectives that hang.
FIRST_SECONDS = 600.0
#: Steps whose median is the usual one.
REMEMBERED = 16


@dataclass(frozen=True, slots=True)
class Stall:
    """No DP rank progresses. hung: ranks behind all others; empty if all are at one position.

    since: time of the last progress. usual: seconds of a usual step; None if not known.
    positions: of every rank.
    """

    hung: tuple[int, ...]
    since: float
    usual: float | None
    positions: Mapping[int, Position]

    @property
    def where(self) -> str:
        """For people: what the others have done, and the hung ranks have not."""
        behind = min(self.positions.values())
        ahead = max(self.positions.values())
        if not self.hung:
            return f"at the same place of step {ahead.taken}"
        if behind.committed < ahead.committed:
            return f"before the commit of step {behind.committed + 1}"
        if behind.taken < ahead.taken:
            return f"before step {behind.taken + 1}"
        if behind.handed_out < ahead.handed_out:
            first = f"{behind.handed_out} of its micro-batches handed out"
            return f"in step {behind.taken}, {first}, and {ahead.handed_out} on others"
        return f"in step {behind.taken}, before a collective that others have begun"


class StallDetector:
    """Watches how far the DP ranks of the current generation get."""

    def __init__(self, ledger: StepLedger) -> None:
        self._ledger = ledger
        self._generation = 0
        self._positions: dict[int, Position] = {}
        self._progressed_at = 0.0
        self._taken: dict[int, float] = {}  # by step, when the first rank took it
        self._took: deque[float] = deque(maxlen=REMEMBERED)

    def joined(self, dp_rank: int, now: float) -> None:
        """A rank joined, maybe again."""
        self._positions.pop(dp_rank, None)
        self.on_progress(dp_rank, now)

    def on_progress(self, dp_rank: int, now: float) -> None:
        """A rank reported its position."""
        generation = self._ledger.generation
        if generation.number != self._generation:
            self._generation = generation.number
            for known in (self._positions, self._taken, self._took):
                known.clear()
        rank = generation.ranks.get(dp_rank)
        if rank is None or self._positions.get(dp_rank) == rank.position:
            return
        self._positions[dp_rank], self._progressed_at = rank.position, now
        if rank.taken > rank.committed:
            self._taken.setdefault(rank.taken, now)

    def committed(self, steps: Iterable[OpenStep], now: float) -> None:
        """Every rank has applied these steps."""
        for step in steps:
            if (began := self._taken.pop(step.number, None)) is not None:
                self._took.append(now - began)

    def stall(self, now: float) -> Stall | None:
        """The stall; None while any rank progresses, or waits for samples."""
        stood = now - self._progressed_at
        if stood < LEAST_SECONDS:  # called before every event
            return None
        ledger, ranks = self._ledger, self._ledger.ranks
        usual = median(self._took) if self._took else None
        limit = FIRST_SECONDS if usual is None else max(LEAST_SECONDS, USUAL_STEPS * usual)
        if (
            stood < limit
            or ledger.generation.failed is not None
            or len(ranks) < ledger.generation.dp_size
            or not all(rank.connected for rank in ranks.values())
            or not any(rank.taken > rank.committed for rank in ranks.values())
            or (ledger.has_room and ledger.hungry)
        ):
            return None
        positions = {dp_rank: rank.position for dp_rank, rank in sorted(ranks.items())}
        last, first = min(positions.values()), max(positions.values())
        hung = [at for at, position in positions.items() if position == last < first]
        return Stall(tuple(hung), self._progressed_at, usual, positions)


#: Versions by which the trainer's report may be later than its weights.
MOST_AHEAD = 1
AHEAD = (
    "samples have policy_version {}, and the trainer stands at {}: they count as fresh under "
    "--max-staleness, however old they are. Push the version that stream.set_policy_version() "
    "reports of the weights, and report it when workers get them"
)


class TrainerProgress(NamedTuple):
    """Where the trainer is, for producers.

    policy_version: last reported by DP rank 0. training_version: of the next step.
    expected_version: of the step that a sample pushed now is in, if samples go in order of arrival.
    All three are None before the first report. remaining: samples (or groups, as the batch is
    counted) that the soft caps still accept; 0 while pushes are blocked.
    """

    policy_version: int | None
    training_version: int | None
    expected_version: int | None
    remaining: int

    def staleness(self, oldest: int | None) -> int | None:
        """Staleness in the next step of samples whose oldest version is `oldest`."""
        if self.training_version is None or oldest is None:
            return None
        return max(0, self.training_version - oldest)


class ProgressReport:
    """The trainer's progress, for producers. batch: samples or groups of a step."""

    def __init__(self, parts: "Parts", *, batch: int) -> None:
        self._buffer, self._blocked, self._batch = parts.buffer, parts.blocked, batch
        self._freshness, self._steps = parts.freshness, parts.ledger.steps
        self._advised: set[str] = set()

    def now(self) -> TrainerProgress:
        """The present progress."""
        buffer, version, step = self._buffer, self._freshness.training_version, self._steps.next
        behind = NextStep(step.number + buffer.ready_units // self._batch, step.committed)
        remaining = 0 if self._blocked else buffer.remaining
        return TrainerProgress(self._freshness.reported, version(step), version(behind), remaining)

    def ahead(self, push: Push) -> list[Effect]:
        """Advise its producer, once a connection, if its versions are ahead of the trainer's."""
        version, producer = self.now().training_version, push.producer
        if version is None or producer in self._advised:
            return []
        newest = max((sample.judged_version or 0 for sample in push.samples), default=0)
        if newest <= version + MOST_AHEAD:
            return []
        self._advised.add(producer)
        return [Advised(AHEAD.format(newest, version), producer)]

    def forget(self, producer: str) -> None:
        """A producer's connection is gone."""
        self._advised.discard(producer)


#: Names listed of each kind.
NAMED = 4


class Cause(StrEnum):
    """What blocks the next step."""

    MISSING_RANKS = "missing-ranks"
    ABSENT_RANKS = "absent-ranks"
    LEFT_RANKS = "left-ranks"
    UNFINISHED_RANKS = "unfinished-ranks"
    SILENT_RANKS = "ranks-not-begun"
    FAILED_GENERATION = "failed-generation"
    HUNG_RANKS = "hung-ranks"
    PAUSED_RANKS = "paused-ranks"
    OPEN_STEPS = "open-steps"
    SAMPLES = "samples"
    PRODUCERS = "no-producers"
    OPEN_GROUPS = "open-groups"
    WINDOW = "window"
    CAP = "cap"
    RESENDS = "resends"
    ENDS = "ends"
    JOURNAL = "journal"
    OVER = "over"


#: Texts of a run that is over.
_OVER = {
    EndReason.FINISHED: "the DP ranks have finished the run",
    EndReason.ENDED: "the stream has ended",
    EndReason.DRAINED: "the dispatcher shuts down",
}


@dataclass(frozen=True, slots=True)
class Reason:
    """Why no step is planned; text: for a person, on one line.

    anonymous: the same without names of clients and groups, for requests without a token; empty
        if `text` has none.
    """

    cause: Cause
    text: str
    anonymous: str = ""


class Waiting:
    """Explains why no step is planned."""

    def __init__(self, parts: "Parts") -> None:
        self._lifecycle, self._stalls = parts.lifecycle, parts.stall_detector
        self._ledger, self._buffer = parts.ledger, parts.buffer
        self._admission, self._phases, self._all_ends = parts.admission, parts.phases, parts.ends
        self._planning, self._producers = parts.planning, parts.producers
        self._freshness, self._rank_time = parts.freshness, parts.rank_time

    def explain(self, now: float) -> str:
        """All reasons on one line, divided by semicolons; `nobody` if there is none."""
        return "; ".join(reason.text for reason in self.reasons(now)) or "nobody"

    def reasons(self, now: float) -> Iterator[Reason]:
        """Every reason; none if a step is on its way."""
        for reason in self._found(now):
            yield replace(reason, text=harmless(reason.text))

    def _found(self, now: float) -> Iterator[Reason]:
        if self._lifecycle.drained:
            yield Reason(Cause.OVER, f"no further step: {_OVER[self._lifecycle.reason]}")
            return
        yield from self._ranks(now)
        yield from self._samples(now)
        if (pressed := self._admission.capacity.blocking_cap) is not None:
            used = f"{pressed.held} of {pressed.capacity}"
            pushes = _counted(len(self._admission.blocked), "push waits", "pushes wait")
            yield Reason(Cause.CAP, f"{pushes} at the {pressed.cap} cap ({used})")
        if coming := self._admission.blocked.resending_samples:
            samples = _counted(coming, "sample is", "samples are")
            text = f"{samples} being resent, of pushes that were blocked"
            yield Reason(Cause.RESENDS, text)
        yield from self._ends()

    def _ranks(self, now: float) -> Iterator[Reason]:
        ledger = self._ledger
        generation, steps = ledger.generation, ledger.steps
        if missing := generation.missing:
            yield Reason(Cause.MISSING_RANKS, f"{_ranks(missing)} not joined yet")
        if absent := generation.absent:
            yield Reason(Cause.ABSENT_RANKS, f"{_ranks(absent)} lost the connection")
        if left := generation.left:
            yield Reason(Cause.LEFT_RANKS, f"{_ranks(left)} closed the stream")
        finished = [at for at, rank in ledger.ranks.items() if rank.finished is not None]
        if finished and not ledger.over:
            others = _ranks({*ledger.ranks} - {*finished})
            text = f"{_ranks(finished)} finished the run, and {others} did not yet"
            yield Reason(Cause.UNFINISHED_RANKS, text)
        if generation.failed is not None:
            failed = f"generation {generation.number} has failed"
            yield Reason(Cause.FAILED_GENERATION, f"{failed}: {generation.failed}", failed)
        elif (stall := self._stalls.stall(now)) is not None:
            yield self._stalled(stall, now)
        elif ledger.has_room or missing or absent or left or finished:
            return
        elif silent := [at for at, rank in ledger.ranks.items() if not generation.agrees(rank)]:
            yield Reason(Cause.SILENT_RANKS, f"{_ranks(silent)} did not load the checkpoint yet")
        elif idle := [at for at, rank in ledger.ranks.items() if not rank.begun and len(steps)]:
            yield Reason(Cause.SILENT_RANKS, f"{_ranks(idle)} did not ask for a first step yet")
        elif len(steps):
            yield Reason(Cause.OPEN_STEPS, self._open_steps())

    def _stalled(self, found: Stall, now: float) -> Reason:
        usual = ""
        if found.usual is not None:
            digits = ".0f" if found.usual >= 1 else ".2g"
            usual = f", and a step usually takes {found.usual:{digits}} s"
        stood = f"no DP rank has progressed for {now - found.since:.0f} s{usual}"
        if found.hung:
            one = len(found.hung) == 1
            hang = f"{_ranks(found.hung)} {'hangs' if one else 'hang'} {found.where}"
            text = f"{hang}; the other DP ranks wait for {'it' if one else 'them'}: {stood}"
            return Reason(Cause.HUNG_RANKS, text)
        text = (
            f"all DP ranks stand still {found.where}: {stood}. A pause (evaluation, weight sync), "
            "or a hang in which no rank is behind the others"
        )
        return Reason(Cause.PAUSED_RANKS, text)

    def _open_steps(self) -> str:
        """Which ranks the oldest open step waits for."""
        ranks, steps = self._ledger.ranks, self._ledger.steps
        first, counted = min(steps), _counted(len(steps), "open step", "open steps")
        fetching = [at for at, rank in ranks.items() if rank.prepared < first]
        if fetching and any(isinstance(one.payload, Reference) for one in steps[first].samples()):
            return (
                f"{counted}: step {first} is not prepared by {_ranks(fetching)}, which need its "
                "samples from payload stores"
            )
        behind = [at for at, rank in ranks.items() if rank.committed < first]
        return f"{counted}: step {first} is not committed by {_ranks(behind)}"

    def _samples(self, now: float) -> Iterator[Reason]:
        buffer = self._buffer
        shortfall, batch = self._phases.units_short(), self._planning.trigger.batch
        if shortfall <= 0:
            if self._ledger.has_room:
                yield from self._window(now)
            return
        ready = f"{batch - shortfall} of {batch} {buffer.units} are ready"
        oldest = self._freshness.oldest(self._ledger.steps.next)
        if (stale := self._rank_time.stale_dropped) and oldest is not None:
            ready += (
                f", and {_counted(stale, 'sample was', 'samples were')} dropped as stale since the "
                f"last step was planned: --max-staleness asks for policy version {oldest} or newer"
            )
        yield Reason(Cause.SAMPLES, ready)
        if not self._producers.num_there:
            yield Reason(Cause.PRODUCERS, "no producer is connected")
        if count := len(buffer.groups):
            first = next(iter(buffer.groups))
            names = sorted(filter(None, first.contributors))
            of = name_some(names, "producer", NAMED) or "no connection"
            held = (
                f"{_counted(count, 'open group holds', 'open groups hold')} "
                f"{_counted(buffer.groups.samples, 'sample', 'samples')}; the oldest"
            )
            grown = f"has not grown for {now - first.grown:.0f} s"
            text = f"{held} is {first}, of {of}, and {grown}"
            yield Reason(Cause.OPEN_GROUPS, text, f"{held} {grown}")

    def _window(self, now: float) -> Iterator[Reason]:
        """A batch is ready, and a fuller window may improve its plan while no rank waits long."""
        if self._phases.flushing:
            return
        config, since = self._planning.trigger, self._planning.hungry_since
        ready, units = self._phases.count(config.window), self._buffer.units
        if ready >= config.window:
            return
        waited = "no rank waits yet"
        if since is not None:
            waited = f"ranks wait for {now - since:.1f} of --max-wait {config.max_wait:g} s"
        yield Reason(
            Cause.WINDOW,
            f"{ready} of {config.window} {units} of the window are ready, and {waited}",
        )

    def _ends(self) -> Iterator[Reason]:
        for end in self._all_ends.pending(NAMED):
            what = "the end of the stream" if end is None else f"the end of the phase before {end}"
            if self._all_ends.is_decided(end):
                yield Reason(Cause.ENDS, f"{what} waits for pushes that were blocked before it")
            elif waited := self._all_ends.waits_for(end):
                counted = _counted(len(waited), "producer", "producers")
                text = f"{what} waits for {name_some(waited, 'producer', NAMED)}"
                yield Reason(Cause.ENDS, text, f"{what} waits for {counted}")
        if (more := self._all_ends.num_pending - NAMED) > 0:
            yield Reason(Cause.ENDS, f"{more} more ends wait for these")


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _ranks(dp_ranks: Iterable[int]) -> str:
    return name_some(sorted(dp_ranks), "DP rank", NAMED)
