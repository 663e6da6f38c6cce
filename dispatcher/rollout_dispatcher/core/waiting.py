"""In words: whom the next step waits for. For operators and for producers that wait.

It says what lacks, and who could bring it: absent ranks, ranks that hang or have not committed,
producers of open groups, producers that have not ended a phase, or time that samples are given.
Bounded, however many there are of them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice

from rollout_dispatcher.core.admission.admission import Admission
from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.phases import Phases
from rollout_dispatcher.core.lifecycle import Lifecycle
from rollout_dispatcher.core.planning.timing import Timing
from rollout_dispatcher.core.producers.agreement import Agreement
from rollout_dispatcher.core.producers.producers import Producers
from rollout_dispatcher.core.ranks.standstill import Lockstep, Standstill
from rollout_dispatcher.core.steps.ledger import StepLedger
from rollout_dispatcher.ends import EndReason
from rollout_dispatcher.hints import harmless
from rollout_dispatcher.payload import Reference

#: Names that are said of each kind.
NAMED = 4


class Cause(StrEnum):
    """Of what kind it is that the next step waits for."""

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


#: Why nothing is planned any more.
_OVER = {
    EndReason.FINISHED: "the DP ranks have finished the run",
    EndReason.ENDED: "the stream has ended",
    EndReason.DRAINED: "the dispatcher shuts down",
}


@dataclass(frozen=True, slots=True)
class Reason:
    """Why no step is planned; text: for a person, on one line.

    anonymous: the same without the names that clients give to themselves and to groups, for
        whoever has shown no token; empty where `text` has none.
    """

    cause: Cause
    text: str
    anonymous: str = ""


class Waiting:
    """Looks at the parts of one run."""

    def __init__(
        self,
        *,
        ledger: StepLedger,
        buffer: SampleBuffer,
        admission: Admission,
        phases: Phases,
        timing: Timing,
        producers: Producers,
        agreement: Agreement,
        lockstep: Lockstep,
        lifecycle: Lifecycle,
    ) -> None:
        self._lifecycle = lifecycle
        self._ledger, self._buffer = ledger, buffer
        self._admission, self._phases, self._agreement = admission, phases, agreement
        self._timing, self._producers, self._lockstep = timing, producers, lockstep

    def explain(self, now: float) -> str:
        """One line, parts divided by semicolons; `nobody` if a step is on its way."""
        return "; ".join(reason.text for reason in self.reasons(now)) or "nobody"

    def reasons(self, now: float) -> Iterator[Reason]:
        """Everything that it waits for; none if a step is on its way."""
        for reason in self._found(now):
            yield replace(reason, text=harmless(reason.text))

    def _found(self, now: float) -> Iterator[Reason]:
        if self._lifecycle.drained:
            yield Reason(Cause.OVER, f"nothing, none comes: {_OVER[self._lifecycle.reason]}")
            return
        yield from self._ranks(now)
        yield from self._samples(now)
        if (pressed := self._admission.capacity.pressed) is not None:
            used = f"{pressed.held} of {pressed.capacity}"
            pushes = _counted(len(self._admission.held), "push waits", "pushes wait")
            yield Reason(Cause.CAP, f"{pushes} at the {pressed.cap} cap ({used})")
        if coming := self._admission.held.asked_samples:
            samples = _counted(coming, "sample is", "samples are")
            text = f"{samples} asked for again, of pushes that waited"
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
        elif (standstill := self._lockstep.standstill(now)) is not None:
            yield self._stands(standstill, now)
        elif ledger.wanted or missing or absent or left or finished:
            return
        elif silent := [at for at, rank in ledger.ranks.items() if not generation.agrees(rank)]:
            yield Reason(Cause.SILENT_RANKS, f"{_ranks(silent)} did not load the checkpoint yet")
        elif idle := [at for at, rank in ledger.ranks.items() if not rank.begun and len(steps)]:
            yield Reason(Cause.SILENT_RANKS, f"{_ranks(idle)} did not ask for a first step yet")
        elif len(steps):
            yield Reason(Cause.OPEN_STEPS, self._open_steps())

    def _stands(self, found: Standstill, now: float) -> Reason:
        usual = "" if found.usual is None else f", and a step usually takes {found.usual:.0f} s"
        stood = f"no DP rank has got on for {now - found.since:.0f} s{usual}"
        if found.hung:
            one = len(found.hung) == 1
            hang = f"{_ranks(found.hung)} {'hangs' if one else 'hang'} {found.where}"
            text = f"{hang}; the other DP ranks wait for {'it' if one else 'them'}: {stood}"
            return Reason(Cause.HUNG_RANKS, text)
        text = (
            f"all DP ranks stand still {found.where}: {stood}. A pause (evaluation, weight sync), "
            "or a hang where nothing tells them apart"
        )
        return Reason(Cause.PAUSED_RANKS, text)

    def _open_steps(self) -> str:
        """Whom the oldest one waits for; ranks train none whose samples they do not have."""
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
        shortfall, batch = self._phases.shortfall(), self._timing.config.batch
        if shortfall <= 0:
            if self._ledger.wanted:
                yield from self._window(now)
            return
        ready = f"{batch - shortfall} of {batch} {buffer.units} are ready"
        yield Reason(Cause.SAMPLES, ready)
        if not self._producers.num_there:
            yield Reason(Cause.PRODUCERS, "no producer is connected")
        if count := len(buffer.groups):
            oldest = next(iter(buffer.groups))
            of = _some(sorted(filter(None, oldest.contributors)), "producer") or "no connection"
            held = (
                f"{_counted(count, 'open group holds', 'open groups hold')} "
                f"{_counted(buffer.groups.samples, 'sample', 'samples')}; the oldest"
            )
            grown = f"has not grown for {now - oldest.grown:.0f} s"
            text = f"{held} is {oldest}, of {of}, and {grown}"
            yield Reason(Cause.OPEN_GROUPS, text, f"{held} {grown}")

    def _window(self, now: float) -> Iterator[Reason]:
        """A batch is there, and its plan may become better while nobody, or not for long, waits."""
        if self._phases.flushing:
            return
        config, since = self._timing.config, self._timing.hungry_since
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
        for end in self._agreement.pending(NAMED):
            what = "the end of the stream" if end is None else f"the end of the phase before {end}"
            if self._agreement.is_decided(end):
                yield Reason(Cause.ENDS, f"{what} waits for pushes that were held back before")
            elif waited := self._agreement.waits_for(end):
                counted = _counted(len(waited), "producer", "producers")
                text = f"{what} waits for {_some(waited, 'producer')}"
                yield Reason(Cause.ENDS, text, f"{what} waits for {counted}")
        if (more := self._agreement.num_pending - NAMED) > 0:
            yield Reason(Cause.ENDS, f"{more} more ends wait for these")


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _ranks(dp_ranks: Iterable[int]) -> str:
    return _some(map(str, sorted(dp_ranks)), "DP rank")


def _some(names: Iterable[str], kind: str) -> str:
    found = list(names)
    shown = ", ".join(islice(found, NAMED))
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return f"{kind}{'s' if len(found) > 1 else ''} {shown}{more}" if found else ""
