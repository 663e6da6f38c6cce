"""A recorded run as a trace in the Trace Event Format, which Perfetto and chrome://tracing open.

Tracks: `dispatcher` has a slice for each step from plan to commit, and instants for what went out
again; `DP rank k` has what it did: its micro-batches where their times were measured, each as
computing and as blocked in collectives, else the step as a whole, from when it began to its commit;
and waiting for a step. Counters show what is held. Times are microseconds from the first event.

Measured micro-batches have lengths and no moments: they are laid end to end, from when the rank
began the step, so their order and lengths are true and gaps between them are not shown.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

from rollout_dispatcher.record.recording import RecordedStep, Recording

#: One thing that a viewer draws.
TraceEvent = dict[str, Any]

_DISPATCHER, _RANKS = 1, 2
#: Microseconds between slices that touch: rounded, they would cross, and viewers drop such.
_APART = 1.0
#: One of these, and a line of it.
_Track = tuple[int, int]
#: Tracks of the dispatcher's process: steps overlap, so they take turns.
_STEP_TRACKS = 4


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
    yield from _names(steps)
    for turn, step in enumerate(steps):
        yield from _plan(step, turn, origin)
        for rank in range(step.dp_size):
            yield from _rank(step, rank, origin)
    for wait in recording.waits:
        track = _RANKS, wait.rank + 1
        yield _slice("waiting for data", track, wait.at - origin, wait.seconds)
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


def _names(steps: list[RecordedStep]) -> Iterator[TraceEvent]:
    """What the tracks are called, and their order."""
    yield _meta("process_name", _DISPATCHER, 0, {"name": "dispatcher"})
    yield _meta("process_name", _RANKS, 0, {"name": "DP ranks"})
    for track in range(_STEP_TRACKS):
        yield _meta("thread_name", _DISPATCHER, track + 1, {"name": f"steps {track + 1}"})
    for rank in range(max((step.dp_size for step in steps), default=0)):
        yield _meta("thread_name", _RANKS, rank + 1, {"name": f"DP rank {rank}"})
        yield _meta("thread_sort_index", _RANKS, rank + 1, {"sort_index": rank})


def _plan(step: RecordedStep, turn: int, origin: float) -> Iterator[TraceEvent]:
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
    track = _DISPATCHER, turn % _STEP_TRACKS + 1
    if step.committed is None:
        yield _instant(f"step {step.number} planned", step.at - origin, about)
        return
    start, length = step.at - origin, step.committed - step.at
    yield _slice(f"step {step.number}", track, start, length, about)
    if step.released is not None and step.at <= step.released <= step.committed:
        released = step.released - step.at
        yield _slice("preparing", track, start, released)


def _rank(step: RecordedStep, rank: int, origin: float) -> Iterator[TraceEvent]:
    """What one rank did of a step, from when it began, or else was given, to its commit."""
    began, done = _time(step.taken, rank), _time(step.done, rank)
    if began is None:
        began = _time(step.delivered, rank)
    if began is None or done is None or done < began:
        return
    about = {"planned cost": float(step.cost[rank].sum())}
    track, start = (_RANKS, rank + 1), began - origin
    yield _slice(f"step {step.number}", track, start, done - began, about)
    end = start
    for cost_key, times in step.measured.items():
        blocked = times.collective.get(rank) or []
        for index, busy in enumerate(times.busy.get(rank, [])):
            length = min(busy, start + done - began - end)
            if length <= 0:
                break
            told = {"pass": cost_key, "seconds": busy, "planned cost": _cost(step, rank, index)}
            name = f"micro-batch {index}"
            yield _slice(name, track, end, length, told)
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
