"""Runs a simulation: each setting over the same samples in the same order.

Invariant: the result depends on trace, settings and seed alone, but for the time of planning.
"""

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TextIO

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.simulate.figures import Figures
from rollout_dispatcher.simulate.replay import (
    Setting,
    VirtualStep,
    check_arrivals,
    dropped_samples,
    run_steady,
    run_timed,
    warm_up_steps,
)
from rollout_dispatcher.simulate.result import Run
from rollout_dispatcher.simulate.trace import Epochs, Trace
from rollout_planner.types import IntArray

#: Of a record the last ones: planning a whole day takes hours, and adds little on windows.
DEFAULT_STEPS = 100

#: Called after each step with the setting and the share of all the work that is done.
Progress = Callable[[Setting, float], None]


@dataclass(frozen=True, slots=True)
class Scenario:
    """The part common to all settings.

    load: of the trainer, with timed arrivals; None: steady arrivals. steps: None: DEFAULT_STEPS
    with steady arrivals, the whole trace with timed ones.
    """

    seed: int = 0
    steps: int | None = None
    load: float | None = None


def simulate(
    trace: Trace,
    settings: Sequence[Setting],
    scenario: Scenario,
    *,
    plans: TextIO | None = None,
    progress: Progress = lambda _setting, _share: None,
) -> list[Run]:
    """Run every setting over the trace; rows in the order of the settings."""
    load = scenario.load
    if load is not None:
        check_arrivals(trace)
    kept = _kept(trace, settings[0])
    epochs = Epochs(trace, scenario.seed, whole_groups=settings[0].core.groups_matter)
    steps = scenario.steps or (DEFAULT_STEPS if load is None else None)

    def one(row: int, setting: Setting) -> Run:
        figures = Figures(setting, kept)
        warm_up = warm_up_steps(setting) if load is None else 0
        in_all = warm_up + (steps or len(trace) / setting.plan.dispatch_batch_size)

        def on_step(step: VirtualStep) -> None:
            numbered = replace(step, number=step.number - warm_up)
            figures.add(numbered)
            if plans is not None:
                write_step(plans, setting, numbered)
            done = min(1.0, (step.number + 1) / in_all)
            progress(setting, (row + done) / len(settings))

        if load is not None:
            return figures.run(run_timed(setting, trace, load, steps, on_step))
        run_steady(setting, epochs, steps or DEFAULT_STEPS, on_step)
        return figures.run(None)

    # Samples come and go by the million, in no reference cycles; the search for such takes a third
    # of the run.
    was_on = gc.isenabled()
    gc.disable()
    try:
        return [one(*each) for each in enumerate(settings)]
    finally:
        if was_on:
            gc.enable()


def _kept(trace: Trace, setting: Setting) -> IntArray:
    """Tokens of the samples that are not dropped. Raises ConfigError if all are."""
    gone = dropped_samples(trace, setting)
    if gone.all():
        raise ConfigError(
            f"every sample of {trace.name} is dropped as longer than --micro-batch-tokens "
            f"{setting.plan.longest_in_budget}; raise it, or set --on-oversize alone"
        )
    return trace.tokens[~gone]


def write_step(file: TextIO, setting: Setting, step: VirtualStep) -> None:
    """Append a step as one JSON line, from which the figures can be checked.

    arrived: samples that entered the window since the last step. ranks: samples by rank and
    micro-batch. skips: dispatches that passed a sample over, if any. dropped: the reason by sample.
    Warm-up steps have negative numbers.
    """
    ids = [sample.sample_id for sample in step.samples]
    skips = zip(ids, step.skips.tolist(), strict=True)
    line = {
        "step": step.number,
        "window": setting.window,
        "strategy": setting.name,
        "arrived": [sample.sample_id for sample in step.arrived],
        "ranks": step.plan.laid_out(ids),
        "skips": {each: count for each, count in skips if count},
        "dropped": step.dropped,
    }
    file.write(json.dumps(line, separators=(",", ":")) + "\n")
