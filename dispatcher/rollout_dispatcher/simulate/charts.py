"""Charts as inline SVG: lines over two axes, and rows of stacked shares; no library, no script.

Invariants: colours come from CSS classes only (`c0`, `c1`, ... in the order of what is named), so
one picture serves a light and a dark page; every text is escaped; a legend names each colour.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

WIDTH, HEIGHT = 860, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 10, 46
#: Of a bar, its gap included.
_SLOT = 26
#: A name, and its points; one point is drawn as a level line.
Series = tuple[str, Sequence[tuple[float, float]]]
#: How a value is written.
Show = Callable[[float], str]


def percent_tick(ratio: float) -> str:
    """0.01 -> 1 %."""
    return f"{round(100 * ratio, 9):g} %"


def thousands(value: float) -> str:
    """12000 -> 12k."""
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


class Axis:
    """Values to pixels, linear or logarithmic (for values above 0)."""

    def __init__(self, low: float, high: float, start: float, end: float, *, log: bool = False):
        self.low, self.high, self.log = low, high if high > low else low + 1, log
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        """Where a value lies; outside values lie on the border."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self._start + (value - low) / (high - low) * (self._end - self._start)

    def ticks(self) -> list[float]:
        """At most some eight round values."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1, 2, 5) if last - first <= 2 else (1,)
            found = [step * 10.0**at for at in range(first, last + 1) for step in steps]
        else:
            unit = 10.0 ** math.floor(math.log10((self.high - self.low) / 5))
            step = next(
                unit * by for by in (1, 2, 5, 10) if unit * by >= (self.high - self.low) / 6
            )
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            found = [at * step for at in range(first, last + 1)]
        return [at for at in found if self.low * (1 - 1e-9) <= at <= self.high * (1 + 1e-9)]


def line_chart(
    title: str,
    labels: tuple[str, str],
    series: Sequence[Series],
    *,
    shows: tuple[Show, Show] = ("{:g}".format, percent_tick),
    log: tuple[bool, bool] = (False, False),
    top: float = 0.0,
) -> str:
    """Lines. labels, shows, log: of x and of y. top: what the y axis reaches at least."""
    xs = [x for _, points in series for x, _ in points]
    ys = [y for _, points in series for _, y in points]
    x = Axis(min(xs), max(xs), _LEFT, WIDTH - _RIGHT, log=log[0])
    low = min(ys) / 1.5 if log[1] else 0.0
    y = Axis(low, max(top, *ys, 0.0) * 1.08 or 1.0, HEIGHT - _BOTTOM, _TOP, log=log[1])
    parts = []
    for at in y.ticks():
        parts.append(_line([(_LEFT, y(at)), (WIDTH - _RIGHT, y(at))], "grid"))
        parts.append(_text(_LEFT - 8, y(at) + 4, shows[1](at), "end"))
    parts += _x_axis(x, shows[0], labels[0], HEIGHT)
    middle = (HEIGHT - _BOTTOM) / 2
    parts.append(
        f'<text text-anchor="middle" transform="translate(14 {middle:g}) rotate(-90)">'
        f"{escape(labels[1])}</text>"
    )
    for number, (name, points) in enumerate(series):
        style = f"c{number}"
        drawn = [(x(a), y(b)) for a, b in points]
        if len(points) == 1:
            drawn = [(x(x.low), drawn[0][1]), (x(x.high), drawn[0][1])]
        parts.append(_line(drawn, f"line {style}"))
        for (px, py), (a, b) in zip(drawn if 1 < len(points) <= 20 else (), points, strict=False):
            tip = escape(f"{name}: {shows[1](float(f'{b:.3g}'))} at {shows[0](a)}")
            parts.append(
                f'<circle class="{style}" cx="{px:.1f}" cy="{py:.1f}" r="4">'
                f"<title>{tip}</title></circle>"
            )
    return _picture(title, HEIGHT, parts, [name for name, _ in series])


def bar_chart(
    title: str, label: str, kinds: Sequence[str], rows: Sequence[tuple[str, Sequence[float]]]
) -> str:
    """A bar a row, of shares of 1, one for each kind."""
    height = _TOP + _SLOT * len(rows) + _BOTTOM
    left = 30 + 8 * max((len(name) for name, _ in rows), default=0)
    x = Axis(0.0, 1.0, left, WIDTH - _RIGHT)
    parts = _x_axis(x, percent_tick, label, height)
    for row, (name, shares) in enumerate(rows):
        above, start = _TOP + _SLOT * row, 0.0
        parts.append(_text(left - 8, above + _SLOT / 2 + 3, name, "end"))
        for number, share in enumerate(shares):
            tip = escape(f"{name}: {100 * share:.3g} % {kinds[number]}")
            parts.append(
                f'<rect class="c{number}" x="{x(start):.1f}" y="{above}" height="{_SLOT - 8}" '
                f'width="{max(0.0, x(start + share) - x(start)):.1f}"><title>{tip}</title></rect>'
            )
            start += share
    return _picture(title, height, parts, kinds)


def _x_axis(x: Axis, show: Show, label: str, height: float) -> list[str]:
    ends = x(x.low), x(x.high)
    ticks = [_text(x(at), height - _BOTTOM + 18, show(at), "middle") for at in x.ticks()]
    base = _line([(end, height - _BOTTOM) for end in ends], "axis")
    return [base, *ticks, _text(sum(ends) / 2, height - 8, label, "middle")]


def _line(points: Iterable[tuple[float, float]], classes: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{classes}" points="{path}"/>'


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _picture(title: str, height: float, parts: Iterable[str], names: Sequence[str]) -> str:
    legend = "".join(f"<span class='c{at}'>{escape(name)}</span>" for at, name in enumerate(names))
    return (
        f"<p class='legend'>{legend}</p><svg viewBox='0 0 {WIDTH} {height:g}' role='img' "
        f'aria-label="{escape(title, quote=True)}">{"".join(parts)}</svg>'
    )
