"""A few marks and axes of a plot, as inline SVG text; no library, no script.

Invariants: colours come from CSS classes only, so one picture serves a light and a dark page; every
text is escaped. Texts have room of their own: what names lines and colours stands above the plot in
as many rows as it takes, labels of an axis that would meet their neighbours are left out, and so is
a `note` for which there is no place.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]
#: Upper left corner, width and height.
Box = tuple[float, float, float, float]
#: How a value is written.
Show = Callable[[float], str]
#: Pixels of a letter of 12 pixels, in the widest of the usual fonts.
_NARROW, _WIDE = 4.4, 7.7


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


@dataclass(frozen=True, slots=True)
class Name:
    """What a mark stands for, above the plot: a mark of these classes, and the words."""

    classes: str
    words: str
    is_line: bool = True


class Plot:
    """A picture of `width` by `height` pixels; marks are drawn in the order in which they come.

    names: what is above the plot. The plot itself is between `left`, `right`, `top` and `bottom`,
    which are pixels from the upper left corner; `y_axis` moves `left`, and comes first.
    """

    def __init__(
        self, title: str, width: int, height: int = 300, names: Sequence[Name] = ()
    ) -> None:
        self.title, self.width, self.height = title, width, height
        self._parts: list[str] = []
        self._placed: list[Box] = []
        self.left, self.right = 16.0, width - 20.0
        self.top = 14.0 + self._show(names)
        self.bottom = height - 46.0

    def _show(self, names: Sequence[Name]) -> float:
        """Names from left to right, row by row; returns what they take."""
        x, row = 2.0, 0
        for name in names:
            room = 24 + text_width(name.words) + 18
            if x > 2 and x + room - 18 > self.width:
                x, row = 2.0, row + 1
            y = 12.0 + 20 * row
            if name.is_line:
                self.line([(x, y - 4), (x + 18, y - 4)], name.classes)
            else:
                self.bar((x + 3, y - 10, 12, 12), name.classes)
            self.text(x + 24, y, name.words, "value")
            x += room
        return 20.0 * (row + 1) + 4 if names else 0.0

    # -- axes -------------------------------------------------------------------------------

    def y_axis(
        self, low: float, high: float, label: str, show: Show, *, log: bool = False
    ) -> Scale:
        """Values from bottom to top: labels on the left, and a hair line for each."""
        scale = Scale(low, high, self.bottom, self.top, log)
        ticks = scale.ticks()
        self.left = 34.0 + max((text_width(show(tick)) for tick in ticks), default=0.0)
        for tick in ticks:
            y = scale(tick)
            self.line([(self.left, y), (self.right, y)], "grid")
            self._label(self.left - 8, y + 4, show(tick), "end")
        middle = (scale.start + scale.end) / 2
        self._parts.append(
            f'<text class="label" text-anchor="middle" '
            f'transform="translate(14 {middle:.1f}) rotate(-90)">'
            f"{escape(label + _scale_name(log=log))}</text>"
        )
        return scale

    def x_axis(
        self,
        low: float,
        high: float,
        label: str,
        show: Show,
        *,
        log: bool = False,
        ticks: Sequence[float] = (),
    ) -> Scale:
        """Values from left to right: labels under the plot, and its base line."""
        scale = Scale(low, high, self.left, self.right, log)
        self.base_line(self.left, self.right)
        for tick in ticks or scale.ticks(max(3, int((self.right - self.left) / 90))):
            self._label(scale(tick), self.bottom + 18, show(tick), "middle")
        middle = (scale.start + scale.end) / 2
        self.text(middle, self.height - 8, label + _scale_name(log=log), "label", anchor="middle")
        return scale

    def base_line(self, start: float, end: float) -> None:
        """The line that a plot stands on."""
        self.line([(start, self.bottom), (end, self.bottom)], "axis")

    def _label(self, x: float, y: float, words: str, anchor: str) -> None:
        """A value at an axis, unless it would meet another one."""
        box = text_box(x, y, words, anchor)
        if box[0] >= 0 and box[0] + box[2] <= self.width and not self._is_taken(box):
            self.text(x, y, words, "tick", anchor=anchor)

    # -- marks ------------------------------------------------------------------------------

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
        """A text at its base line; nothing else is put there."""
        self._placed.append(text_box(x, y, text, anchor))
        self._parts.append(
            f'<text class="{classes}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
            f"{escape(text)}</text>"
        )

    def keep_clear(self, level: float) -> None:
        """No note crosses this height, at which a line is drawn across the plot."""
        self._placed.append((self.left, level - 1, self.right - self.left, 2))

    def note(self, x: float, y: float, words: str) -> None:
        """A text above or below a point, where it meets no other and stays in the plot."""
        for lift in (-11, 21, -25, 35, -39, 49):
            box = text_box(x, y + lift, words, "middle")
            inside = box[1] >= self.top and box[1] + box[3] <= self.bottom
            inside = inside and box[0] >= self.left and box[0] + box[2] <= self.width
            if inside and not self._is_taken(box):
                self.text(x, y + lift, words, "value", anchor="middle")
                return

    def _is_taken(self, box: Box) -> bool:
        return any(overlap(box, other) for other in self._placed)

    def render(self) -> str:
        """The picture."""
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-label="{escape(self.title, quote=True)}">{"".join(self._parts)}</svg>'
        )


def text_box(x: float, y: float, words: str, anchor: str) -> Box:
    """What a text at this base line takes, with a little room around it."""
    width = text_width(words)
    start = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
    return start - 1, y - 11, width + 2, 14


def text_width(words: str) -> float:
    """Pixels of a text of 12 pixels, rather more than less: fonts differ."""
    return sum(_NARROW if letter in " .,:;ijl|'()[]/" else _WIDE for letter in words)


def overlap(one: Box, other: Box) -> bool:
    """Whether two boxes have a pixel in common."""
    return all(
        one[at] < other[at] + other[at + 2] and other[at] < one[at] + one[at + 2] for at in (0, 1)
    )


def _scale_name(*, log: bool) -> str:
    return ", logarithmic" if log else ""
