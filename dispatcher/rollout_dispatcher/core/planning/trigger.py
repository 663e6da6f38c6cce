"""When to plan a step: as late as possible, so that the buffer fills while ranks compute.

A step is planned only while every DP rank has room for one more. Ranks are *hungry* when one of
them waits for a step that is not planned. While there is room:

    window full                                         plan
    a cap reached with a whole batch                    plan; while groups grow, only if hungry
    the stream or a phase has ended                     plan, the last step may be smaller
    a whole batch, hungry for `max_wait`                plan
    a whole batch, grown since the last trial           trial: used if within `target_excess`
    pushes blocked at a hard cap, hungry for `max_wait`
        and a sample is ready                           plan a smaller step
        and none is, nor was any accepted               evict an open group
    otherwise                                           wait
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

#: Tolerance in seconds: sums of floats may fall short, and a wait that is over must end.
ROUNDING_S = 1e-6


class Trigger(StrEnum):
    """The condition that made a step planned."""

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


class TriggerInputs(NamedTuple):
    """Inputs of the decision.

    ready: units that a plan may choose from. at_cap: a cap blocks pushes; stuck: and only samples
    that leave can lift it. growing: open groups have samples.
    flush: the stream or a phase has ended, a smaller step is fine.
    hungry_for: seconds, None if no rank waits. quiet_for: seconds since a sample came or left.
    spilling_for: seconds since payloads were sent to the journal; infinite if none are on the way.
    tried: `ready` at the last trial that missed its target, None for none.
    """

    ready: int
    at_cap: bool
    growing: bool
    flush: bool
    hungry_for: float | None
    tried: int | None
    stuck: bool = False
    quiet_for: float = 0.0
    spilling_for: float = math.inf


@dataclass(frozen=True, slots=True)
class Go:
    """Plan now."""

    trigger: Trigger
    trial: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Decide again at the next event, or after `seconds`."""

    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class MakeCapacity:
    """Evict an open group: they fill the memory, and none can be completed."""


#: A decision.
Decided = Go | Wait | MakeCapacity


def decide(config: TriggerConfig, at: TriggerInputs) -> Decided:
    """Decide; to be called while every DP rank has room for a step."""
    if at.ready >= config.window:
        return Go(Trigger.WINDOW_FULL)
    if at.ready >= config.batch:
        return _decide_whole_batch(config, at)
    if at.ready and at.flush:
        return Go(Trigger.FLUSH)
    if at.stuck and at.hungry_for is not None:
        return _decide_stuck(config, at, at.hungry_for)
    return Wait()


def _decide_whole_batch(config: TriggerConfig, at: TriggerInputs) -> Go | Wait:
    if at.flush:
        return Go(Trigger.FLUSH)
    if at.at_cap and (not at.growing or at.hungry_for is not None):
        return Go(Trigger.BUFFER_FULL)
    if at.hungry_for is not None and at.hungry_for >= config.max_wait - ROUNDING_S:
        return Go(Trigger.MAX_WAIT)
    if at.tried is None or at.ready >= at.tried + max(1, config.batch // 16):
        return Go(Trigger.TARGET_EXCESS, trial=True)
    return Wait(None if at.hungry_for is None else config.max_wait - at.hungry_for)


def _decide_stuck(config: TriggerConfig, at: TriggerInputs, hungry_for: float) -> Decided:
    waited = min(hungry_for, at.spilling_for)
    if not at.ready:
        waited = min(waited, at.quiet_for)
    if waited < config.max_wait - ROUNDING_S:
        return Wait(config.max_wait - waited)
    if at.ready:
        return Go(Trigger.BUFFER_FULL)
    return MakeCapacity() if at.growing else Wait()
