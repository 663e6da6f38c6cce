"""In words: whom the next step waits for. For operators and for producers that wait.

It says what lacks, and who could bring it: absent ranks, ranks that have not committed, producers
of open groups, producers that have not ended a phase. Bounded, however many there are of them.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

from rollout_dispatcher.core.admission.admission import Admission
from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.phases import Phases
from rollout_dispatcher.core.producers.agreement import Agreement
from rollout_dispatcher.core.steps.ledger import StepLedger

#: Names that are said of each kind.
NAMED = 4


class Waiting:
    """Looks at the parts of one run. batch: what a step needs, in samples or groups."""

    def __init__(
        self,
        batch: int,
        *,
        ledger: StepLedger,
        buffer: SampleBuffer,
        admission: Admission,
        phases: Phases,
        agreement: Agreement,
    ) -> None:
        self._batch, self._ledger, self._buffer = batch, ledger, buffer
        self._admission, self._phases, self._agreement = admission, phases, agreement

    def explain(self, now: float) -> str:
        """One line, parts divided by semicolons; `nobody` if a step is on its way."""
        return "; ".join(self._parts(now)) or "nobody"

    def _parts(self, now: float) -> Iterator[str]:
        yield from self._ranks()
        yield from self._samples(now)
        if (pressed := self._admission.capacity.pressed) is not None:
            used = f"{pressed.held} of {pressed.capacity}"
            yield f"{len(self._admission.held)} pushes wait at the {pressed.cap} cap ({used})"
        if coming := self._admission.held.asked_samples:
            yield f"{coming} samples of pushes that waited are asked for again"
        for end in self._agreement.pending(NAMED):
            what = "the end of the stream" if end is None else f"the end of the phase before {end}"
            if self._agreement.is_decided(end):
                yield f"{what} waits for pushes that were held back before"
            elif waited := self._agreement.waits_for(end):
                yield f"{what} waits for {_some(waited, 'producer')}"
        if (more := self._agreement.num_pending - NAMED) > 0:
            yield f"{more} more ends wait for these"

    def _ranks(self) -> Iterator[str]:
        ledger = self._ledger
        generation, steps = ledger.generation, ledger.steps
        if missing := sorted(set(range(generation.dp_size)) - set(ledger.ranks)):
            yield f"{_some(map(str, missing), 'DP rank')} not joined yet"
        if absent := generation.absent:
            yield f"{_some(map(str, absent), 'DP rank')} lost the connection"
        if generation.failed is not None:
            yield f"generation {generation.number} has failed: {generation.failed}"
        elif not ledger.wanted and not missing and not absent and len(steps):
            behind = [str(at) for at, rank in ledger.ranks.items() if rank.committed < min(steps)]
            who = _some(behind, "DP rank")
            yield f"{len(steps)} open steps: step {min(steps)} is not committed by {who}"

    def _samples(self, now: float) -> Iterator[str]:
        buffer = self._buffer
        shortfall = self._phases.shortfall()
        if shortfall <= 0:
            return
        yield f"{self._batch - shortfall} of {self._batch} {buffer.units} are ready"
        if apart := buffer.lots.apart:
            yield (
                f"{sum(lot.samples for lot in apart)} samples have other fields, and wait apart: "
                f"the first step decides which fields samples have, unless --fields does"
            )
        if count := len(buffer.groups):
            oldest = next(iter(buffer.groups))
            of = _some(sorted(filter(None, oldest.contributors)), "producer") or "no connection"
            yield (
                f"{count} open groups hold {buffer.groups.samples} samples; the oldest is "
                f"{oldest}, of {of}, and has not grown for {now - oldest.grown:.0f} s"
            )


def _some(names: Iterable[str], kind: str) -> str:
    found = list(names)
    shown = ", ".join(islice(found, NAMED))
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return f"{kind}{'s' if len(found) > 1 else ''} {shown}{more}" if found else ""
