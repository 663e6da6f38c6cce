"""The plans: every step as one JSON line, so that anyone can check what the figures say.

A line names the window and the strategy it belongs to, what entered the window since the step
before, which samples went to which micro-batch of which rank, how often each of them had been
passed over (where it ever was), and what was dropped and why. Warm-up steps have negative numbers.
"""

import json
from typing import TextIO

from rollout_dispatcher.simulate.replay.virtual import Setting, VirtualStep


def write_step(file: TextIO, setting: Setting, step: VirtualStep) -> None:
    """Append one line."""
    ids = [entry.sample.sample_id for entry in step.entries]
    chosen = step.plan.chosen.tolist()
    skips = zip(chosen, step.skips.tolist(), strict=True)
    line = {
        "step": step.number,
        "window": setting.window,
        "strategy": str(setting.strategy),
        "arrived": [sample.sample_id for sample in step.arrived],
        "ranks": step.plan.laid_out([ids[at] for at in chosen]),
        "skips": {ids[at]: count for at, count in skips if count},
        "dropped": step.dropped,
    }
    file.write(json.dumps(line, separators=(",", ":")) + "\n")
