"""In words: whom the next step waits for. For operators and for producers that wait.

It says what lacks, and who could bring it: absent ranks, ranks that have not committed, producers
of open groups, producers that have not ended a phase. Bounded, however many there are of them.
"""

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from rollout_dispatcher.core.producers.agreement import Agreement

if TYPE_CHECKING:
    from rollout_dispatcher.core.dispatch import Dispatch

#: Names that are said of each kind.
NAMED = 4


def explain(core: "Dispatch", agreement: Agreement, now: float) -> str:
    """One line, parts divided by semicolons; `nobody` if a step is on its way."""
    return "; ".join(_parts(core, agreement, now)) or "nobody"


def _parts(core: "Dispatch", agreement: Agreement, now: float) -> Iterator[str]:
    yield from _ranks(core)
    yield from _samples(core, now)
    if (pressed := core.admission.pressed) is not None:
        used = f"{pressed.held} of {pressed.capacity}"
        yield f"{core.admission.num_held} pushes wait at the {pressed.cap} cap ({used})"
    if coming := core.admission.held.asked_samples:
        yield f"{coming} samples of pushes that waited are asked for again"
    for end in agreement.pending:
        what = "the end of the stream" if end is None else f"the end of the phase before {end}"
        if agreement.is_decided(end):
            yield f"{what} waits for pushes that were held back before"
        elif waited := agreement.waits_for(end):
            yield f"{what} waits for {_some(waited, 'producer')}"


def _ranks(core: "Dispatch") -> Iterator[str]:
    ledger = core.ledger
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


def _samples(core: "Dispatch", now: float) -> Iterator[str]:
    batch = core.config.trigger.batch
    lacking = core.freshness.lacking(core.buffer, batch)
    if lacking <= 0:
        return
    unit = "groups" if core.config.by_groups else "samples"
    yield f"{batch - lacking} of {batch} {unit} are ready"
    if count := len(core.buffer.groups):
        oldest = next(iter(core.buffer.groups))
        of = _some(sorted(filter(None, oldest.contributors)), "producer") or "no connection"
        yield (
            f"{count} open groups hold {core.buffer.groups.samples} samples; the oldest is "
            f"{oldest}, of {of}, and has not grown for {now - oldest.grown:.0f} s"
        )


def _some(names: "Iterator[str] | list[str] | map[str]", kind: str) -> str:
    found = list(names)
    shown = ", ".join(islice(found, NAMED))
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return f"{kind}{'s' if len(found) > 1 else ''} {shown}{more}" if found else ""
