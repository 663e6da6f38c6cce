"""Which window multiple is worth it: trainer time, plus a price on the delay it takes.

The rule: of the windows tried, take the one with the smallest

    trainer time * (1 + DELAY_PRICE * (W - 1))

where trainer time is 1 for ranks that never wait. By Little's law a window of W dispatch batches
holds samples back for W - 1 dispatches on average, whatever the policy; those are policy updates
by which samples are staler. So one more dispatch of delay has to save 2 % of trainer time, and a
window of 1.25 has to save 0.5 %. Below that, the error of any cost model outweighs the gain.
"""

from collections.abc import Sequence

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.simulate.result import Recommendation, Run
from rollout_planner.strategies import looks_ahead
from rollout_planner.types import Strategy

#: Share of trainer time that one dispatch of mean delay must save.
DELAY_PRICE = 0.02
#: Share of rank time from which on waiting for data is worth a word.
MUCH = 0.05


def recommend(runs: Sequence[Run]) -> Recommendation:
    """The window that is worth it, and why in two sentences. Raises ConfigError with none to name.

    At the same price the smaller window wins.
    """
    windows = sorted((run for run in runs if looks_ahead(run.strategy)), key=lambda run: run.window)
    if not windows:
        raise ConfigError("--recommend needs --strategy window among the strategies")
    best = min(windows, key=_price)
    baseline = next((run for run in runs if run.strategy == Strategy.ROUND_ROBIN), None)
    return Recommendation(best.window, f"{_gain(best, windows, baseline)} {_limit(best, windows)}")


def _price(run: Run) -> float:
    return run.time * (1 + DELAY_PRICE * (run.window - 1))


def _gain(best: Run, windows: Sequence[Run], baseline: Run | None) -> str:
    """What the window gives."""
    others = [(f"with a window of {windows[0].window:g}", windows[0])]
    if windows[0] is best:
        others = []
    if baseline is not None:
        others.append(("with round-robin", baseline))
    compared = " and ".join(f"{_waiting(run, short=True)} {how}" for how, run in others)
    against = f", against {compared}" if compared else ""
    what = "ranks wait" if best.timing else "waiting for stragglers adds"
    of_what = "" if best.timing else " to the trainer's time"
    return (
        f"Run --window-multiple {best.window:g}: {what} {_waiting(best)}{of_what}{against}, and "
        f"samples are held back for {best.delay.mean:.2f} dispatches on average, "
        f"{best.delay.max:.0f} at most.{_rollouts_doing(best)}"
    )


def _waiting(run: Run, *, short: bool = False) -> str:
    """What waiting takes: where time passes, for each other and for data."""
    if run.timing is None:
        return percent(run.time - 1)
    of_stragglers, of_data = run.timing.waiting_for_stragglers, run.timing.waiting_for_data
    if short:
        return f"{percent(of_stragglers)} and {percent(of_data)}"
    return f"{percent(of_stragglers)} of their time for each other and {percent(of_data)} for data"


def _rollouts_doing(run: Run) -> str:
    """What no window mends, where that is the larger part."""
    timing = run.timing
    if timing is None or timing.waiting_for_data < max(MUCH, timing.waiting_for_stragglers):
        return ""
    return (
        " Waiting for data is no window's doing: samples come more slowly than they are trained "
        "on, so more rollout workers would help more than any window."
    )


def _limit(best: Run, windows: Sequence[Run]) -> str:
    """Why not more."""
    larger = [run for run in windows if run.window > best.window]
    if not larger:
        tried = "the largest window tried" if len(windows) > 1 else "the only window tried"
        return (
            f"This is {tried}, so a larger one may save more: try --window-multiple "
            f"{best.window:g} {2 * best.window:g}."
        )
    rival = min(larger, key=_price)
    saved = (best.time - rival.time) / best.time
    dispatches = rival.window - best.window
    verb = f"save {percent(saved)} of it" if saved >= 5e-5 else "save nothing"
    return (
        f"A window of {rival.window:g} would {verb} for {dispatches:g} more dispatches of mean "
        f"delay, less than the {percent(DELAY_PRICE)} a dispatch that staler samples should earn."
    )


def percent(ratio: float) -> str:
    """A share in per cent with three digits or so: 0.24 %, 2.4 %, 24 %, 240 %."""
    value = 100 * ratio
    digits = 0 if abs(value) >= 99.5 else 1 if abs(value) >= 9.95 else 2
    return f"{value + 0.0:.{digits}f} %".replace("-0.00", "0.00")
