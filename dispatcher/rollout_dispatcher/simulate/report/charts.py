"""The plots of a report: each answers one question, and says in its title which.

Strategies have a colour each, everywhere the same; windows are shades of the window's colour, from
light to dark as they grow.
"""

import math
from collections.abc import Sequence

from rollout_dispatcher.balance.strategies import looks_ahead
from rollout_dispatcher.simulate.recommend import percent
from rollout_dispatcher.simulate.report.svg import Plot, Scale, spread_out
from rollout_dispatcher.simulate.result import Result, Run, Work

#: Shares smaller than this are drawn as this on a logarithmic scale.
_LEAST_SHARE = 1e-4


def windows(runs: Sequence[Run]) -> list[Run]:
    """The rows that choose from a window, by its size."""
    found = [run for run in runs if looks_ahead(run.strategy)]
    return sorted(found, key=lambda run: run.window)


def shade(at: int, of: int) -> str:
    """The class of the `at`-th of `of` windows."""
    return f"w{5 if of == 1 else 1 + round(4 * at / (of - 1))}"


def excess_plot(runs: Sequence[Run]) -> str:
    """How much time waiting adds, against the window."""
    chosen = windows(runs)
    plain = [run for run in runs if not looks_ahead(run.strategy)]
    values = [max(run.excess, _LEAST_SHARE) for run in [*chosen, *plain]]
    log = max(values) > 20 * min(values)
    plot = Plot("straggler excess against window multiple", right=190)
    low = min(values) / 2.5 if log else 0.0
    y = plot.y_scale(low, max(values) * (1.4 if log else 1.1), log=log)
    multiples = [run.window for run in chosen] or [1.0]
    widest = max(*multiples, min(multiples) + 0.5)
    margin = 0.08 * (widest - min(multiples))
    x = plot.x_scale(min(multiples) - margin, widest + margin)
    plot.y_axis(y, "straggler excess", percent_tick)
    plot.x_axis(x, "window, in dispatch batches", "{:g}".format, sorted(set(multiples)))
    for run in plain:
        level = y(max(run.excess, _LEAST_SHARE))
        plot.line([(x.start, level), (x.end, level)], f"line dashed {run.strategy}")
    points = [(x(run.window), y(max(run.excess, _LEAST_SHARE))) for run in chosen]
    plot.line(points, "line window")
    for run, point in zip(chosen, points, strict=True):
        plot.dot(*point, "dot window", f"window {run.window:g}: {percent(run.excess)}")
        lift = 22 if any(other[1] < point[1] - 60 for other in points) else -12
        plot.text(point[0], point[1] + lift, percent(run.excess), "value", anchor="middle")
    named = [*plain, *chosen[-1:]]
    wanted = [y(max(run.excess, _LEAST_SHARE)) for run in named]
    for run, height in zip(named, spread_out(wanted, 18), strict=True):
        plot.text(x.end + 12, height + 4, run.strategy, f"name {run.strategy}")
        plot.text(x.end + 108, height + 4, percent(run.excess), "value")
    return plot.render()


def ranks_plot(before: Work, after: Work) -> str:
    """Work and waiting of each rank in one step, before and after."""
    count = len(after.ranks)
    plot = Plot("work and waiting of each DP rank in one step", height=360, left=64, right=24)
    most = max(before.time, after.time) * 1.08
    y = plot.y_scale(0, most)
    plot.y_axis(y, "time, fair share = 1", "{:g}".format)
    gap, middle = 28, (plot.left + plot.width - plot.right) / 2
    panels = (
        (plot.left, middle - gap / 2, before),
        (middle + gap / 2, plot.width - plot.right, after),
    )
    for start, end, work in panels:
        time = work.time
        slot = (end - start) / count
        space = min(2.0, slot / 6)
        for rank, own in enumerate(work.ranks):
            left = start + rank * slot + space / 2
            tip = f"rank {rank}: works for {own:.2f}, waits for {max(time - own, 0):.2f}"
            plot.bar((left, y(time), slot - space, y(own) - y(time)), "idle", tip)
            plot.bar((left, y(own), slot - space, y(0) - y(own)), "work", tip)
        plot.line([(start, y(1)), (end, y(1))], "line fair")
        plot.line([(start, y(0)), (end, y(0))], "axis")
        share = f"{work.name}: {percent(max(time - 1, 0))} excess"
        plot.text((start + end) / 2, plot.height - 26, share, "name", anchor="middle")
    plot.text(middle, plot.height - 6, f"{count} DP ranks", "label", anchor="middle")
    return plot.render()


def delay_plot(runs: Sequence[Run]) -> str:
    """How many samples were passed over how often."""
    chosen = [run for run in windows(runs) if len(run.delays) > 1] or windows(runs)[:1]
    last = max((len(run.delays) for run in chosen), default=1)
    bound = max((run.max_skips for run in chosen), default=1)
    plot = Plot("share of samples by dispatches that passed them over", right=190)
    least = min(run.delays[-1] / (sum(run.delays) or 1) for run in chosen)
    floor = 10.0 ** math.floor(math.log10(min(least, 0.01)))
    x, y = plot.x_scale(0, max(bound, last - 1, 1)), plot.y_scale(floor, 1, log=True)
    plot.y_axis(y, "share of samples", percent_tick)
    ticks = [tick for tick in x.ticks(8) if tick == int(tick)]
    plot.x_axis(x, "passed over at least so many times", "{:g}".format, ticks)
    plot.line([(x(bound), y.start), (x(bound), y.end)], "line bound")
    plot.text(x(bound) - 6, y.end + 10, f"max_skips {bound}", "tick", anchor="end")
    ends = []
    for at, run in enumerate(chosen):
        total = sum(run.delays) or 1
        shares = [sum(run.delays[k:]) / total for k in range(len(run.delays))]
        points = [(x(k), y(share)) for k, share in enumerate(shares)]
        style = shade(at, len(chosen))
        plot.line(points, f"line {style}")
        for (px, py), (k, share) in zip(points, enumerate(shares), strict=True):
            tip = f"window {run.window:g}: {percent(share)} passed over {k} times or more"
            plot.dot(px, py, f"dot {style}", tip)
        ends.append((style, f"window {run.window:g}", f"{run.delay.mean:.2f}"))
    _legend(plot, x.end + 16, ends, "mean")
    return plot.render()


def lengths_plot(result: Result, run: Run) -> str:
    """Lengths that arrived against lengths that left."""
    edges, came, left = result.trace.edges, result.trace.lengths, run.lengths
    plot = Plot("lengths that arrived and lengths that were dispatched", right=190)
    x = plot.x_scale(max(edges[0], 1), edges[-1], log=True)
    y = plot.y_scale(0, max([*came, *left]) * 1.1 or 1)
    plot.y_axis(y, "share of samples", percent_tick)
    plot.x_axis(x, "tokens of a sample, logarithmic", thousands)
    plot.area(_stairs(edges, came, x, y), y.start, "arrived")
    plot.line(_stairs(edges, left, x, y), "line window")
    names = [("arrived", "the trace", ""), ("window", f"window {run.window:g}", "")]
    _legend(plot, x.end + 16, names, "")
    return plot.render()


def timing_plot(runs: Sequence[Run]) -> str:
    """What became of rank time, row by row."""
    plot = Plot("what ranks do with their time", height=92 + 30 * len(runs), left=150, top=34)
    x = plot.x_scale(0, 1)
    plot.x_axis(x, "share of rank time, from the first step to the last", percent_tick)
    kinds = (("work", "at work"), ("idle", "waiting for other ranks"), ("data", "waiting for data"))
    for at, (kind, name) in enumerate(kinds):
        plot.bar((x.start + 170 * at, 8, 12, 12), kind)
        plot.text(x.start + 170 * at + 18, 18, name, "value")
    for row, run in enumerate(runs):
        if run.timing is None:
            continue
        timing, top, start = run.timing, plot.top + 30 * row, 0.0
        name = f"{run.strategy} {run.window:g}"
        plot.text(plot.left - 10, top + 15, name, "value", anchor="end")
        shares = (timing.busy, timing.waiting_for_stragglers, timing.waiting_for_data)
        for (kind, what), share in zip(kinds, shares, strict=True):
            tip = f"{name}: {percent(share)} {what}"
            plot.bar((x(start), top, x(start + share) - x(start) - 1, 20), kind, tip)
            start += share
    return plot.render()


def percent_tick(ratio: float) -> str:
    """0.01 -> 1 %."""
    return f"{100 * ratio:g} %".replace("e-05", "e-5")


def thousands(value: float) -> str:
    """12000 -> 12k."""
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


def _stairs(
    edges: Sequence[float], shares: Sequence[float], x: Scale, y: Scale
) -> list[tuple[float, float]]:
    """The outline of a histogram."""
    points = []
    for low, high, share in zip(edges, edges[1:], shares, strict=False):
        points += [(x(low), y(share)), (x(high), y(share))]
    return points


def _legend(plot: Plot, x: float, rows: Sequence[tuple[str, str, str]], heading: str) -> None:
    """Colour, name and a figure for each."""
    if heading:
        plot.text(plot.width - 8, plot.top + 4, heading, "tick", anchor="end")
    for row, (style, name, figure) in enumerate(rows):
        y = plot.top + 24 + 22 * row
        plot.line([(x, y - 4), (x + 18, y - 4)], f"line {style}")
        plot.text(x + 26, y, name, "value")
        plot.text(plot.width - 8, y, figure, "value", anchor="end")
