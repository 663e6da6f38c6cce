"""A few marks and axes of a plot, as inline SVG text; no library, no script.

Invariant: colours come from CSS classes only, so one picture serves a light and a dark page; every
text is escaped.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

Point = tuple[float, float]
#: Upper left corner, width and height.
Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Scale:
    """Values to pixels, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Where a value lies; outside values lie on the border."""
        value = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        """Round values to label: 1, 2 or 5 times a power of ten."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
            if sum(self.low <= tick <= self.high for tick in found) > 8:
                found = found[::3]
        else:
            rough = (self.high - self.low) / about
            unit = 10.0 ** math.floor(math.log10(rough))
            step = next(unit * by for by in (1, 2, 5, 10) if unit * by >= rough)
            first = math.ceil(self.low / step - 1e-9)
            found = [at * step for at in range(first, math.floor(self.high / step + 1e-9) + 1)]
        return [tick for tick in found if self.low * (1 - 1e-9) <= tick <= self.high * (1 + 1e-9)]


@dataclass(slots=True)
class Plot:
    """A picture of `width` by `height` pixels; marks are drawn in the order in which they come."""

    title: str
    width: int = 720
    height: int = 320
    left: int = 64
    right: int = 24
    top: int = 16
    bottom: int = 48
    _parts: list[str] = field(default_factory=list)

    def x_scale(self, low: float, high: float, *, log: bool = False) -> Scale:
        """Values from left to right."""
        return Scale(low, high, self.left, self.width - self.right, log)

    def y_scale(self, low: float, high: float, *, log: bool = False) -> Scale:
        """Values from bottom to top."""
        return Scale(low, high, self.height - self.bottom, self.top, log)

    def x_axis(
        self, scale: Scale, label: str, show: Callable[[float], str], ticks: Sequence[float] = ()
    ) -> None:
        """Labels under the plot, and its base line."""
        base = self.height - self.bottom
        self.line([(scale.start, base), (scale.end, base)], "axis")
        for tick in ticks or scale.ticks():
            self.text(scale(tick), base + 18, show(tick), "tick", anchor="middle")
        middle = (scale.start + scale.end) / 2
        self.text(middle, self.height - 8, label, "label", anchor="middle")

    def y_axis(
        self, scale: Scale, label: str, show: Callable[[float], str], ticks: Sequence[float] = ()
    ) -> None:
        """Labels left of the plot, and a hair line for each."""
        for tick in ticks or scale.ticks():
            y = scale(tick)
            self.line([(self.left, y), (self.width - self.right, y)], "grid")
            self.text(self.left - 8, y + 4, show(tick), "tick", anchor="end")
        middle = (scale.start + scale.end) / 2
        self._parts.append(
            f'<text class="label" text-anchor="middle" '
            f'transform="translate(14 {middle:.1f}) rotate(-90)">{escape(label)}</text>'
        )

    def line(self, points: Iterable[Point], classes: str) -> None:
        """A line through pixels."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline class="{classes}" points="{path}"/>')

    def area(self, points: Sequence[Point], base: float, classes: str) -> None:
        """What lies between a line and the level `base`."""
        closed = [(points[0][0], base), *points, (points[-1][0], base)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in closed)
        self._parts.append(f'<polygon class="{classes}" points="{path}"/>')

    def bar(self, box: Box, classes: str, tip: str = "") -> None:
        """A rectangle."""
        x, y, width, height = box
        title = f"<title>{escape(tip)}</title>" if tip else ""
        self._parts.append(
            f'<rect class="{classes}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" '
            f'height="{max(height, 0):.1f}">{title}</rect>'
        )

    def dot(self, x: float, y: float, classes: str, tip: str) -> None:
        """A point that tells its value when pointed at."""
        self._parts.append(
            f'<circle class="{classes}" cx="{x:.1f}" cy="{y:.1f}" r="4.5">'
            f"<title>{escape(tip)}</title></circle>"
        )

    def text(self, x: float, y: float, text: str, classes: str, anchor: str = "start") -> None:
        """A text at its base line."""
        self._parts.append(
            f'<text class="{classes}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
            f"{escape(text)}</text>"
        )

    def render(self) -> str:
        """The picture."""
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-label="{escape(self.title, quote=True)}">{"".join(self._parts)}</svg>'
        )


def spread_out(heights: Sequence[float], least: float) -> list[float]:
    """Heights moved apart, as little as it takes, so that labels do not cover each other.

    Example: 10 and 12 with 14 between become 4 and 18.
    """
    order = sorted(range(len(heights)), key=heights.__getitem__)
    moved = [heights[at] for at in order]
    for _ in range(50):
        for upper in range(len(moved) - 1):
            lack = least - (moved[upper + 1] - moved[upper])
            if lack > 1e-6:
                moved[upper] -= lack / 2
                moved[upper + 1] += lack / 2
    out = [0.0] * len(heights)
    for position, at in enumerate(order):
        out[at] = moved[position]
    return out
