"""A recorded run as a trace: what came, when it came."""

import numpy as np

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.record.recording import RecordedStep, Recording
from rollout_dispatcher.simulate.trace import Trace


def trace_of(recording: Recording) -> Trace:
    """Every accepted sample, in order of its arrival. Raises ConfigError if there is none."""
    samples = sorted(recording.samples.values(), key=lambda sample: (sample.at, sample.ticket))
    if not samples:
        raise ConfigError(f"{recording.name}: nothing had arrived when this was recorded")
    numbers: dict[str, int] = {}
    groups = [
        -1 if sample.group is None else numbers.setdefault(sample.group, len(numbers))
        for sample in samples
    ]
    arrival = np.array([sample.at for sample in samples])
    return Trace(
        recording.name,
        np.arange(len(samples)),
        np.array([sample.tokens for sample in samples], dtype=np.int64),
        np.array(groups, dtype=np.int64),
        arrival - arrival[0],
    )


def trained_steps(recording: Recording) -> list[RecordedStep]:
    """Committed steps, in order. Raises ConfigError if there is none."""
    steps = recording.trained()
    if not steps:
        raise ConfigError(
            f"{recording.name}: no step was committed whose samples are all on record; let the "
            "run go on, or give it more --record-bytes"
        )
    return steps


def durations(steps: list[RecordedStep]) -> list[float]:
    """Seconds that each step was in training: from when its last rank began to its commit.

    nan where that was not seen, as of steps that an earlier process had begun.
    """
    return [
        step.committed - max(step.taken)
        if step.committed is not None and step.taken and not np.isnan(step.taken).any()
        else float("nan")
        for step in steps
    ]
