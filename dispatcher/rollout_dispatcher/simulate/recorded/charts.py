"""The plots of a recorded run: over time, in at most so many points, and by rank."""

from collections.abc import Sequence

import numpy as np

from rollout_dispatcher.simulate.report.charts import percent_tick
from rollout_dispatcher.simulate.report.svg import Name, Plot, Scale
from rollout_planner.types import FloatArray

#: Points of a line; more steps than that are averaged.
MAX_POINTS = 120

#: A line's class, its name, and its values over the steps.
Line = tuple[str, str, FloatArray]


def lines_plot(
    title: str, label: str, at: FloatArray, lines: Sequence[Line], *, width: int, most: float = 0.0
) -> str:
    """Shares over time. most: what the scale has at least."""
    names = [Name(f"line {style}", name) for style, name, _ in lines]
    drawn = [(style, *_averaged(at, values)) for style, _, values in lines]
    peak = max([most, *(float(values.max()) for _, _, values in drawn if len(values))])
    plot = Plot(title, width, names=names)
    y = plot.y_axis(0.0, peak * 1.08 or 1.0, label, percent_tick)
    span = max(float(at[-1]), 1.0)
    unit, per_unit = time_unit(span)
    x = plot.x_axis(0.0, span / per_unit, f"{unit} since the first step", "{:g}".format)
    for style, times, values in drawn:
        points = [(x(time / per_unit), y(value)) for time, value in zip(times, values, strict=True)]
        _draw(plot, points, style, x)
    return plot.render()


def time_unit(span: float) -> tuple[str, float]:
    """What so many seconds are best told in."""
    for unit, seconds in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if span >= 3 * seconds:
            return unit, seconds
    return "seconds", 1.0


def _draw(plot: Plot, points: list[tuple[float, float]], style: str, x: Scale) -> None:
    if len(points) == 1:  # a line of one point is not to be seen
        points = [(x.start, points[0][1]), (x.end, points[0][1])]
    if points:
        plot.line(points, f"line {style}")


def _averaged(at: FloatArray, values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Means over as many neighbours as it takes; what is not known is left out."""
    known = ~np.isnan(values)
    at, values = at[known], values[known]
    if len(at) <= MAX_POINTS:
        return at, values
    starts = np.linspace(0, len(at), MAX_POINTS, endpoint=False).astype(np.int64)
    counts = np.diff([*starts, len(at)])
    return np.add.reduceat(at, starts) / counts, np.add.reduceat(values, starts) / counts
