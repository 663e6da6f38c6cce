"""A recorded run in memory: its samples, and each step's plan and times on each rank.

Times are seconds since 1970. Invariants: run and ticket identify a sample, run and number a step;
of several plans of a step the last one counts.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rollout_dispatcher.core.measuring.times import Pass
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.record.reader import Header, Reader
from rollout_dispatcher.record.segments import Event
from rollout_planner.types import FloatArray, IntArray, Sync, even_time, straggler_excess

#: Run and number, or run and ticket.
Key = tuple[str, int]


class RecordedSample(NamedTuple):
    """An accepted sample. group: equal for members of one group in one process, None for none."""

    run: str
    ticket: int
    at: float
    tokens: int
    loss_tokens: int
    group: str | None
    version: int | None


@dataclass(slots=True)
class RecordedStep:
    """One step. micro_batches: tickets by DP rank and micro-batch; skips: in that order, flat.

    cost: float64[R, M], as planned, and slowness, float64[R], of ranks in the plan; attempt: how
    often it was planned. eligible: samples that the plan could choose from. staleness: in versions,
    of the samples where it is known. cp_sizes: ranks that train each micro-batch together; None: 1.
    taken, done: when each rank began to train, and committed; nan where that is not recorded.
    measured: by pass.
    """

    run: str
    number: int
    at: float
    attempt: int
    generation: int
    trigger: str
    eligible: int
    micro_batches: list[list[list[int]]]
    skips: list[int]
    staleness: list[int]
    cost: FloatArray
    slowness: FloatArray
    fifo_excess: float
    fifo_imbalance: float
    lower_bound: float
    sync: Sync
    pipeline_stages: int
    window_multiple: float = 1.0
    cp_sizes: list[list[int]] | None = None
    released: float | None = None
    committed: float | None = None
    taken: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)
    measured: dict[str, Pass] = field(default_factory=dict)

    @property
    def tickets(self) -> list[int]:
        """Tickets of all its samples, rank by rank."""
        return [ticket for rank in self.micro_batches for part in rank for ticket in part]

    @property
    def excess(self) -> float:
        """Straggler excess, as planned."""
        return straggler_excess(self.cost, self.sync, self.pipeline_stages)

    @property
    def lower_bound_excess(self) -> float:
        """Lower bound of the excess of any split of its samples."""
        even = even_time(self.cost, self.pipeline_stages)
        return max(0.0, self.lower_bound / even - 1) if even else 0.0

    @property
    def dp_size(self) -> int:
        """Number of DP ranks."""
        return len(self.micro_batches)


@dataclass(frozen=True, slots=True)
class Waited:
    """A rank's training loop waited for a step, from `at` for `seconds`."""

    at: float
    rank: int
    seconds: float


class Accepted(NamedTuple):
    """Samples of one event. first: ticket; the others follow. version: of all, or of each."""

    header: Header
    first: int
    at: FloatArray
    tokens: IntArray
    loss_tokens: IntArray
    group: IntArray
    version: int | list[int | None] | None

    def samples(self) -> Iterator[RecordedSample]:
        """The samples, in order of tickets."""
        written = self.version if isinstance(self.version, list) else repeat(self.version)
        columns = zip(
            self.at.tolist(), self.tokens.tolist(), self.loss_tokens.tolist(),
            self.group.tolist(), written, strict=False,
        )  # fmt: skip
        for ticket, (at, tokens, loss_tokens, group, version) in enumerate(columns, self.first):
            name = None if group < 0 else f"{self.header.process}-{group}"
            yield RecordedSample(self.header.run, ticket, at, tokens, loss_tokens, name, version)


@dataclass
class Recording:
    """A recorded run. dropped: samples by reason. settings: by process, the options that changed
    while it served. rank_time: by process, seconds of DP ranks by cause. lost: events that were not
    written. notes: on damage of the record.
    """

    name: str
    header: Header
    accepted: list[Accepted] = field(default_factory=list)
    steps: dict[Key, RecordedStep] = field(default_factory=dict)
    waits: list[Waited] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    redelivered: Counter[str] = field(default_factory=Counter)
    processes: dict[str, Header] = field(default_factory=dict)
    settings: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    rank_time: dict[str, Mapping[str, float]] = field(default_factory=dict)
    lost: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def config(self) -> Mapping[str, Any]:
        """The options of the last process, as they were in force last."""
        return {**self.header.config, **self.settings.get(self.header.process, {})}

    @cached_property
    def samples(self) -> dict[Key, RecordedSample]:
        """Every accepted sample; built at the first use, as a day has millions."""
        return {(one.run, one.ticket): one for event in self.accepted for one in event.samples()}

    def trained(self) -> list[RecordedStep]:
        """Committed steps of which all samples are known, in order."""
        found = [step for step in self.steps.values() if step.committed is not None]
        found.sort(key=lambda step: (step.at, step.number))
        return [step for step in found if self._came_in(step) is not None]

    def _came_in(self, step: RecordedStep) -> int | None:
        """Index in `accepted` of its first sample; None if a sample is missing."""
        if step.run not in self._tickets:
            return None
        places, first, end = self._tickets[step.run]
        tickets = np.array(step.tickets, dtype=np.int64)
        at = np.searchsorted(first, tickets, side="right") - 1
        if not len(tickets) or at.min() < 0 or (tickets >= end[at]).any():
            return None
        return int(places[at].min())

    @cached_property
    def _tickets(self) -> dict[str, tuple[IntArray, IntArray, IntArray]]:
        """By run, in order of tickets: index in `accepted`, first ticket, end of tickets."""
        found: dict[str, list[tuple[int, int, int]]] = {}
        for place, event in enumerate(self.accepted):
            row = event.first, event.first + len(event.tokens), place
            found.setdefault(event.header.run, []).append(row)
        columns = {run: np.array(sorted(rows)).T for run, rows in found.items()}
        return {run: (place, first, end) for run, (first, end, place) in columns.items()}

    def keep_last(self, count: int) -> int:
        """Keep the last `count` trained steps, and all samples from their first one on.

        Returns the number of steps removed.
        """
        steps = self.trained()
        if len(steps) <= count:
            return 0
        kept = steps[-count:]
        places = [place for step in kept if (place := self._came_in(step)) is not None]
        self.accepted = self.accepted[min(places) :]
        self.__dict__.pop("_tickets")
        keys = {(step.run, ticket) for step in kept for ticket in step.tickets}
        since = min(self.samples[key].at for key in keys)
        self.samples = {key: each for key, each in self.samples.items() if each.at >= since}
        self.steps = {(step.run, step.number): step for step in kept}
        return len(steps) - count

    # -- one method for each event --------------------------------------------------------

    def on_accepted(self, header: Header, event: Event) -> None:
        tokens = np.array(event["tokens"], dtype=np.int64)
        loss = np.array(event["loss"], dtype=np.int64)
        group = np.array(event.get("group", [-1] * len(tokens)), dtype=np.int64)
        times, counts = np.array(event["pushes"], dtype=np.float64).reshape(-1, 2).T
        at = header.unix + np.repeat(times, counts.astype(np.int64))
        version = event.get("version")
        lengths = {len(at), len(tokens), len(loss), len(group)}
        if isinstance(version, list):
            lengths.add(len(version))
        if len(lengths) > 1:
            raise ValueError("its columns differ in length")
        self.accepted.append(Accepted(header, event["first"], at, tokens, loss, group, version))

    def on_dropped(self, _: Header, event: Event) -> None:
        self.dropped[event["reason"]] += len(event["tickets"])

    def on_planned(self, header: Header, event: Event) -> None:
        key = header.run, event["step"]
        first = None if "trigger" in event else self.steps.get(key)
        tickets = iter(event["first"] + ticket for ticket in event["tickets"])
        stale = event.get("staleness", [])
        self.steps[key] = RecordedStep(
            *key,
            at=header.unix + event["at"] if first is None else first.at,
            attempt=event["attempt"],
            generation=event["generation"],
            trigger=event.get("trigger", "unknown") if first is None else first.trigger,
            eligible=event.get("eligible", 0) if first is None else first.eligible,
            micro_batches=[[_some(tickets, count) for count in rank] for rank in event["sizes"]],
            skips=event.get("skips", [0] * len(event["tickets"])),
            staleness=stale if isinstance(stale, list) else [stale] * len(event["tickets"]),
            cost=np.array(event["cost"], dtype=np.float64),
            slowness=np.array(event.get("slowness", np.ones(len(event["cost"])))),
            **{name: event[name] for name in ("fifo_excess", "fifo_imbalance", "lower_bound")},
            sync=Sync(header.config["sync"]),
            pipeline_stages=header.config.get("pipeline_stages", 1),
            window_multiple=float(self.config.get("window", 1.0)),
            cp_sizes=event.get("cp_sizes"),
        )

    def on_withdrawn(self, header: Header, event: Event) -> None:
        self.steps.pop((header.run, event["step"]), None)

    def on_released(self, header: Header, event: Event) -> None:
        step = self.steps.get((header.run, event["step"]))
        if step is not None and step.released is None:
            step.released = header.unix + event["at"]

    def on_committed(self, header: Header, event: Event) -> None:
        if (step := self.steps.get((header.run, event["step"]))) is None:
            return
        step.committed = header.unix + event["at"]
        for name in ("taken", "done"):
            times = [float("nan") if at is None else header.unix + at for at in event.get(name, [])]
            setattr(step, name, times)

    def on_measured(self, header: Header, event: Event) -> None:
        if (step := self.steps.get((header.run, event["step"]))) is None:
            return
        found = step.measured.setdefault(event["cost_key"], Pass())
        columns = zip(event["ranks"], event["busy"], event["collective"], strict=True)
        ranks, micro_batches = step.cost.shape
        for rank, busy, collective in columns:
            if rank < ranks and len(busy) == micro_batches:
                found.report(rank, busy, collective, event.get("why", ""))

    def on_waited(self, header: Header, event: Event) -> None:
        columns = zip(event["ranks"], event["since"], event["seconds"], strict=True)
        for rank, since, seconds in columns:
            self.waits.append(Waited(header.unix + since, rank, seconds))

    def on_redelivered(self, header: Header, event: Event) -> None:
        self.redelivered[event["reason"]] += 1
        step = self.steps.get((header.run, event["step"]))
        if step is not None and event["reason"] != "reconnect":
            step.released = step.committed = None
            step.measured.clear()

    def on_settings(self, header: Header, event: Event) -> None:
        self.settings[header.process] = event["config"]

    def on_state(self, header: Header, event: Event) -> None:
        self.rank_time[header.process] = event.get("rank_time", {})

    def on_lost(self, _: Header, event: Event) -> None:
        self.lost += event["events"]


def _some(tickets: Iterator[int], count: int) -> list[int]:
    """The next `count` tickets. Raises ValueError if there are fewer."""
    found = list(islice(tickets, count))
    if len(found) < count:
        raise ValueError("it has fewer tickets than its micro-batches have samples")
    return found


def load_recording(
    directory: Path,
    run: str | None = None,
    progress: Callable[[float], None] = lambda _share: None,
) -> Recording:
    """Read a directory; run: this run alone. Raises ConfigError.

    progress: called with the share of the bytes that is read.
    """
    reader = Reader(directory, progress)
    recording: Recording | None = None
    seen: dict[str, None] = {}
    for header, event in reader.events():
        seen[header.run] = None
        if run is not None and header.run != run:
            continue
        if recording is None:
            recording = Recording(directory.resolve().name, header)
        recording.header = header
        recording.processes[header.process] = header
        handle = getattr(recording, f"on_{event['event']}", None)
        if handle is not None:  # else the event is of a later release, or of no use here
            try:
                handle(header, event)
            except (KeyError, TypeError, ValueError, IndexError) as error:
                raise ConfigError(
                    f"{directory}: the event {event['event']!r} at {event.get('at')} is not what "
                    f"`dispatcher serve --record-dir` writes ({type(error).__name__}: {error})"
                ) from None
    if recording is None:
        known = f"; it has {', '.join(seen)}" if seen and run else "; nothing was recorded yet"
        wanted = f"--run {run}: " if run else ""
        raise ConfigError(f"{wanted}no such run in {directory}{known}")
    recording.notes = reader.notes
    return recording
