"""When to plan a step: as late as possible, so that the buffer fills while ranks compute.

A step is *wanted* when every DP rank has room for one more, and ranks are *hungry* when one of
them waits for it. Nothing is planned that is not wanted. Of what is wanted:

    window full                                         plan
    a cap reached with a whole batch                    plan; first hungry if groups still grow
    producers are done (or a phase is)                  plan, the last step may be smaller
    a cap reached, nothing more can come                plan a smaller step
    a whole batch, hungry for `max_wait`                plan
    a whole batch, grown since the last trial           try: used if within `target_excess`
    otherwise                                           wait
"""

from dataclasses import dataclass

from dispatcher.core.events import Trigger


@dataclass(frozen=True, slots=True)
class TriggerConfig:
    """Sizes in samples, times in seconds."""

    batch: int
    window: int
    max_wait: float


@dataclass(frozen=True, slots=True)
class Standing:
    """What the decision depends on.

    ready: samples a plan could choose from, at most the window.
    full: a cap holds producers back. growing: open groups will still add samples.
    flush: nothing newer may be waited for, a smaller step is fine.
    hungry_for: seconds, None if no rank waits.
    tried: `ready` at the last trial that missed its target, None if there was none.
    """

    ready: int
    full: bool
    growing: bool
    flush: bool
    hungry_for: float | None
    tried: int | None


@dataclass(frozen=True, slots=True)
class Go:
    """Plan now."""

    trigger: Trigger
    trial: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before something happens, or before `seconds` have passed."""

    seconds: float | None = None


def decide(config: TriggerConfig, at: Standing) -> Go | Wait:
    """Decide for a wanted step."""
    if at.ready >= config.window:
        return Go(Trigger.WINDOW_FULL)
    if at.ready >= config.batch:
        return _decide_whole_batch(config, at)
    if at.ready and at.flush:
        return Go(Trigger.FLUSH)
    if at.ready and at.full and not at.growing:
        return Go(Trigger.BUFFER_FULL)
    return Wait()


def _decide_whole_batch(config: TriggerConfig, at: Standing) -> Go | Wait:
    if at.flush:
        return Go(Trigger.FLUSH)
    if at.full and (not at.growing or at.hungry_for is not None):
        return Go(Trigger.BUFFER_FULL)
    if at.hungry_for is not None and at.hungry_for >= config.max_wait:
        return Go(Trigger.MAX_WAIT)
    if at.tried is None or at.ready >= at.tried + max(1, config.batch // 16):
        return Go(Trigger.TARGET_EXCESS, trial=True)
    return Wait(None if at.hungry_for is None else config.max_wait - at.hungry_for)
