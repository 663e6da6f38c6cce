"""A view as lines that fit a terminal: one column, or ranks beside the rest where there is room."""

from collections.abc import Sequence
from dataclasses import dataclass

from rollout_dispatcher.cli.top.history import Loss
from rollout_dispatcher.cli.top.line import Line, Style
from rollout_dispatcher.cli.top.ranks import Presence, RankRow, worst_first
from rollout_dispatcher.cli.top.reading import STAGES
from rollout_dispatcher.cli.top.view import Away, Level, View
from rollout_dispatcher.cli.top.words import (
    Glyphs,
    bar,
    chart,
    count,
    duration,
    nbytes,
    percent,
    ranges,
    wrapped,
)

#: A column is as wide as the least terminal; beyond it bars and curves would only grow apart.
COLUMN = 79
_TWO_COLUMNS = 2 * COLUMN
#: From so many lines on, parts stand apart.
_AIRY = 34
#: A chart takes the room that is left, up to so many lines.
_CHART_ROWS = 5
#: The ranks have at least so many lines, if need be those of the charts.
_LEAST_TABLE = 5
_LABEL = 11
_TABLE = (
    f"{'rank':>5}  {'':9}{'step':>7}{'computes':>11}{'for others':>12}{'for data':>10}"
    f"{'slowness':>11}{'seen':>10}"
)
_STATES = {
    Presence.CONNECTED: ("", Style.PLAIN),
    Presence.LEFT: ("left", Style.WARN),
    Presence.HUNG: ("hangs", Style.BAD),
    Presence.ABSENT: ("absent", Style.BAD),
    Presence.MISSING: ("missing", Style.BAD),
}


@dataclass(frozen=True, slots=True)
class Screen:
    """What is drawn on. height: None for as many lines as there are. offset: rows scrolled."""

    width: int
    height: int | None
    glyphs: Glyphs
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the column beside or above the ranks. airy: parts stand apart."""

    width: int
    glyphs: Glyphs
    airy: bool
    chart_rows: int


@dataclass(frozen=True, slots=True)
class Frame:
    """Lines of the screen's width, no more than its height. offset: rows scrolled, as far as there
    are any.
    """

    lines: list[Line]
    offset: int = 0


def frame(at: View, address: str, screen: Screen, away: Away | None = None) -> Frame:
    """A view on a screen."""
    wide = screen.width >= _TWO_COLUMNS
    airy = wide or screen.height is None or screen.height >= _AIRY
    width = COLUMN if wide else min(screen.width, COLUMN)
    gap = [Line()] if airy else []

    def body_of(chart_rows: int) -> list[Line]:
        return _parts(at, away, Shape(width, screen.glyphs, airy=airy, chart_rows=chart_rows))

    body, room = body_of(1), None
    if screen.height is not None:  # less title and keys
        room = screen.height - 2
        table = 0 if wide else len(gap) + len(at.rows) + 2
        spare = (room - len(body) - table) // len(STAGES)
        crowded = not wide and room - len(body) < _LEAST_TABLE
        body = body_of(0 if crowded else max(1, min(_CHART_ROWS, 1 + spare)))
        room = max(3, room - len(gap) - (0 if wide else len(body)))
    table_lines, offset = _ranks(at, screen, room)
    body = _beside(body, [*gap, *table_lines]) if wide else [*body, *gap, *table_lines]
    if screen.height is not None:
        padded = [*body, *[Line()] * screen.height]
        body = [*padded[: screen.height - 2], _keys()]
    lines = [_title(at, address, away, screen.width), *body]
    return Frame([line.fit(screen.width) for line in lines], offset)


def unanswered(address: str, screen: Screen, away: Away | None) -> Frame:
    """What is shown before there was any answer."""
    lines = [
        Line.of((f" dispatcher top  {address}", Style.TITLE)),
        Line(),
        *(_away(away, min(screen.width, COLUMN)) if away else []),
    ]
    return Frame([line.fit(screen.width) for line in lines[: screen.height]])


def _title(at: View, address: str, away: Away | None, width: int) -> Line:
    state = "no answer" if away else at.state if at.is_ready else f"{at.state}, not ready"
    left = f" dispatcher top  {address}  run {at.run_id[:8]}"
    right = f"  {state}  up {duration(at.uptime)}  {at.version} "
    if len(left) + len(right) > width:  # of the two the state
        left, right = left[: max(0, width - len(state) - 3)], f"  {state} "
    return Line.of((f"{left}{right:>{width - len(left)}}", Style.TITLE))


def _parts(at: View, away: Away | None, shape: Shape) -> list[Line]:
    width = shape.width
    parts = [
        _away(away, width) if away else [],
        _headline(at, width),
        _flow(at),
        [*_levels(at, shape), *_waits(at, width)],
        _curves(at, shape),
        _rest(at, width),
    ]
    lines: list[Line] = []
    for part in parts:
        lines += [*([Line()] if part and (shape.airy or not lines) else []), *part]
    return lines


def _away(away: Away, width: int) -> list[Line]:
    text = f"no answer since {away.since} ({duration(away.seconds)}): {away.why}; asking again"
    return [Line.of((line, Style.BAD)) for line in wrapped(text, width, 2)]


def _headline(at: View, width: int) -> list[Line]:
    measured, planned = at.losses["measured"], at.losses["planned"]
    loss = measured or planned
    if loss is None:
        return [_labelled("lost", "nothing is told before the first step", Style.DIM)]
    kind = "measured" if measured else "by the plans alone"
    bad = loss.share >= 0.1
    first = Line.of(
        ("lost".ljust(_LABEL), Style.DIM),
        (percent(loss.share), Style.BAD if bad else Style.STRONG),
        f" of the ranks' time, {kind}, over {_steps(loss)}",
    )
    return [first, *_blame(at, width, is_measured=measured is not None)]


def _steps(loss: Loss) -> str:
    steps = f"{loss.count} step{'' if loss.count == 1 else 's'}"
    return f"the last {steps}" if loss.lately else f"all {steps}"


def _blame(at: View, width: int, *, is_measured: bool) -> list[Line]:
    room = width - _LABEL
    if not is_measured:
        why = f"not measured: {at.why_not_measured or 'no step has been yet'}"
        return [_labelled("", line, Style.WARN) for line in wrapped(why, room, 2)]
    if not at.slow:
        return [_labelled("", "no rank is a tenth slower than the median rank", Style.DIM)]
    named = ", ".join(f"rank {row.dp_rank} takes {row.slowness:.2f}" for row in at.slow[:3])
    more = f", and {len(at.slow) - 3} more" if len(at.slow) > 3 else ""
    text = f"{named} times as long as the median{more}"
    return [_labelled("", line, Style.BAD) for line in wrapped(text, room, 2)]


def _flow(at: View) -> list[Line]:
    rates = [("steps", at.steps), ("samples", at.samples), ("tokens", at.tokens)]
    told = "   ".join(f"{'-' if rate is None else count(rate)} {name}/s" for name, rate in rates)
    over = f"over {duration(at.over)}" if at.over else ""
    flow = Line.of(("rate".ljust(_LABEL), Style.DIM), told, (f"   {over}", Style.DIM))
    version = "" if at.policy_version is None else f", trainer at version {at.policy_version}"
    steps = f"{at.steps_committed} committed, {at.open_steps} open with {at.in_flight} samples"
    return [flow, _labelled("steps", steps + version)]


def _levels(at: View, shape: Shape) -> list[Line]:
    ready, *held = at.levels
    lines = [_level(ready, shape, _window(ready))]
    lines += [_level(level, shape, _of_cap(level)) for level in held if level.cap]
    more = [_amount(level) + level.where for level in held if not level.cap]
    if at.open_groups:
        more.append(f"{at.open_groups} groups lack members")
    return [*lines, _labelled("held", ", ".join(more))] if more else lines


def _level(level: Level, shape: Shape, text: str) -> Line:
    cells = max(8, shape.width - _LABEL - 32)
    drawn = bar(level.value, level.cap or 0, cells, shape.glyphs, mark=level.window)
    return Line.of((level.name.ljust(_LABEL), Style.DIM), drawn, f"  {text}")


def _window(ready: Level) -> str:
    assert ready.cap is not None
    assert ready.window is not None
    text = f"{count(ready.value)} of window {count(ready.window)}"
    return text if ready.window >= ready.cap else f"{text}, cap {count(ready.cap)}"


def _of_cap(level: Level) -> str:
    assert level.cap is not None
    cap = nbytes(level.cap) if level.unit == "B" else count(level.cap)
    return f"{_amount(level)} of {cap}"


def _amount(level: Level) -> str:
    return nbytes(level.value) if level.unit == "B" else f"{count(level.value)} {level.unit}"


def _waits(at: View, width: int) -> list[Line]:
    if not at.delays:
        return [_labelled("next step", "waits for nobody", Style.GOOD)]
    told = [text + (f" ({duration(s)})" if s >= 1 else "") for text, s in at.delays]
    longest = max(seconds for _, seconds in at.delays)
    style = Style.BAD if longest >= 60 else Style.WARN if longest >= 10 else Style.PLAIN
    lines = wrapped("waits: " + "; ".join(told), width - _LABEL, 3)
    return _block("next step", lines, style)


def _curves(at: View, shape: Shape) -> list[Line]:
    """All on one scale, so that they can be held against each other."""
    if not shape.chart_rows:
        return []
    cells = max(8, shape.width - _LABEL - 20)
    top = max((value for curve in at.curves.values() for value in curve[-cells:]), default=0.0)
    lines = []
    for stage in STAGES:
        loss = at.losses[stage]
        *above, base = chart(at.curves[stage], top, cells, shape.chart_rows, shape.glyphs)
        margin = " " * (_LABEL + 9)
        lines += [Line.of(margin, row) for row in above]
        label = "imbalance" if stage == STAGES[0] else ""
        mean = percent(None if loss is None else loss.imbalance)
        start = Line.of((label.ljust(_LABEL), Style.DIM), f"{stage:<9}{base}  ")
        lines.append(start + Line.of(f"{mean:>7}"))
    return lines


def _rest(at: View, width: int) -> list[Line]:
    stale = "-" if at.staleness is None else f"{at.staleness:.1f} policy versions in the mean"
    held = "held back" if at.backpressure else "not held back"
    waiting = "1 push waits" if at.pushes_held == 1 else f"{at.pushes_held} pushes wait"
    pushes = f", {waiting} for room" if at.pushes_held else ""
    producers = f"{at.producers} connected, {held}{pushes}"
    dropped = sum(at.dropped.values())
    reasons = ", ".join(f"{number} {reason}" for reason, number in at.dropped.items())
    why = f": {reasons}" if reasons else ""
    drops = f"{dropped} of {at.accepted} accepted samples{why}"
    return [
        _labelled("staleness", stale),
        _labelled("producers", producers, Style.WARN if at.backpressure else Style.PLAIN),
        *_block("dropped", wrapped(drops, width - _LABEL, 2)),
    ]


def _block(label: str, lines: list[str], style: Style = Style.PLAIN) -> list[Line]:
    return [_labelled("" if at else label, line, style) for at, line in enumerate(lines)]


def _labelled(label: str, text: str, style: Style = Style.PLAIN) -> Line:
    return Line.of((label.ljust(_LABEL), Style.DIM), (text, style))


def _ranks(at: View, screen: Screen, room: int | None) -> tuple[list[Line], int]:
    """A header, as many rows as there is room for, the worst first where not all fit, and how far
    they are scrolled.
    """
    fits = room is None or len(at.rows) + 2 <= room
    shown, offset = at.rows, 0
    text = f"{at.ranks_connected} of {len(at.rows)} connected, generation {at.generation}"
    if room is not None and not fits:
        offset = min(screen.offset, len(at.rows) - (room - 2))
        shown = tuple(worst_first(at.rows)[offset : offset + room - 2])
        text += f"; worst first, {offset + 1} to {offset + len(shown)}"
    gone = [row.dp_rank for row in at.rows if row.presence < Presence.LEFT]
    there = f"; not there: {ranges(gone)}" if gone else ""
    head = Line.of(("ranks".ljust(_LABEL), Style.DIM), text, (there, Style.BAD))
    columns = Line.of((_TABLE, Style.DIM))
    return [head, columns, *(_row(row, screen.glyphs) for row in shown)], offset


def _row(row: RankRow, glyphs: Glyphs) -> Line:
    state, style = _STATES[row.presence]
    slowness = "-" if row.slowness is None else f"{row.slowness:.2f}"
    mark = f" {glyphs.slow}" if row.is_slow else "  "
    seen = "-" if row.seen is None else duration(row.seen)
    shares = f"{percent(row.compute):>11}{percent(row.others):>12}{percent(row.data):>10}"
    step = "-" if row.step is None else str(row.step)
    return Line.of(
        f"{row.dp_rank:>5}  ",
        (f"{state:9}", style),
        f"{step:>7}{shares}",
        (f"{slowness:>9}{mark}", Style.BAD if row.is_slow else Style.PLAIN),
        f"{seen:>10}",
    )


def _beside(left: Sequence[Line], right: Sequence[Line]) -> list[Line]:
    rows = max(len(left), len(right))
    padded = [*left, *[Line()] * (rows - len(left))], [*right, *[Line()] * (rows - len(right))]
    return [a.fit(COLUMN + 1) + b for a, b in zip(*padded, strict=True)]


def _keys() -> Line:
    return Line.of((" q quit   arrows and page keys scroll ranks", Style.DIM))
