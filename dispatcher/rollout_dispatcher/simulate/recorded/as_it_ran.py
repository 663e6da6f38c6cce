"""The row "as it ran": the recorded steps through the figures that simulated ones go through.

Invariant: no plan is made again, except the plain split of the example; what is shown was planned,
measured and waited for.
"""

from dataclasses import replace

import numpy as np

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.measuring.times import measured_excess
from rollout_dispatcher.core.planning.trigger import Trigger
from rollout_dispatcher.record.recording import RecordedStep, Recording
from rollout_dispatcher.sample import Sample, Schema
from rollout_dispatcher.simulate.recorded.arrivals import durations, trace_of, trained_steps
from rollout_dispatcher.simulate.replay.timed import Clockwork
from rollout_dispatcher.simulate.replay.virtual import Setting, VirtualStep
from rollout_dispatcher.simulate.report.figures import Figures
from rollout_dispatcher.simulate.result import Recorded
from rollout_planner.types import FloatArray, Plan

#: The pass that a step is planned for; of others the one that takes longest stands for it.
PLANNED_FOR = "update"

_NO_FIELDS = Schema(())
_NO_PAYLOAD = memoryview(b"")


def as_it_ran(recording: Recording, setting: Setting) -> Recorded:
    """What the recorded steps came to. Raises ConfigError if none was committed."""
    steps = trained_steps(recording)
    trace = trace_of(recording)
    figures = Figures(setting, trace, trace.tokens)
    waiting = sorted(recording.samples.values(), key=lambda sample: sample.at, reverse=True)
    for number, step in enumerate(steps):
        arrived = []
        while waiting and waiting[-1].at <= step.at:
            arrived.append(_sample(waiting.pop().tokens))
        figures.add(_virtual(recording, step, number, setting, tuple(arrived)))
    took = durations(steps)
    measured = [excess_of(step, setting) for step in steps]
    known = [
        (excess, seconds)
        for excess, seconds in zip(measured, took, strict=True)
        if excess is not None
    ]
    run = replace(figures.run(_clockwork(recording, steps, took, measured)), strategy="as it ran")
    return Recorded(
        run=replace(run, dropped=dict(recording.dropped)),
        began=steps[0].at,
        measured=_mean_excess(known) if known else None,
        measured_steps=len(known),
    )


def main_pass(step: RecordedStep) -> FloatArray | None:
    """float64[R, M], seconds that ranks computed in the pass that steps are planned for.

    None where that was not measured of all of them.
    """
    found = {key: times.compute(step.dp_size) for key, times in step.measured.items()}
    there = {key: compute for key, compute in found.items() if compute is not None}
    if not there or PLANNED_FOR in there:
        return there.get(PLANNED_FOR)
    return max(there.values(), key=lambda each: float(each.sum()))


def excess_of(step: RecordedStep, setting: Setting) -> float | None:
    """Straggler excess of what ranks computed; None where that was not measured of all of them."""
    compute = main_pass(step)
    if compute is None:
        return None
    return measured_excess(compute, setting.plan.sync)


def trainer_load(recording: Recording, setting: Setting) -> float | None:
    """How fast the trainer was, as `--trainer-load` says it; None where that was not seen."""
    steps = recording.trained()
    plans = [_plan(step, setting, [0] * len(step.tickets)) for step in steps]
    rates = [
        seconds / plan.time
        for plan, seconds in zip(plans, durations(steps), strict=True)
        if plan.time > 0 and seconds > 0
    ]
    if not rates:
        return None
    trace = trace_of(recording)
    total, span = float(setting.plan.cost(trace.tokens).sum()), float(np.ptp(trace.arrival))
    if span <= 0:
        return None
    return float(np.median(rates)) * total / (span * setting.plan.dp_size)


def _virtual(
    recording: Recording,
    step: RecordedStep,
    number: int,
    setting: Setting,
    arrived: tuple[Sample, ...],
) -> VirtualStep:
    tickets = step.tickets
    order = sorted(range(len(tickets)), key=tickets.__getitem__)
    position = [0] * len(tickets)
    for at, index in enumerate(order):
        position[index] = at
    tokens = [recording.samples[step.run, tickets[index]].tokens for index in order]
    entries = tuple(Entry(_sample(count), ticket, 0.0) for ticket, count in enumerate(tokens))
    known = {trigger.value: trigger for trigger in Trigger}
    return VirtualStep(
        number=number,
        at=step.at,
        plan=_plan(step, setting, position),
        entries=entries,
        arrived=arrived,
        skips=np.array(step.skips, dtype=np.int64),
        trigger=known.get(step.trigger, Trigger.WINDOW_FULL),
        seconds=0.0,
        dropped={},
    )


def _plan(step: RecordedStep, setting: Setting, position: list[int]) -> Plan:
    """The recorded plan; position: of each sample, in the order of delivery."""
    return Plan(
        chosen=np.array(position, dtype=np.int64),
        counts=np.array([list(map(len, rank)) for rank in step.micro_batches], dtype=np.int64),
        cost=step.cost,
        sync=setting.plan.sync,
        fifo_imbalance=step.fifo_imbalance,
        fifo_excess=step.fifo_excess,
        lower_bound=step.lower_bound,
        pipeline_stages=setting.plan.pipeline_stages,
    )


def _clockwork(
    recording: Recording,
    steps: list[RecordedStep],
    took: list[float],
    measured: list[float | None],
) -> Clockwork | None:
    """What became of time; of stragglers as measured, and where it was not, as planned.

    As in a simulation, time is in steps or waiting for one: optimizer, weight syncs and whatever
    else is between steps is left out.
    """
    began = [min(step.taken) for step in steps if step.taken and not np.isnan(step.taken).any()]
    if not began:
        return None
    first, last = min(began), max(step.committed or 0.0 for step in steps)
    waited = sum(
        max(0.0, min(wait.at + wait.seconds, last) - max(wait.at, first))
        for wait in recording.waits
    )
    ranks = max(step.dp_size for step in steps)
    of_stragglers = 0.0
    for step, seconds, found in zip(steps, took, measured, strict=True):
        excess = step.excess if found is None else found
        of_stragglers += (0.0 if np.isnan(seconds) else seconds) * excess / (1 + excess)
    samples = recording.samples
    waits = [step.at - samples[step.run, ticket].at for step in steps for ticket in step.tickets]
    origin = min(sample.at for sample in samples.values())
    of_data = min(waited / ranks, last - first)
    return Clockwork(
        elapsed=float(np.nansum(took)) + of_data,
        of_data=of_data,
        of_stragglers=of_stragglers,
        finished=last - origin,
        waits=waits,
    )


def _mean_excess(known: list[tuple[float, float]]) -> float:
    """Of all steps together: what they took, over what they would have taken evenly."""
    took = [0.0 if np.isnan(seconds) else seconds for _, seconds in known]
    weights = took if sum(took) > 0 else [1.0] * len(known)
    even = sum(weight / (1 + excess) for (excess, _), weight in zip(known, weights, strict=True))
    return sum(weights) / even - 1


def _sample(tokens: int) -> Sample:
    return Sample("", tokens, tokens - 1, _NO_FIELDS, _NO_PAYLOAD)
