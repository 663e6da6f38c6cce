"""Between the core and the planner: entries to columns, and a plan to what metrics want of it."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.effects import PlanWanted, ReplanWanted, StepPlanned
from rollout_dispatcher.core.planning.trigger import Go
from rollout_dispatcher.core.planning.usual_loss import UsualLoss
from rollout_dispatcher.core.steps.step import OpenStep
from rollout_planner.cost import Quadratic
from rollout_planner.types import BoolArray, Plan, Window


def request_plan(
    entries: list[Entry],
    must_go: BoolArray,
    take: int,
    dp_size: int,
    go: Go,
    *,
    usual: UsualLoss,
    cost: Quadratic | None,
    slowness: tuple[float, ...] | None,
) -> PlanWanted:
    """Ask for a plan of `take` of these entries, or groups of them, oldest first."""
    window = _window(entries, must_go)
    window = replace(window, usual_loss_tokens=usual.with_(window))
    return PlanWanted(tuple(entries), window, take, dp_size, go.trigger, go.trial, cost, slowness)


def request_replan(
    step: OpenStep,
    dp_size: int,
    refill: list[Entry],
    *,
    cost: Quadratic | None,
    slowness: tuple[float, ...] | None,
) -> ReplanWanted:
    """Ask for another plan of exactly the samples of an open step, and those that fill it up."""
    entries = [*sorted(step.entries(), key=lambda entry: entry.ticket), *refill]
    window = _window(entries, np.ones(len(entries), np.bool_))
    return ReplanWanted(step, tuple(entries), window, dp_size, tuple(refill), cost, slowness)


def _window(entries: list[Entry], must_go: BoolArray) -> Window:
    count = len(entries)
    return Window(
        tokens=np.fromiter((e.sample.tokens for e in entries), np.int64, count),
        skips=np.fromiter((e.skips for e in entries), np.int64, count),
        group=np.fromiter((e.group for e in entries), np.int64, count),
        must_go=must_go,
        loss_tokens=np.fromiter((e.sample.loss_tokens for e in entries), np.int64, count),
    )


def report_plan(
    step: int,
    plan: Plan,
    wanted: PlanWanted,
    chosen: list[Entry],
    *,
    version: int | None,
    now: float,
) -> StepPlanned:
    """What a plan did to its samples.

    chosen: in the order of `plan.chosen`. version: the policy version that the step trains with.
    """
    at = plan.chosen
    return StepPlanned(
        step=step,
        plan=plan,
        trigger=wanted.trigger,
        waits=now - np.fromiter((entry.arrived for entry in chosen), np.float64, len(chosen)),
        skips=wanted.window.skips[at],
        staleness=() if version is None else tuple(_staleness(chosen, version)),
        tokens=wanted.window.tokens[at],
        nbytes=sum([entry.sample.payload.nbytes for entry in chosen]),
        entries=chosen,
    )


def _staleness(entries: list[Entry], version: int) -> Iterator[int]:
    """0 too for what newer weights wrote than DP rank 0 has reported: a sum that falls is none."""
    known = (entry.version for entry in entries)
    return (max(0, version - written) for written in known if written is not None)
