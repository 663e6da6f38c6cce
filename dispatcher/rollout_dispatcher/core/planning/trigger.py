"""When to plan a step: as late as possible, so that the buffer fills while ranks compute.

A step is *wanted* when every DP rank has room for one more, and ranks are *hungry* when one of
them waits for it. Nothing is planned that is not wanted. Of what is wanted:

    window full                                         plan
    a cap reached with a whole batch                    plan; first hungry if groups still grow
    producers are done (or a phase is)                  plan, the last step may be smaller
    a whole batch, hungry for `max_wait`                plan
    a whole batch, grown since the last trial           try: used if within `target_excess`
    producers wait at a hard cap, hungry for `max_wait`
        and something is ready                          plan a smaller step
        and nothing is, nor has anything come meanwhile make capacity: give a group up
    otherwise                                           wait
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

#: Sums of floats fall short of what they were added up to: a wait that is over must not go on.
ROUNDING_S = 1e-6


class Trigger(StrEnum):
    """Why a step was planned when it was."""

    WINDOW_FULL = "window-full"
    TARGET_EXCESS = "target-excess"
    MAX_WAIT = "max-wait"
    BUFFER_FULL = "buffer-full"
    FLUSH = "flush"


@dataclass(frozen=True, slots=True)
class TriggerConfig:
    """Sizes in samples, or in groups if steps are counted so; times in seconds."""

    batch: int
    window: int
    max_wait: float


class Situation(NamedTuple):
    """What the decision depends on.

    ready: what a plan could choose from. full: a cap holds producers back; stuck: one that only
    leaving samples can lift. growing: open groups will still add samples.
    flush: nothing newer may be waited for, a smaller step is fine.
    hungry_for: seconds, None if no rank waits. quiet_for: seconds since anything moved.
    helped_for: seconds since payloads were sent from memory to the journal, if they were.
    tried: `ready` at the last trial that missed its target, None if there was none.
    """

    ready: int
    full: bool
    growing: bool
    flush: bool
    hungry_for: float | None
    tried: int | None
    stuck: bool = False
    quiet_for: float = 0.0
    helped_for: float = math.inf


@dataclass(frozen=True, slots=True)
class Go:
    """Plan now."""

    trigger: Trigger
    trial: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before something happens, or before `seconds` have passed."""

    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class MakeCapacity:
    """Open groups fill the memory, and none can become whole: give one up."""


#: What a decision may be.
Decided = Go | Wait | MakeCapacity


def decide(config: TriggerConfig, at: Situation) -> Decided:
    """Decide for a wanted step."""
    if at.ready >= config.window:
        return Go(Trigger.WINDOW_FULL)
    if at.ready >= config.batch:
        return _decide_whole_batch(config, at)
    if at.ready and at.flush:
        return Go(Trigger.FLUSH)
    if at.stuck and at.hungry_for is not None:
        return _decide_stuck(config, at, at.hungry_for)
    return Wait()


def _decide_whole_batch(config: TriggerConfig, at: Situation) -> Go | Wait:
    if at.flush:
        return Go(Trigger.FLUSH)
    if at.full and (not at.growing or at.hungry_for is not None):
        return Go(Trigger.BUFFER_FULL)
    if at.hungry_for is not None and at.hungry_for >= config.max_wait - ROUNDING_S:
        return Go(Trigger.MAX_WAIT)
    if at.tried is None or at.ready >= at.tried + max(1, config.batch // 16):
        return Go(Trigger.TARGET_EXCESS, trial=True)
    return Wait(None if at.hungry_for is None else config.max_wait - at.hungry_for)


def _decide_stuck(config: TriggerConfig, at: Situation, hungry_for: float) -> Decided:
    waited = min(hungry_for, at.helped_for)
    if not at.ready:
        waited = min(waited, at.quiet_for)
    if waited < config.max_wait - ROUNDING_S:
        return Wait(config.max_wait - waited)
    if at.ready:
        return Go(Trigger.BUFFER_FULL)
    return MakeCapacity() if at.growing else Wait()
