"""A recorded run as a trace in the Trace Event Format, which Perfetto and chrome://tracing open.

Tracks: `dispatcher` has a slice for each step from plan to commit; `DP rank k` has what it did: its
micro-batches where their times were measured, each as computing and as blocked in collectives, else
the step as a whole, from when it began to its commit; and waiting for a step. Counters show what is
held. Times are microseconds from the first event.

Slices of one track lie side by side or within each other, as viewers drop what else there is: steps
of the dispatcher that overlap have tracks of their own; on a rank's, what begins before the one
before has ended is cut. Measured micro-batches have lengths and no moments: they are laid end to
end, from when the rank began the step, so gaps between them are not shown.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

from rollout_dispatcher.record.recording import RecordedStep, Recording

#: One thing that a viewer draws.
TraceEvent = dict[str, Any]

_DISPATCHER, _RANKS = 1, 2
#: Seconds between slices that touch: rounded, they would cross, and viewers drop such.
_APART = 1e-6


def trace_json(recording: Recording) -> Iterator[str]:
    """The document, in pieces: it may be large."""
    yield '{"displayTimeUnit":"ms","traceEvents":[\n'
    for at, event in enumerate(_events(recording)):
        yield (",\n" if at else "") + json.dumps(event, separators=(",", ":"))
    yield "\n]}\n"


def _events(recording: Recording) -> Iterator[TraceEvent]:
    steps = sorted(recording.steps.values(), key=lambda step: (step.at, step.number))
    first = [step.at for step in steps[:1]]
    first += [each.at for each in recording.samples.values()]
    first += [state.at for state in recording.states[:1]]
    first += [wait.at for wait in recording.waits] + [at for at, _ in recording.versions[:1]]
    origin = min(first, default=0.0)
    yield _meta("process_name", (_DISPATCHER, 0), name="dispatcher")
    yield _meta("process_name", (_RANKS, 0), name="DP ranks")
    yield from _plans(steps, origin)
    for rank in range(max((step.dp_size for step in steps), default=0)):
        track = _RANKS, rank + 1
        yield _meta("thread_name", track, name=f"DP rank {rank}")
        yield _meta("thread_sort_index", track, sort_index=rank)
        waits = [(at.at, at.at + at.seconds, None) for at in recording.waits if at.rank == rank]
        yield from _rank(rank, steps, waits, origin)
    for state in recording.states:
        at = state.at - origin
        held = {"buffered": state.buffered, "ready": state.ready, "in flight": state.in_flight}
        yield _event("C", "samples", (_DISPATCHER, 0), at, held)
        held = {"pushes": state.held_pushes}
        yield _event("C", "pushes held back", (_DISPATCHER, 0), at, held)
    for at, version in recording.versions:
        yield _event("i", f"policy version {version}", (_DISPATCHER, 1), at - origin, s="p")


def _plans(steps: list[RecordedStep], origin: float) -> Iterator[TraceEvent]:
    """Steps in the order of their plans, each from plan to commit on the first track that is free,
    and within it until it was released.
    """
    free: list[float] = []
    for step in steps:
        at = next((at for at, since in enumerate(free) if since <= step.at), len(free))
        track = _DISPATCHER, at + 1
        if at == len(free):
            free.append(step.at)
            yield _meta("thread_name", track, name=f"steps {at + 1}")
        about = {
            "samples": len(step.tickets), "trigger": step.trigger, "attempt": step.attempt,
            "generation": step.generation, "eligible": step.eligible,
            "excess planned": step.excess, "excess fifo": step.fifo_excess,
            "excess lower bound": step.lower_bound_excess,
        }  # fmt: skip
        start = step.at - origin
        if step.committed is None or step.committed < step.at:
            yield _event("i", f"step {step.number} planned", (_DISPATCHER, 1), start, about, s="p")
            continue
        free[at] = step.committed
        yield _slice(f"step {step.number}", track, start, step.committed - step.at, about)
        if step.released is not None and step.at <= step.released <= step.committed:
            yield _slice("preparing", track, start, step.released - step.at, {})


def _rank(
    rank: int,
    steps: list[RecordedStep],
    waits: list[tuple[float, float, None]],
    origin: float,
) -> Iterator[TraceEvent]:
    """What one rank did, one after the other: steps, and waiting for them."""
    spans: list[tuple[float, float, RecordedStep | None]] = [*waits]
    for step in steps:
        began, given, done = (_time(each, rank) for each in (step.taken, step.delivered, step.done))
        began = given if math.isnan(began) else began
        if not math.isnan(began + done):
            spans.append((began, done, step))
    free = -math.inf
    for began, done, trained in sorted(spans, key=lambda span: span[:2]):
        start, track = max(began, free), (_RANKS, rank + 1)
        if done < start:
            continue
        free = done
        if trained is None:
            yield _slice("waiting for data", track, start - origin, done - start, {})
        else:
            yield from _trained(trained, rank, start - origin, done - start)


def _trained(step: RecordedStep, rank: int, start: float, seconds: float) -> Iterator[TraceEvent]:
    """What one rank did of a step."""
    costs, track = step.cost[rank].tolist(), (_RANKS, rank + 1)
    yield _slice(f"step {step.number}", track, start, seconds, {"planned cost": sum(costs)})
    end, last = start, start + seconds
    for cost_key, times in step.measured.items():
        blocked = times.collective.get(rank) or []
        for index, busy in enumerate(times.busy.get(rank, [])):
            length = min(busy, last - end)
            if length <= 0:
                break
            cost = costs[index] if index < len(costs) else None
            about = {"pass": cost_key, "seconds": busy, "planned cost": cost}
            yield _slice(f"micro-batch {index}", track, end, length, about)
            waited = min(blocked[index], length) if index < len(blocked) else 0.0
            if waited > 0:
                yield _slice("in collectives", track, end + length - waited, waited, {})
            end += length


def _time(times: list[float], rank: int) -> float:
    """When a rank did something; nan if that was not seen."""
    return times[rank] if rank < len(times) else math.nan


def _slice(
    name: str, track: tuple[int, int], start: float, seconds: float, about: TraceEvent
) -> TraceEvent:
    return _event("X", name, track, start, about, dur=_micro(max(0.0, seconds - _APART)))


def _meta(kind: str, track: tuple[int, int], **about: object) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": track[0], "tid": track[1], "args": about}


def _event(
    kind: str, name: str, track: tuple[int, int], at: float, about: TraceEvent | None = None,
    **more: object,
) -> TraceEvent:  # fmt: skip
    event = {"ph": kind, "name": name, "pid": track[0], "tid": track[1], "ts": _micro(at), **more}
    return event | {"args": about} if about else event


def _micro(seconds: float) -> float:
    """Microseconds, to the nanosecond."""
    return round(seconds * 1e6, 3)
