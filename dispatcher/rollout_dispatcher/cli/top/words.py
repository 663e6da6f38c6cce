"""Numbers in few characters, bars and sparklines; in ASCII where a terminal has nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Glyphs:
    """What is drawn with. levels: of a sparkline, low to high; mark: a place on a bar."""

    full: str
    empty: str
    mark: str
    levels: str
    rule: str
    slow: str


UNICODE = Glyphs("█", "░", "┃", "▁▂▃▄▅▆▇█", "─", "◀")
ASCII = Glyphs("#", ".", "|", "_.-=+*%#", "-", "<")

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SPANS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def count(value: float) -> str:
    """`999`, `1.50k`, `21.3M`: at most five characters below a million billions."""
    for size, unit in _UNITS:
        if value >= size:
            return f"{_three(value / size)}{unit}"
    return f"{value:.0f}" if value == int(value) else _three(value)


def nbytes(value: float) -> str:
    """`183 KiB`, `2.00 GiB`, as sizes are written in options."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if value >= 1024**power:
            return f"{_three(value / 1024**power)} {unit}"
    return f"{value:.0f} B"


def percent(value: float | None) -> str:
    """`0.13 %`, `27 %`; `-` where it is not known."""
    if value is None:
        return "-"
    value *= 100
    if value == 0 or value >= 9.95:
        return f"{value:.0f} %"
    return f"{value:.2f} %" if value < 0.995 else f"{value:.1f} %"


def duration(seconds: float) -> str:
    """`3 s`, `12 min`, `5.2 h`: the two figures that matter."""
    for size, unit in _SPANS:
        if seconds >= 2 * size:
            value = seconds / size
            return f"{value:.{1 if value < 9.95 and size > 60 else 0}f} {unit}"
    return f"{seconds:.0f} s"


def bar(value: float, cap: float, width: int, glyphs: Glyphs, mark: float | None = None) -> str:
    """How much of a cap is taken, so many characters wide. mark: a value to show on it."""
    filled = 0 if cap <= 0 else min(width, round(width * value / cap))
    cells = list(glyphs.full * filled + glyphs.empty * (width - filled))
    if mark is not None and 0 < mark < cap:
        cells[min(width - 1, round(width * mark / cap))] = glyphs.mark
    return "".join(cells)


def chart(values: Sequence[float], top: float, width: int, rows: int, glyphs: Glyphs) -> list[str]:
    """The last values as heights, of which `top` is the greatest; right-aligned, top row first."""
    last = len(glyphs.levels) - 1
    scale = (rows * (last + 1) - 1) / top if top > 0 else 0.0
    heights = [1 + round(min(value, top) * scale) for value in values[-width:]]
    drawn = []
    for row in reversed(range(rows)):
        above = (height - row * (last + 1) for height in heights)
        cells = (" " if left <= 0 else glyphs.levels[min(left - 1, last)] for left in above)
        drawn.append("".join(cells).rjust(width))
    return drawn


def wrapped(text: str, width: int, most: int) -> list[str]:
    """A text in at most so many lines; what is beyond is cut, and shows that it is."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".lstrip()
    if len(lines) > most:
        lines = [*lines[: most - 1], f"{lines[most - 1]} ..."]
    return [line if len(line) <= width else f"{line[: width - 3]}..." for line in lines]


def ranges(numbers: Sequence[int]) -> str:
    """`0-3, 7`: what may be hundreds of ranks."""
    if not numbers:
        return ""
    ordered = sorted(numbers)
    gaps = [(a, b) for a, b in pairwise(ordered) if b > a + 1]
    begins, ends = [ordered[0], *(b for _, b in gaps)], [*(a for a, _ in gaps), ordered[-1]]
    pairs = zip(begins, ends, strict=True)
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)


def _three(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
