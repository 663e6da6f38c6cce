"""The plots of a report: each answers one question, and says in its title which.

Strategies have a colour each, everywhere the same; windows are shades of the window's colour, from
light to dark as they grow.
"""

import math
from collections.abc import Sequence

from rollout_dispatcher.simulate.recommend import percent
from rollout_dispatcher.simulate.report.svg import Name, Plot, Scale, text_width
from rollout_dispatcher.simulate.result import Result, Run, Work
from rollout_planner.strategies import looks_ahead

#: Shares smaller than this are drawn as this on a logarithmic scale.
_LEAST_SHARE = 1e-4


def windows(runs: Sequence[Run]) -> list[Run]:
    """The rows that choose from a window, by its size."""
    found = [run for run in runs if looks_ahead(run.strategy)]
    return sorted(found, key=lambda run: run.window)


def shade(at: int, of: int) -> str:
    """The class of the `at`-th of `of` windows."""
    return f"w{5 if of == 1 else 1 + round(4 * at / (of - 1))}"


def excess_plot(runs: Sequence[Run], width: int) -> str:
    """How much time waiting adds, against the window."""
    chosen = windows(runs)
    plain = [run for run in runs if not looks_ahead(run.strategy)]
    values = [max(run.excess, _LEAST_SHARE) for run in [*chosen, *plain]]
    log = max(values) > 20 * min(values)
    names = [Name(f"line dashed {r.strategy}", f"{r.strategy} {percent(r.excess)}") for r in plain]
    names += [Name("line window", "window")] if chosen else []
    plot = Plot("straggler excess against window multiple", width, names=names)
    low = min(values) / 2.5 if log else 0.0
    high = max(values) * (1.4 if log else 1.15) or 1.0
    y = plot.y_axis(low, high, "straggler excess", percent_tick, log=log)
    multiples = [run.window for run in chosen] or [1.0]
    widest = max(*multiples, min(multiples) + 0.5)
    margin = 0.08 * (widest - min(multiples))
    x = plot.x_axis(
        min(multiples) - margin,
        widest + margin,
        "window, in dispatch batches",
        "{:g}".format,
        ticks=sorted(set(multiples)),
    )
    for run in plain:
        level = y(max(run.excess, _LEAST_SHARE))
        plot.line([(x.start, level), (x.end, level)], f"line dashed {run.strategy}")
        plot.keep_clear(level)
    points = [(x(run.window), y(max(run.excess, _LEAST_SHARE))) for run in chosen]
    plot.line(points, "line window")
    for run, point in zip(chosen, points, strict=True):
        plot.dot(*point, "dot window", f"window {run.window:g}: {percent(run.excess)}")
    for run, point in zip(chosen, points, strict=True):
        plot.note(*point, percent(run.excess))
    return plot.render()


def ranks_plot(before: Work, after: Work, width: int) -> str:
    """Work and waiting of each rank in one step, before and after."""
    names = [
        Name("work", "at work", is_line=False),
        Name("idle", "waiting for other ranks", is_line=False),
        Name("line fair", "what perfect balance takes"),
    ]
    plot = Plot("work and waiting of each DP rank in one step", width, 340, names)
    y = plot.y_axis(0, max(before.time, after.time) * 1.08, "time, fair share = 1", "{:g}".format)
    gap, middle = 28, (plot.left + plot.right) / 2
    panels = ((plot.left, middle - gap / 2, before), (middle + gap / 2, plot.right, after))
    for start, end, work in panels:
        _panel(plot, y, start, end, work)
    plot.text(middle, plot.height - 6, f"{len(after.ranks)} DP ranks", "label", anchor="middle")
    return plot.render()


def _panel(plot: Plot, y: Scale, start: float, end: float, work: Work) -> None:
    """One step, rank by rank."""
    time, slot = work.time, (end - start) / len(work.ranks)
    space = min(2.0, slot / 6)
    for rank, own in enumerate(work.ranks):
        left = start + rank * slot + space / 2
        tip = f"rank {rank}: works for {own:.2f}, waits for {max(time - own, 0):.2f}"
        plot.bar((left, y(time), slot - space, y(own) - y(time)), "idle", tip)
        plot.bar((left, y(own), slot - space, y(0) - y(own)), "work", tip)
    plot.line([(start, y(1)), (end, y(1))], "line fair")
    plot.base_line(start, end)
    excess = percent(max(time - 1, 0))
    candidates = (f"{work.name}: {excess} excess", f"{work.name}: {excess}", excess)
    words = next((text for text in candidates if text_width(text) < end - start), excess)
    plot.text((start + end) / 2, plot.bottom + 18, words, "name", "middle")


def delay_plot(runs: Sequence[Run], width: int) -> str:
    """How many samples were passed over how often."""
    chosen = [run for run in windows(runs) if len(run.delays) > 1] or windows(runs)[:1]
    last = max((len(run.delays) for run in chosen), default=1)
    bound = max((run.max_skips for run in chosen), default=1)
    least = min(run.delays[-1] / (sum(run.delays) or 1) for run in chosen)
    floor = 10.0 ** math.floor(math.log10(min(least, 0.01)))
    names = [
        Name(f"line {shade(at, len(chosen))}", f"window {run.window:g}, mean {run.delay.mean:.2f}")
        for at, run in enumerate(chosen)
    ]
    names.append(Name("line bound", f"max_skips {bound}"))
    plot = Plot("share of samples by dispatches that passed them over", width, names=names)
    y = plot.y_axis(floor, 1, "share of samples", percent_tick, log=True)
    most = max(bound, last - 1, 1)
    every = max(1, math.ceil(most / 8))
    x = plot.x_axis(
        0, most, "passed over at least so many times", "{:g}".format,
        ticks=range(0, most + 1, every),
    )  # fmt: skip
    plot.line([(x(bound), y.start), (x(bound), y.end)], "line bound")
    for at, run in enumerate(chosen):
        total = sum(run.delays) or 1
        shares = [sum(run.delays[k:]) / total for k in range(len(run.delays))]
        points = [(x(k), y(share)) for k, share in enumerate(shares)]
        style = shade(at, len(chosen))
        plot.line(points, f"line {style}")
        for (px, py), (k, share) in zip(points, enumerate(shares), strict=True):
            tip = f"window {run.window:g}: {percent(share)} passed over {k} times or more"
            plot.dot(px, py, f"dot {style}", tip)
    return plot.render()


def lengths_plot(result: Result, run: Run, width: int) -> str:
    """Lengths that arrived against lengths that left."""
    edges, came, left = result.trace.edges, result.trace.lengths, run.lengths
    names = [
        Name("arrived", "the trace", is_line=False),
        Name("line window", f"window {run.window:g}"),
    ]
    plot = Plot("lengths that arrived and lengths that were dispatched", width, names=names)
    y = plot.y_axis(0, max([*came, *left]) * 1.1 or 1, "share of samples", percent_tick)
    x = plot.x_axis(max(edges[0], 1), edges[-1], "tokens of a sample", thousands, log=True)
    plot.area(_stairs(edges, came, x, y), y.start, "arrived")
    plot.line(_stairs(edges, left, x, y), "line window")
    return plot.render()


#: What becomes of rank time: class, and in words.
RANK_TIME = (
    ("work", "at work"), ("idle", "waiting for other ranks"), ("data", "waiting for data"),
)  # fmt: skip


def timing_plot(runs: Sequence[Run], width: int) -> str:
    """What became of rank time, row by row."""
    rows = [
        (
            f"{run.strategy} {run.window:g}",
            (run.timing.busy, run.timing.waiting_for_stragglers, run.timing.waiting_for_data),
        )
        for run in runs
        if run.timing is not None
    ]
    label = "share of rank time"
    return shares_plot("what ranks do with their time", label, rows, width)


def shares_plot(
    title: str, label: str, rows: Sequence[tuple[str, Sequence[float]]], width: int
) -> str:
    """Rows of shares of `RANK_TIME`, each with its name on the left."""
    kinds = [Name(kind, words, is_line=False) for kind, words in RANK_TIME]
    slot = 30 if len(rows) <= 40 else 600 / len(rows) * 2
    plot = Plot(title, width, names=kinds)
    plot.height = int(plot.top + slot * len(rows) + 50)
    plot.bottom = plot.height - 46.0
    plot.left = 14 + max((text_width(name) for name, _ in rows), default=0.0)
    x = plot.x_axis(0, 1, label, percent_tick)
    for row, (name, shares) in enumerate(rows):
        top, start = plot.top + slot * row, 0.0
        if slot >= 14 or row % math.ceil(14 / slot) == 0:
            plot.text(plot.left - 8, top + slot / 2, name, "value", anchor="end")
        for (kind, what), share in zip(RANK_TIME, shares, strict=False):
            tip = f"{name}: {percent(share)} {what}"
            plot.bar((x(start), top, x(start + share) - x(start) - 1, slot * 2 / 3), kind, tip)
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
