"""Whether training comes out the same through a window as in order of arrival, by real training.

    python -m tests.convergence [--seeds 6] [--tasks closed-loop long-answers] [--json FILE]

Two tasks, through real dispatchers, producers and streams: a small policy learns to add with GRPO,
and one learns texts whose long ones have rules of their own. Each in order of arrival (FIFO),
through windows, and with a positive control: in order of arrival with the longest tenth of the
rollouts dropped, or with half the weight on the longest hundredth. Each seed is one stream for all
arms. Exit code 1 unless FIFO learns, the whole 95 % interval of each claimed arm's difference from
it lies within 5 % of what it gains, and the control's does not and is without 0. docs/evidence.md
says what that means.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from os import cpu_count
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from tests.convergence.answers import CLASSES, first_answerer
from tests.convergence.base import first_policy
from tests.convergence.intervals import Difference, Interval, Verdict, judge, less
from tests.convergence.runs import ARMS, BATCH, CLAIMED, TRAINING, Arm, Task, score
from tests.convergence.seeds import Runs, run_all

#: No seed from here on was looked at while the tasks and their settings were made.
FIRST_SEED = 401


def main() -> int:
    """Train, judge, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tasks", nargs="+", type=Task, choices=list(Task), default=list(Task))
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each run")
    parser.add_argument("--first-steps", type=int, default=900, help="those of the first policy")
    parser.add_argument("--processes", type=int, default=cpu_count())
    parser.add_argument("--json", type=Path, default=Path("build/convergence.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    found = []
    for name in given.tasks:
        first = first_policy(0, given.first_steps) if name is Task.CLOSED else first_answerer()
        before, by_class = score(name, first)
        runs = list(run_all(name, first, seeds, given.steps, given.processes))
        verdict = judge_runs(before, runs)
        found.append(task(name, verdict, runs) | {"first_by_class": by_class})
        print(sentences(name, verdict), flush=True)
    figures = {
        "tasks": found,
        "settings": {
            "steps": given.steps, "first_steps": given.first_steps,
            "global_batch_size": BATCH, "dp_size": {t: TRAINING[t].ranks for t in Task},
            "arms": ARMS,
        },
        "versions": {name: version(name) for name in ("torch", "numpy", "rollout-dispatcher")},
    }  # fmt: skip
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"{given.json} written")
    return 0 if all(each["shown"] for each in found) else 1


def judge_runs(before: float, runs: Sequence[Runs]) -> Verdict:
    """What all seeds' runs show."""
    scores: dict[str, list[float]] = {arm: [each[arm].score for each in runs] for arm in runs[0]}
    return judge(before, scores.pop(Arm.FIFO), scores)


def task(name: Task, verdict: Verdict, runs: Sequence[Runs]) -> dict[str, Any]:
    """A task as it is written down."""
    found: dict[str, Any] = {
        "name": name,
        "seeds": len(runs),
        "margin": verdict.margin,
        "shown": verdict.shown(CLAIMED, Arm.CONTROL),
        "fifo_gain": verdict.gain,
        "fifo_gain_interval_95": _pair(verdict.gain_interval),
        "differences": {arm: _written(each) for arm, each in verdict.differences.items()},
        "runs": [{arm: asdict(run) for arm, run in each.items()} for each in runs],
    }
    if name is Task.LONG:
        found["losses"] = {arm: _losses(arm, runs) for arm in ARMS[name]}
    return found


def _pair(found: Interval) -> list[float]:
    return [found.low, found.high]


def _written(found: Difference) -> dict[str, Any]:
    return {
        "mean": found.mean,
        "interval_95": _pair(found.interval),
        "verdict": "same" if found.same else "differs" if found.detected else "not told",
    }


def _losses(arm: Arm, runs: Sequence[Runs]) -> dict[str, Any]:
    """An arm's losses of each class over the seeds, their difference from FIFO's, and weights."""
    found: dict[str, Any] = {"long_weight": fmean(each[arm].long_weight or 0 for each in runs)}
    for name in CLASSES:
        losses, fifo = ([each[way].by_class[name] for each in runs] for way in (arm, Arm.FIFO))
        apart = less(losses, fifo, 0.0)
        found[name] = {
            "mean": fmean(losses), "deviation": stdev(losses),
            "less_fifo": apart.mean, "interval_95": _pair(apart.interval),
        }  # fmt: skip
    return found


def sentences(name: Task, verdict: Verdict) -> str:
    """What a task shows."""
    lines = [f"{name}: FIFO gains {verdict.gain:.4f}; margin {verdict.margin:.4f}"]
    for arm, each in verdict.differences.items():
        found = _written(each)
        low, high = found["interval_95"]
        lines.append(
            f"  {arm} less FIFO {each.mean:+.4f} [{low:+.4f}, {high:+.4f}]: {found['verdict']}"
        )
    shown = "shown" if verdict.shown(CLAIMED, Arm.CONTROL) else "NOT SHOWN"
    return "\n".join([*lines, f"{name}: {shown}"])


if __name__ == "__main__":
    sys.exit(main())
