"""A recorded run as a trace in the Trace Event Format, which Perfetto and chrome://tracing open.

Tracks: `dispatcher` has a slice for each step from plan to commit, and instants for what went out
again; `DP rank k` has what it did: its micro-batches where their times were measured, each as
computing and as blocked in collectives, else the step as a whole, from when it began to its commit;
and waiting for a step. Counters show what is held. Times are microseconds from the first event.

Slices of one track lie side by side or within each other, as viewers drop what else there is: steps
of the dispatcher that overlap have tracks of their own; on a rank's, what begins before the one
before has ended is cut.

Measured micro-batches have lengths and no moments: they are laid end to end, from when the rank
began the step, so their order and lengths are true and gaps between them are not shown.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

from rollout_dispatcher.record.recording import RecordedStep, Recording, Waited

#: One thing that a viewer draws.
TraceEvent = dict[str, Any]

_DISPATCHER, _RANKS = 1, 2
#: Microseconds between slices that touch: rounded, they would cross, and viewers drop such.
_APART = 1.0
#: One of these, and a line of it.
_Track = tuple[int, int]


def trace_json(recording: Recording) -> Iterator[str]:
    """The document, in pieces: it may be large."""
    events = _events(recording)
    yield '{"displayTimeUnit":"ms","traceEvents":[\n'
    for at, event in enumerate(events):
        yield (",\n" if at else "") + json.dumps(event, separators=(",", ":"))
    yield "\n]}\n"


def _events(recording: Recording) -> Iterator[TraceEvent]:
    steps = sorted(recording.steps.values(), key=lambda step: (step.at, step.number))
    origin = _origin(recording, steps)
    ranks = range(max((step.dp_size for step in steps), default=0))
    yield from _names(ranks)
    yield from _plans(steps, origin)
    for rank in ranks:
        yield from _rank(rank, steps, recording.waits, origin)
    for state in recording.states:
        held = {"buffered": state.buffered, "ready": state.ready, "in flight": state.in_flight}
        yield _counter("samples", state.at - origin, held)
        yield _counter("pushes held back", state.at - origin, {"pushes": state.held_pushes})
    for at, version in recording.versions:
        yield _instant(f"policy version {version}", at - origin)


def _origin(recording: Recording, steps: list[RecordedStep]) -> float:
    times = [step.at for step in steps[:1]]
    times += [sample.at for sample in list(recording.samples.values())[:1]]
    times += [state.at for state in recording.states[:1]]
    times += [wait.at for wait in recording.waits]
    times += [at for at, _ in recording.versions[:1]]
    return min(times, default=0.0)


def _names(ranks: range) -> Iterator[TraceEvent]:
    """What the processes and the ranks' tracks are called, and their order."""
    yield _meta("process_name", _DISPATCHER, 0, {"name": "dispatcher"})
    yield _meta("process_name", _RANKS, 0, {"name": "DP ranks"})
    for rank in ranks:
        yield _meta("thread_name", _RANKS, rank + 1, {"name": f"DP rank {rank}"})
        yield _meta("thread_sort_index", _RANKS, rank + 1, {"sort_index": rank})


def _plans(steps: list[RecordedStep], origin: float) -> Iterator[TraceEvent]:
    """Steps in the order of their plans, each on the first track that is free."""
    free: list[float] = []
    for step in steps:
        track = next((at for at, since in enumerate(free) if since <= step.at), len(free))
        if track == len(free):
            free.append(step.at)
            name = {"name": f"steps {track + 1}"}
            yield _meta("thread_name", _DISPATCHER, track + 1, name)
        free[track] = step.at if step.committed is None else max(step.at, step.committed)
        yield from _plan(step, (_DISPATCHER, track + 1), origin)


def _plan(step: RecordedStep, track: _Track, origin: float) -> Iterator[TraceEvent]:
    """A step from its plan to its commit, and within it until it was released."""
    about = {
        "samples": len(step.tickets),
        "trigger": step.trigger,
        "attempt": step.attempt,
        "generation": step.generation,
        "eligible": step.eligible,
        "excess planned": step.excess,
        "excess fifo": step.fifo_excess,
        "excess lower bound": step.lower_bound_excess,
    }
    if step.committed is None or step.committed < step.at:
        yield _instant(f"step {step.number} planned", step.at - origin, about)
        return
    start, length = step.at - origin, step.committed - step.at
    yield _slice(f"step {step.number}", track, start, length, about)
    if step.released is not None and step.at <= step.released <= step.committed:
        released = step.released - step.at
        yield _slice("preparing", track, start, released)


def _rank(
    rank: int, steps: list[RecordedStep], waits: list[Waited], origin: float
) -> Iterator[TraceEvent]:
    """What one rank did, one after the other: steps, and waiting for them."""
    spans: list[tuple[float, float, RecordedStep | None]] = [
        (wait.at, wait.at + wait.seconds, None) for wait in waits if wait.rank == rank
    ]
    for step in steps:
        began, done = _time(step.taken, rank), _time(step.done, rank)
        if began is None:
            began = _time(step.delivered, rank)
        if began is not None and done is not None:
            spans.append((began, done, step))
    free = -math.inf
    for began, done, trained in sorted(spans, key=lambda span: span[:2]):
        start = max(began, free)
        if done < start:
            continue
        free = done
        if trained is None:
            yield _slice("waiting for data", (_RANKS, rank + 1), start - origin, done - start)
        else:
            yield from _trained(trained, rank, start - origin, done - start)


def _trained(step: RecordedStep, rank: int, start: float, seconds: float) -> Iterator[TraceEvent]:
    """What one rank did of a step."""
    about = {"planned cost": float(step.cost[rank].sum())}
    track = _RANKS, rank + 1
    yield _slice(f"step {step.number}", track, start, seconds, about)
    end, last = start, start + seconds
    for cost_key, times in step.measured.items():
        blocked = times.collective.get(rank) or []
        for index, busy in enumerate(times.busy.get(rank, [])):
            length = min(busy, last - end)
            if length <= 0:
                break
            told = {"pass": cost_key, "seconds": busy, "planned cost": _cost(step, rank, index)}
            yield _slice(f"micro-batch {index}", track, end, length, told)
            waited = min(blocked[index], length) if index < len(blocked) else 0.0
            if waited > 0:
                yield _slice("in collectives", track, end + length - waited, waited)
            end += length


def _cost(step: RecordedStep, rank: int, index: int) -> float | None:
    return float(step.cost[rank, index]) if index < step.cost.shape[1] else None


def _time(times: list[float], rank: int) -> float | None:
    """When a rank did something; None if that was not seen."""
    return times[rank] if rank < len(times) and not math.isnan(times[rank]) else None


def _slice(
    name: str,
    track: _Track,
    start: float,
    seconds: float,
    about: dict[str, Any] | None = None,
) -> TraceEvent:
    process, thread = track
    event = {
        "ph": "X", "name": name, "pid": process, "tid": thread,
        "ts": _micro(start), "dur": max(0.0, _micro(seconds) - _APART),
    }  # fmt: skip
    return event if about is None else event | {"args": about}


def _instant(name: str, at: float, about: dict[str, Any] | None = None) -> TraceEvent:
    event = {"ph": "i", "s": "p", "name": name, "pid": _DISPATCHER, "tid": 1, "ts": _micro(at)}
    return event if about is None else event | {"args": about}


def _counter(name: str, at: float, values: dict[str, int]) -> TraceEvent:
    return {"ph": "C", "name": name, "pid": _DISPATCHER, "tid": 0, "ts": _micro(at), "args": values}


def _meta(name: str, process: int, track: int, about: dict[str, Any]) -> TraceEvent:
    return {"ph": "M", "name": name, "pid": process, "tid": track, "args": about}


def _micro(seconds: float) -> float:
    """Microseconds, to the nanosecond."""
    return round(seconds * 1e6, 3)
