"""The HTML page of a recorded run, without other files: tables, with bars for shares.

Invariant: it is made from the record alone, and marks what was planned, not measured. All text is
escaped. Colours are CSS classes (`c0`, `c1`, ...), for light and dark screens.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from itertools import accumulate

import numpy as np

from rollout_dispatcher.core.rank_time import MEANS, TimeCause
from rollout_dispatcher.record.recording import RecordedStep, Recording
from rollout_dispatcher.simulate.recorded import (
    Course,
    RankShare,
    lost_share,
    rank_shares,
    slowness,
    trained_steps,
)
from rollout_dispatcher.simulate.replay import Setting
from rollout_dispatcher.simulate.table import signed
from rollout_planner.types import FloatArray

#: The parts of rank time in the table of ranks.
RANK_TIME = ("work", "slow-rank, lengths", "waiting for a step")
#: Slowness, over the median rank's, from which on a rank is named.
SLOW = 1.1
#: The measure of the first tiles.
_LOST = "of the ranks' time in micro-batches lost to waiting for others"
#: Rows of the table over time; each is a mean over its steps.
MAX_PARTS = 12


@dataclass(frozen=True, slots=True)
class Bar:
    """A cell that draws shares of 1 side by side."""

    shares: Sequence[float]


Cell = str | Bar


def page(recording: Recording, setting: Setting) -> str:
    """The page of a recorded run. Raises ConfigError if no step was committed."""
    steps = trained_steps(recording)
    course = Course.of(steps, setting)
    ranks = rank_shares(recording, steps, setting)
    sections = [
        _recorded_tiles(recording, steps, course),
        _over_time(course),
        *([_cause_section(recording.rank_time)] if any(recording.rank_time.values()) else []),
        *([_rank_section(ranks)] if ranks else []),
        _counts(recording, steps, course),
    ]
    return document(
        f"What did balancing buy? {recording.name}", _head(recording, steps, setting), sections,
        "Made by <code>dispatcher report</code> from what <code>serve --record-dir</code> wrote.",
    )  # fmt: skip


def _head(recording: Recording, steps: list[RecordedStep], setting: Setting) -> list[str]:
    began, ended = (
        datetime.fromtimestamp(at, UTC) for at in (steps[0].at, steps[-1].committed or 0.0)
    )
    course = (
        f"{len(steps):,} steps of {sum(len(step.tickets) for step in steps):,} samples on "
        f"{steps[-1].dp_size} DP ranks, from {began:%Y-%m-%d %H:%M:%S} to "
        f"{ended:%Y-%m-%d %H:%M:%S} UTC, strategy {setting.strategy}, window {setting.window:g}, "
        f"sync {setting.plan.sync}"
    )
    lines = [course]
    if (count := len(recording.processes)) > 1:
        runs = len({header.run for header in recording.processes.values()})
        of_runs = "one run" if runs == 1 else f"{runs} runs (--run shows one of them)"
        lines.append(f"written by {count} processes, of {of_runs}")
    if recording.lost:
        lines.append(f"{recording.lost} events could not be written when it was recorded")
    return lines + recording.notes


def _recorded_tiles(recording: Recording, steps: list[RecordedStep], course: Course) -> str:
    fifo, planned, measured = map(course.lost, (course.fifo, course.planned, course.measured))
    fifo, planned = fifo or 0.0, planned or 0.0
    shown = []
    if measured is not None:
        shown.append((signed(measured), f"{_LOST}, measured"))
    shown.append((signed(planned), f"{_LOST}, as planned"))
    shown.append((signed(fifo), f"{_LOST}, had samples been dealt as they came"))
    bought = (1 - planned) / (1 - min(fifo, 0.999))
    shown.append((f"{bought:.2f} x", "training speed against that, as planned"))
    samples = recording.samples
    waits = [step.at - samples[step.run, ticket].at for step in steps for ticket in step.tickets]
    shown.append((f"{float(np.median(waits)):.1f} s", "median wait of a sample for its step"))
    return tiles(shown, _advice(steps, course, planned, measured))


def _advice(
    steps: list[RecordedStep], course: Course, planned: float, measured: float | None
) -> str:
    """What the figures ask for; it distinguishes a slow rank from a bad plan."""
    if measured is None:
        return (
            "No rank reported how long its micro-batches took, so this is what was planned: a rank "
            "that is slower than its cost says is not seen here."
        )
    slow = slowness(steps)
    if slow is not None and slow.max() > SLOW:
        return (
            f"DP rank {int(slow.argmax())} is slower than the others: for the same planned cost it "
            f"takes {slow.max():.2f} times as long as the median rank, and all others wait for it."
        )
    if measured - planned > max(0.02, planned / 5):
        return (
            "More was lost than planned, and no rank is slow: what ranks compute does not go by "
            "the cost model. See --cost."
        )
    known = ~np.isnan(course.measured)
    return f"Measured on {int(known.sum())} of {len(known)} steps; it is near to what was planned."


def _over_time(course: Course) -> str:
    """Means over neighbouring steps; `-` where nothing is known."""
    columns = [
        course.at, lost_share(course.measured), lost_share(course.planned),
        lost_share(course.fifo), lost_share(course.bound), course.fill,
    ]  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for part in np.array_split(np.arange(len(course.at)), min(MAX_PARTS, len(course.at))):
        at, *shares = (_mean(column[part]) for column in columns)
        cells = ("-" if share is None else signed(share) for share in shares)
        rows.append((f"{at or 0.0:,.0f}", *cells))
    return table(
        "What was lost to waiting for other ranks, over time?",
        "Share of the ranks' time in micro-batches. What is planned rests on the cost model, what "
        "is measured on the ranks' own clocks. Window: what a plan could choose from, over what a "
        "full one has; below 100 % ranks were hungry before it was full: rollouts are the "
        "bottleneck, or max_wait is short.",
        [
            ("since the first step", "s"), ("measured", ""), ("as planned", ""),
            ("dealt as they came", ""), ("the least possible", ""), ("window", ""),
        ],
        rows,
    )  # fmt: skip


def _mean(values: FloatArray) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def _cause_section(rank_time: Mapping[str, Mapping[str, float]]) -> str:
    """Rank time by cause, over all processes of the record."""
    spent = {cause: sum(each.get(cause, 0.0) for each in rank_time.values()) for cause in TimeCause}
    whole = sum(spent.values())
    return table(
        "Where did the ranks' time go?",
        "Each second of each DP rank since the first step, by its cause; shares are of all that "
        "time, those above of the time in micro-batches alone.",
        [("cause: a rank is", ""), ("rank time", "s"), ("share", "%")],
        [
            (f"{cause}: {MEANS[cause]}", f"{seconds:,.0f}", f"{100 * seconds / whole:.1f}")
            for cause, seconds in spent.items()
            if seconds
        ],
    )


def _rank_section(ranks: list[RankShare]) -> str:
    rows = [
        (
            str(each.rank), f"{each.work:.1f}", f"{each.stragglers:.1f}", f"{each.data:.1f}",
            f"{100 * each.stragglers / (each.work + each.stragglers or 1.0):.1f}", Bar(each.shares),
        )
        for each in ranks
    ]  # fmt: skip
    return table(
        "Who waits for whom?",
        f"As ranks measured it in {ranks[0].measured_steps:,} of {ranks[0].steps:,} steps. The "
        "rank that waits least is the one that the others wait for. What is left blank is neither: "
        "the optimizer, a weight sync, evaluation, or unreported time.",
        [
            ("DP rank", ""), *((name, "s") for name in RANK_TIME),
            ("lost", "%"), ("share of its time", ""),
        ],
        rows, RANK_TIME,
    )  # fmt: skip


def _counts(recording: Recording, steps: list[RecordedStep], course: Course) -> str:
    triggers = Counter(step.trigger for step in steps)
    rows = [[f"steps planned: {name}", f"{count:,}"] for name, count in triggers.most_common()]
    rows += [
        [f"steps delivered again: {name}", f"{count:,}"]
        for name, count in recording.redelivered.most_common()
    ]
    dropped = recording.dropped.most_common() or [("none", 0)]
    rows += [[f"samples dropped: {name}", f"{count:,}"] for name, count in dropped]
    if not np.isnan(course.stale).all():
        rows.append(["policy versions behind, mean", f"{np.nanmean(course.stale):.2f}"])
        rows.append(["the same, largest step's mean", f"{np.nanmax(course.stale):.2f}"])
    return table("What else happened?", "", [("what", ""), ("count", "")], rows)


# -- HTML -------------------------------------------------------------------------------------


def document(title: str, head: Iterable[str], sections: Iterable[str], footer: str) -> str:
    """The whole page. head: lines under the title; footer: HTML."""
    return _DOCUMENT.format(
        title=escape(title),
        style=_STYLE,
        head="".join(f"<p>{escape(line)}</p>" for line in head),
        body="\n".join(sections),
        footer=footer,
    )


def tiles(shown: Sequence[tuple[str, str]], advice: str) -> str:
    """Figures with their meaning, and the advice that follows from them."""
    cells = "".join(f"<div><b>{escape(value)}</b>{escape(text)}</div>" for value, text in shown)
    return f"<section class='tiles'>{cells}</section><p class='advice'>{escape(advice)}</p>"


def table(
    title: str,
    text: str,
    head: Sequence[tuple[str, str]] = (),
    rows: Iterable[Sequence[Cell]] = (),
    kinds: Sequence[str] = (),
) -> str:
    """A question, an explanation, and the rows that answer it.

    head: each column's heading and unit. kinds: names of the parts of bars.
    """
    heads = "".join(f"<th>{escape(name)}<small>{escape(unit)}</small></th>" for name, unit in head)
    lines = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    legend = "".join(f"<span class='c{at}'>{escape(kind)}</span>" for at, kind in enumerate(kinds))
    return (
        f"<section><h2>{escape(title)}</h2><p>{escape(text)}</p><p class='legend'>{legend}</p>"
        f"<div class='scroll'><table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>"
        "</div></section>"
    )


def _cell(cell: Cell) -> str:
    if not isinstance(cell, Bar):
        return f"<td>{escape(cell)}</td>"
    ends = [100 * min(end, 1.0) for end in accumulate(cell.shares)]
    parts = "".join(
        f"<i class='c{at}' style='width:{max(0.0, end - start):.2f}%' title='{100 * share:.3g} %'>"
        "</i>"
        for at, (start, end, share) in enumerate(zip([0.0, *ends], ends, cell.shares, strict=False))
    )
    return f"<td class='bar'>{parts}</td>"


_STYLE = """
:root { color-scheme: light dark; } h2 { font-size: 17px; margin: 0; } p { margin: 0; }
body { margin: 0 auto; max-width: 1000px; padding: 32px 16px; font: 15px/1.5 sans-serif; }
section { margin: 24px 0 0; padding-top: 16px; border-top: 1px solid #8884; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); gap: 16px; }
.tiles b { display: block; font-size: 24px; } .advice { margin: 16px 0 0; font-weight: 600; }
.c0 { --c: #3b82f6; } .c1 { --c: #d9822b; } .c2 { --c: #8a94a0; }
.legend span { margin-right: 16px; } .legend span::before { content: "\\25A0  "; color: var(--c); }
.bar { min-width: 160px; white-space: nowrap; font-size: 0; text-align: left; }
.bar i { display: inline-block; height: 14px; background: var(--c); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: right; padding: 4px 8px; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; } small { display: block; font-weight: 400; }
footer { margin-top: 24px; }
"""

_DOCUMENT = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{title}</h1>{head}</header>
{body}
<footer>{footer}</footer>
</body>
</html>
"""
