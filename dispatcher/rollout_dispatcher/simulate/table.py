"""The table on the terminal, a row for each strategy and window, and the recommended window.

`recommend` takes the window with the smallest

    trainer time * (1 + DELAY_PRICE * (W - 1))

where trainer time is 1 for ranks that never wait. By Little's law a window of W dispatch batches
delays samples by W - 1 dispatches on average, whatever the policy, and makes them staler by as many
policy updates. So one more dispatch of delay has to save 2 % of trainer time, and a window of 1.25
has to save 0.5 %. Below that, the error of any cost model outweighs the gain.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.simulate.result import RankTime, Recommendation, Recorded, Result, Run
from rollout_planner.strategies import looks_ahead
from rollout_planner.types import Strategy

#: Share of trainer time that one dispatch of mean delay must save.
DELAY_PRICE = 0.02
#: Share of rank time from which on waiting for data is mentioned.
MUCH = 0.05
#: Difference of excess from which on it is explained that less of it saves nothing.
NOTICEABLE = 0.001

#: Heading, unit, and the text of a row.
Column = tuple[str, str, Callable[[Run], str]]


def percent(ratio: float) -> str:
    """Per cent without the sign, with more digits where it is small; never -0.00."""
    value = 100 * ratio
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:z.2f}"


_EXCESS: tuple[Column, ...] = (
    ("strategy", "", lambda run: run.strategy),
    ("window", "x batch", lambda run: f"{run.window:g}"),
    ("excess", "%", lambda run: percent(run.excess)),
    ("median", "%", lambda run: percent(run.step_excess.median)),
    ("p99", "%", lambda run: percent(run.step_excess.p99)),
)
_BOUND: tuple[Column, ...] = (("bound", "%", lambda run: percent(run.lower_bound)),)
_PADDING: tuple[Column, ...] = (("padding", "%", lambda run: percent(run.padding)),)
_DELAY: tuple[Column, ...] = (
    ("imbalance", "%", lambda run: percent(run.imbalance)),
    ("delay", "mean", lambda run: f"{run.delay.mean:.2f}"),
    ("", "p99", lambda run: f"{run.delay.p99:.0f}"),
    ("", "max", lambda run: f"{run.delay.max:.0f}"),
)
_STEADY: tuple[Column, ...] = (
    ("KS", "1 step", lambda run: f"{run.mix.ks_step:.2f}"),
    ("KS", "1e-4", lambda run: f"{1e4 * run.ks:.0f}"),
    ("of FIFO", "1e-4", lambda run: f"{1e4 * run.ks_fifo:.0f}"),
    ("long", "weight", lambda run: f"{run.mix.long_weight:.2f}"),
    ("none", "% steps", lambda run: percent(run.mix.without_long)),
    ("work", "± %", lambda run: percent(run.mix.work_variation)),
    ("small", "steps", lambda run: f"{run.small_steps}"),
)
_PLAN: tuple[Column, ...] = (
    ("plan", "ms", lambda run: f"{run.plan_ms:.1f}" if run.plan_ms else "-"),
)
_TIMED: tuple[Column, ...] = (
    ("busy", "%", lambda run: percent(_timing(run).busy)),
    ("no data", "%", lambda run: percent(_timing(run).waiting_for_data)),
    ("straggl.", "%", lambda run: percent(_timing(run).waiting_for_stragglers)),
    ("wait", "p50 s", lambda run: f"{_timing(run).wait.median:.1f}"),
    ("", "p99 s", lambda run: f"{_timing(run).wait.p99:.1f}"),
    ("finished", "s", lambda run: f"{_timing(run).finished:.0f}"),
)

_LEGEND = (
    "excess: time ranks wait for each other, over the work itself",
    "bound: no split of the same samples could be below it",
    "wrong: excess of these plans if the cost's linear part were in truth so much larger",
    "padding: cost of padding, over the samples' own",
    "imbalance: largest rank over mean rank, less one",
    "busy, no data, straggl.: share of rank time at work, waiting for samples, for other ranks",
    "wait: from a sample's arrival to the plan that took it",
    "delay: dispatches that passed a sample over",
    "as it ran: excess by that time's cost and speeds, straggl. measured; other rows: cost above",
    "split: so many DP ranks may train a sample together, of a model with context parallelism",
    "long: weight under token-mean of a loss token of the longest 1 %, over the mean token's",
    "none: steps without any of the longest 1 %",
    "work: standard deviation of a step's work, over its mean",
    "KS: distance of lengths from the trace's: in a step, in 20 dispatches, and what chance does",
)


def table(result: Result) -> str:
    """The headline, the rows, and the meaning of the columns."""
    columns = columns_for(result)
    rows = [[heading for heading, _, _ in columns], [unit for _, unit, _ in columns]]
    rows += [[show(run) for _, _, show in columns] for run in rows_of(result)]
    lines = list(_aligned(rows))
    lines.insert(2, "-" * max(map(len, lines)))
    shown = {*rows[0], *(text for name, *_ in rows for text in (name, name.partition(" ")[0]))}
    legend = [text for text in _LEGEND if text.split(":")[0].split(",")[0] in shown]
    return "\n".join([*headline(result), "", *lines, "", *legend, ""])


def rows_of(result: Result) -> list[Run]:
    """The recorded run, if there is one, then the simulated ones."""
    first = [] if result.recorded is None else [result.recorded.run]
    return [*first, *result.runs]


def columns_for(result: Result) -> tuple[Column, ...]:
    """The columns that apply to these runs."""
    # With padding, a split that pads less may be below the bound.
    bound = _PADDING if result.options["layout"] == "padded" else _BOUND
    if bound is _BOUND and result.options["sample_length_multiple"] > 1:
        bound += _PADDING
    bound += tuple(_if_wrong(factor) for factor in result.runs[0].cost_errors)
    if _is_timed(result):
        return _EXCESS[:3] + bound + _TIMED + _DELAY + _PLAN
    return _EXCESS + bound + _DELAY + _STEADY + _PLAN


def _if_wrong(factor: str) -> Column:
    return ("wrong", f"b x {factor}", lambda run: percent(run.cost_errors.get(factor, math.nan)))


def _is_timed(result: Result) -> bool:
    return any(run.timing for run in result.runs)


def headline(result: Result) -> list[str]:
    """The trace and the set-up, in a few lines."""
    trace, options = result.trace, result.options
    size, tokens = options["micro_batch_size"], options["micro_batch_tokens"]
    micro_batch = f"{size} samples" if size else f"at most {tokens:,} tokens"
    place = "micro-batch" if options["sync"] == "micro-step" else "step"
    first = result.runs[0]
    lengths = (
        f"{trace.name}: {trace.samples:,} samples, mean {trace.tokens.mean:,.0f} tokens, "
        f"p99 {trace.tokens.p99:,.0f}, longest {trace.tokens.max:,.0f}"
    )
    samples, groups = options["global_batch_size"], options["global_batch_groups"]
    batch = f"{groups:,} groups" if samples is None else f"{samples:,} samples"
    shape = (
        f"{batch} a step over {options['dp_size']} DP ranks "
        f"that meet at every {place}, {options['layout']} micro-batches of {micro_batch}"
    )
    if (stages := options["pipeline_stages"]) > 1:
        shape += f", pipelines of {stages} stages"
    if (multiple := options["sample_length_multiple"]) > 1:
        shape += f", samples padded to multiples of {multiple:,}"
    course = (
        f"{first.steps} steps, {options['arrivals']} arrivals, cost {options['cost']}, "
        f"seed {options['seed']}"
    )
    lines = [lengths, shape, course]
    if result.recorded is not None:
        lines.append(_as_recorded(result.recorded))
    if trace.empty_rows:
        lines.append(f"{trace.empty_rows} rows of the trace hold no tokens and are left out")
    if dropped := sum(first.dropped.values()):
        lines.append(f"{dropped:,} samples dropped as longer than a micro-batch")
    return lines


def _as_recorded(recorded: Recorded) -> str:
    began = datetime.fromtimestamp(recorded.began, UTC)
    run = recorded.run
    if recorded.measured is None:
        measured = "no rank reported how long its micro-batches took, so what is shown was planned"
    else:
        measured = (
            f"excess planned {percent(run.excess)} %, and measured on {recorded.measured_steps} of "
            f"them {percent(recorded.measured)} %"
        )
    return f"as it ran: {run.steps} steps from {began:%Y-%m-%d %H:%M} UTC; {measured}"


def _aligned(rows: list[list[str]]) -> Iterator[str]:
    """Text to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join(cells).rstrip()


def _timing(run: Run) -> RankTime:
    assert run.timing is not None
    return run.timing


# -- the recommended window -------------------------------------------------------------------


def recommend(runs: Sequence[Run]) -> Recommendation:
    """The recommended window and the reason. Raises ConfigError if no row chooses from a window.

    At the same price the smaller window wins.
    """
    windows = sorted((run for run in runs if looks_ahead(run.strategy)), key=lambda run: run.window)
    if not windows:
        raise ConfigError("--recommend needs --strategy window among the strategies")
    best = min(windows, key=_price)
    baseline = next((run for run in runs if run.strategy == Strategy.ROUND_ROBIN), None)
    why = f"{_gain(best, windows, baseline)} {_limit(best, windows)}"
    split = next((run for run in runs if run.strategy.startswith("split")), None)
    return Recommendation(best.window, why if split is None else f"{why} {_splitting(best, split)}")


def _splitting(best: Run, split: Run) -> str:
    """Whether splitting long samples is worth it instead."""
    saved = 1 - split.time / _price(best)
    what = (
        f"With --set max-{split.strategy.replace(' ', '=')} and --window 1 it is {_waiting(split)}"
    )
    if saved < DELAY_PRICE:
        return f"{what}: not worth it here, as context parallelism has to be built into the model."
    return (
        f"{what}, with no delay: worth it for a model whose attention runs over the ranks of a "
        "block (context parallelism), see docs/guide.md."
    )


def _price(run: Run) -> float:
    return run.time * (1 + DELAY_PRICE * (run.window - 1))


def _gain(best: Run, windows: Sequence[Run], baseline: Run | None) -> str:
    """What the window gains."""
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
        f"Run --window {best.window:g}: {what} {_waiting(best)}{of_what}{against}, and "
        f"samples are held back for {best.delay.mean:.2f} dispatches on average, "
        f"{best.delay.max:.0f} at most.{_rollouts_doing(best)}"
    )


def _waiting(run: Run, *, short: bool = False) -> str:
    """The cost of waiting; with timed arrivals for other ranks and for data."""
    if run.timing is None:
        return signed(run.time - 1)
    of_stragglers, of_data = run.timing.waiting_for_stragglers, run.timing.waiting_for_data
    if short:
        return f"{signed(of_stragglers)} and {signed(of_data)}"
    return f"{signed(of_stragglers)} of their time for each other and {signed(of_data)} for data"


def _rollouts_doing(run: Run) -> str:
    """A remark on waiting for data, if that is the larger part."""
    timing = run.timing
    if timing is None or timing.waiting_for_data < max(MUCH, timing.waiting_for_stragglers):
        return ""
    return (
        " Waiting for data is no window's doing: samples come more slowly than they are trained "
        "on, so more rollout workers would help more than any window."
    )


def _limit(best: Run, windows: Sequence[Run]) -> str:
    """Why a larger window is not worth it."""
    larger = [run for run in windows if run.window > best.window]
    if not larger:
        tried = "the largest window tried" if len(windows) > 1 else "the only window tried"
        return (
            f"This is {tried}, so a larger one may save more: try --window "
            f"{best.window:g} {2 * best.window:g}."
        )
    rival = min(larger, key=_price)
    saved = (best.time - rival.time) / best.time
    dispatches = rival.window - best.window
    verb = f"save {signed(saved)} of it" if saved >= 5e-5 else "save nothing"
    why = (
        f"A window of {rival.window:g} would {verb} for {dispatches:g} more dispatches of mean "
        f"delay, less than the {signed(DELAY_PRICE)} a dispatch that staler samples should earn."
    )
    if best.timing is None or best.excess - rival.excess < saved + NOTICEABLE:
        return why
    return (
        f"{why} Its excess is {signed(rival.excess)}, against {signed(best.excess)}: what ranks "
        "wait less for each other they wait more for data, as samples come no sooner than in the "
        "trace. If rollout workers waited for room in the buffer then, ask with --arrivals steady."
    )


def signed(ratio: float) -> str:
    """A share in per cent with about three digits: 0.24 %, 2.4 %, 24 %, 240 %."""
    value = 100 * ratio
    digits = 0 if abs(value) >= 99.5 else 1 if abs(value) >= 9.95 else 2
    return f"{value + 0.0:.{digits}f} %".replace("-0.00", "0.00")
