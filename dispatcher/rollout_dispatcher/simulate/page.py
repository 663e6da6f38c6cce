"""The HTML pages, each of which needs no other file: of a simulation, and of a recorded run.

Invariant: a simulation's is made from its `Result` alone, so a saved one gives the same page; a
recorded run's from the record alone, and says where something was planned, not measured.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import pairwise

import numpy as np

from rollout_dispatcher.record.recording import RecordedStep, Recording
from rollout_dispatcher.simulate.charts import bar_chart, line_chart, percent_tick, thousands
from rollout_dispatcher.simulate.recorded import (
    Course,
    RankShare,
    lost_share,
    rank_shares,
    slowness,
    trained_steps,
)
from rollout_dispatcher.simulate.replay import Setting
from rollout_dispatcher.simulate.result import Result, Run
from rollout_dispatcher.simulate.table import columns_for, headline, rows_of, signed
from rollout_planner.strategies import looks_ahead
from rollout_planner.types import FloatArray, Strategy

#: What becomes of rank time.
RANK_TIME = ("at work", "waiting for other ranks", "waiting for data")
#: A rank that takes this many times the median rank's time for its cost is worth a word.
SLOW = 1.1
#: Points of a line over time; more steps than that are averaged.
MAX_POINTS = 120
#: Bars of a chart; of more DP ranks those that work most and those that work least are shown.
MAX_BARS = 32
#: Shares smaller than this are drawn as this on a logarithmic scale.
_LEAST_SHARE = 1e-4


def page(result: Result) -> str:
    """The page of a simulation."""
    candidates = windows(result.runs) or list(result.runs)
    if result.recommendation is not None:
        wanted = result.recommendation.window
        candidates = [run for run in candidates if run.window == wanted] or candidates
    focus = min(candidates, key=lambda run: run.time)
    columns = columns_for(result)
    sections = [_tiles_of(result, focus)]
    if any(run.timing for run in result.runs):
        sections.append(_time_section(rows_of(result)))
    sections += [_excess_section(result.runs), _step_section(result, focus)]
    if windows(result.runs):
        sections.append(_delay_section(windows(result.runs)))
    sections += [
        _lengths_section(result, focus),
        table(
            "All figures",
            [(heading, unit) for heading, unit, _ in columns],
            [[show(run) for _, _, show in columns] for run in rows_of(result)],
        ),
    ]
    return document(
        f"Which window? {result.trace.name}", headline(result), sections,
        "Made by <code>dispatcher simulate</code>: the planner and triggers of <code>dispatcher "
        "serve</code>, under a virtual clock.",
    )  # fmt: skip


def windows(runs: Sequence[Run]) -> list[Run]:
    """The rows that choose from a window, by its size."""
    return sorted((run for run in runs if looks_ahead(run.strategy)), key=lambda run: run.window)


def _name(run: Run) -> str:
    return f"{run.strategy} {run.window:g}" if looks_ahead(run.strategy) else run.strategy


def _tiles_of(result: Result, focus: Run) -> str:
    plain = next((run for run in result.runs if run.strategy == Strategy.ROUND_ROBIN), None)
    shown = [(signed(focus.excess), f"straggler excess, {_name(focus)}")]
    if plain is not None and plain is not focus:
        shown.append((signed(plain.excess), "straggler excess, samples dealt as they come"))
        shown.append((f"{plain.time / focus.time:.2f} x", "training speed against that"))
    shown.append((f"{focus.delay.mean:.2f}", "dispatches a sample is held back, mean"))
    shown.append((f"{focus.delay.max:.0f}", f"at most, of {focus.max_skips} allowed"))
    if focus.timing is not None:
        shown.append((f"{focus.timing.wait.median:.0f} s", "median wait of a sample"))
    return tiles(shown, result.recommendation.why if result.recommendation else "")


def _time_section(runs: Sequence[Run]) -> str:
    rows = [
        (
            f"{run.strategy} {run.window:g}",
            (run.timing.busy, run.timing.waiting_for_stragglers, run.timing.waiting_for_data),
        )
        for run in runs
        if run.timing is not None
    ]
    return figure(
        "What do ranks do with their time?",
        "Samples come at the times of the trace. Waiting for data is the producers' doing, "
        "waiting for other ranks is what balancing takes away.",
        bar_chart("what ranks do with their time", "share of rank time", RANK_TIME, rows),
    )


def _excess_section(runs: Sequence[Run]) -> str:
    chosen = windows(runs)
    plain = [run for run in runs if not looks_ahead(run.strategy)]
    values = [max(run.excess, _LEAST_SHARE) for run in (*chosen, *plain)]
    log = max(values) > 20 * min(values)

    def point(run: Run) -> tuple[float, float]:
        return run.window, max(run.excess, _LEAST_SHARE) if log else run.excess

    series = [("window", [point(run) for run in chosen])] if chosen else []
    series += [(f"{run.strategy} {signed(run.excess)}", [point(run)]) for run in plain]
    return figure(
        "What does a larger window give?",
        "Straggler excess is the time ranks spend waiting for each other, over the time of the "
        "work itself. Level lines: strategies that take the oldest samples and never choose.",
        line_chart(
            "straggler excess against window multiple",
            ("window, in dispatch batches", "straggler excess"),
            series,
            log=(False, log),
        ),
    )


def _step_section(result: Result, focus: Run) -> str:
    plain = next((run for run in result.runs if run.strategy == Strategy.ROUND_ROBIN), focus)
    before = focus.example.plain if plain is focus else plain.example.planned
    series = [
        (
            f"{work.name}: {signed(max(work.time - 1, 0))} excess",
            [(float(at), own) for at, own in enumerate(sorted(work.ranks, reverse=True), 1)],
        )
        for work in (focus.example.planned, before)
    ]
    return figure(
        "How does one step look?",
        "A step whose excess is near that of all steps: the work of each rank, the largest first. "
        "Level at 1 is perfect balance; all ranks wait for the first.",
        line_chart(
            "work of each DP rank in one step",
            ("DP ranks", "work, fair share = 1"),
            series,
            shows=("{:g}".format, "{:g}".format),
        ),
    )


def _delay_section(chosen: Sequence[Run]) -> str:
    series = [
        (
            f"window {run.window:g}, mean {run.delay.mean:.2f}",
            [
                (float(k), sum(run.delays[k:]) / (sum(run.delays) or 1))
                for k in range(len(run.delays))
            ],
        )
        for run in chosen
    ]
    return figure(
        "How long are samples held back?",
        "A window of W dispatch batches holds samples back for W - 1 dispatches on average, "
        "whatever is chosen; what choosing shapes is the tail, and max_skips "
        f"({chosen[0].max_skips}) ends it.",
        line_chart(
            "share of samples by dispatches that passed them over",
            ("passed over at least so many times", "share of samples"),
            series,
            log=(False, True),
        ),
    )


def _lengths_section(result: Result, focus: Run) -> str:
    edges = result.trace.edges
    middles = [(low * high) ** 0.5 for low, high in pairwise(edges)]
    lengths = {f"window {focus.window:g}": focus.lengths, "the trace": result.trace.lengths}
    series = [(name, list(zip(middles, each, strict=True))) for name, each in lengths.items()]
    text = "There are too few steps to say by how much: it takes more than 20 dispatches."
    if focus.ks_fifo:
        text = (
            "Over 20 dispatches the lengths that left differ from the trace's by a "
            f"Kolmogorov-Smirnov distance of {focus.ks:.4f}; as many samples in the order of "
            f"arrival differ by {focus.ks_fifo:.4f}."
        )
    return figure(
        "Does choosing bend the lengths that the trainer sees?",
        text,
        line_chart(
            "lengths that arrived and lengths that were dispatched",
            ("tokens of a sample", "share of samples"),
            series,
            shows=(thousands, percent_tick),
            log=(True, False),
        ),
    )


# -- a recorded run ---------------------------------------------------------------------------


def recorded_page(recording: Recording, setting: Setting) -> str:
    """The page of a recorded run. Raises ConfigError if no step was committed."""
    steps = trained_steps(recording)
    course = Course.of(steps, setting)
    ranks = rank_shares(recording, steps, setting)
    lost = [
        ("dealt as they came", lost_share(course.fifo)),
        ("as planned", lost_share(course.planned)),
        ("measured", lost_share(course.measured)),
        ("the least possible", lost_share(course.bound)),
    ]
    sections = [
        _recorded_tiles(recording, steps, course),
        figure(
            "What was lost to waiting for other ranks, over time?",
            "Share of rank time. What is planned rests on the cost model, what is measured on the "
            "ranks' own clocks.",
            _over_time("time lost over time", "time lost", course.at, lost),
        ),
        *(_rank_sections(ranks) if ranks else []),
        figure(
            "Was the window full?",
            "What a plan could choose from, over what a full window has. Below 100 % ranks were "
            "hungry before it was full: rollouts are the bottleneck, or max_wait is short.",
            _over_time(
                "window fill over time", "fill", course.at,
                [("eligible samples when planned", course.fill)], top=1.0,
            ),
        ),
        _counts(recording, steps, course),
    ]  # fmt: skip
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
        runs = len(recording.runs)
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
        shown.append((signed(measured), "of rank time lost to waiting for others, measured"))
    planned_words = "of it, as planned" if shown else "of rank time lost to waiting, as planned"
    shown.append((signed(planned), planned_words))
    shown.append((signed(fifo), "had samples been dealt as they came"))
    bought = (1 - planned) / (1 - min(fifo, 0.999))
    shown.append((f"{bought:.2f} x", "training speed against that, as planned"))
    samples = recording.samples
    waits = [step.at - samples[step.run, ticket].at for step in steps for ticket in step.tickets]
    shown.append((f"{float(np.median(waits)):.1f} s", "median wait of a sample for its step"))
    return tiles(shown, _advice(steps, course, planned, measured))


def _advice(
    steps: list[RecordedStep], course: Course, planned: float, measured: float | None
) -> str:
    """What the figures ask for, in a sentence; a slow rank is told from a bad plan."""
    if measured is None:
        return (
            "No rank told how long its micro-batches took, so this is what was planned: a rank "
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


def _rank_sections(ranks: list[RankShare]) -> list[str]:
    first, by = ranks[0], "measured by the ranks"
    if first.measured_steps < first.steps:
        told = f"{by} in {first.measured_steps:,} of {first.steps:,} steps, and "
        by = f"{told if first.measured_steps else ''}by the plans' costs"
        by += " in the others" if first.measured_steps else ""
    shown = ranks
    if len(ranks) > MAX_BARS:
        by_work = sorted(ranks, key=lambda each: -each.work)
        shown = by_work[: MAX_BARS // 2] + by_work[-MAX_BARS // 2 :]
    rows = [(f"rank {each.rank}", each.shares) for each in shown]
    figures = [
        [
            str(each.rank), f"{each.work:.1f}", f"{each.stragglers:.1f}", f"{each.data:.1f}",
            f"{100 * each.stragglers / (each.work + each.stragglers or 1.0):.1f}",
        ]
        for each in ranks
    ]  # fmt: skip
    head = [("DP rank", ""), ("at work", "s"), ("for ranks", "s"), ("for data", "s"), ("lost", "%")]
    return [
        figure(
            "Who waits for whom?",
            f"Work and waiting for other ranks are {by}. The rank that waits least is the one that "
            "the others wait for. What is left blank is neither: the optimizer, a weight sync, "
            "evaluation, or a time that nobody told.",
            bar_chart("what each rank does with its time", "share of its time", RANK_TIME, rows),
        ),
        table("By rank", head, figures),
    ]


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
    return table("What else happened?", [("what", ""), ("count", "")], rows)


def _over_time(
    title: str,
    label: str,
    at: FloatArray,
    columns: Sequence[tuple[str, FloatArray]],
    *,
    top: float = 0.0,
) -> str:
    """Lines over the steps; those of which nothing is known are left out."""
    units = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
    unit, per_unit = next(each for each in units if at[-1] >= 3 * each[1] or each[1] == 1)
    series = [
        (name, _averaged(at / per_unit, values))
        for name, values in columns
        if not np.isnan(values).all()
    ]
    return line_chart(title, (f"{unit} since the first step", label), series, top=top)


def _averaged(at: FloatArray, values: FloatArray) -> list[tuple[float, float]]:
    """Means over as many neighbours as it takes; what is not known is left out."""
    known = ~np.isnan(values)
    parts = min(MAX_POINTS, int(known.sum()))
    columns = (np.array_split(each[known], parts) for each in (at, values))
    return [(float(a.mean()), float(b.mean())) for a, b in zip(*columns, strict=True)]


# -- what pages are made of -------------------------------------------------------------------


def document(title: str, head: Iterable[str], sections: Iterable[str], footer: str) -> str:
    """A whole page. head: lines under the title; footer: HTML."""
    return _DOCUMENT.format(
        title=escape(title),
        style=_STYLE,
        head="".join(f"<p>{escape(line)}</p>" for line in head),
        body="\n".join(sections),
        footer=footer,
    )


def figure(title: str, text: str, chart: str) -> str:
    """A question, what is to be seen, and the chart that answers it."""
    caption = f"<figcaption><h2>{escape(title)}</h2><p>{escape(text)}</p></figcaption>"
    return f"<figure>{caption}{chart}</figure>"


def tiles(shown: Sequence[tuple[str, str]], advice: str = "") -> str:
    """Figures with a word for each, and what follows from them."""
    cells = "".join(f"<div><b>{escape(value)}</b>{escape(text)}</div>" for value, text in shown)
    said = f"<p class='advice'>{escape(advice)}</p>" if advice else ""
    return f"<section class='tiles'>{cells}</section>{said}"


def table(title: str, head: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> str:
    """head: each column's heading and unit."""
    heads = "".join(f"<th>{escape(name)}<small>{escape(unit)}</small></th>" for name, unit in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f"<figure><h2>{escape(title)}</h2><div class='scroll'><table><thead><tr>{heads}</tr>"
        f"</thead><tbody>{lines}</tbody></table></div></figure>"
    )


_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5c6570; --hair: #dfe2e5; --page: #fff;
  --c0: #1f6feb; --c1: #d9822b; --c2: #8a94a0; --c3: #0f8a6a; --c4: #a0449b; --c5: #8a6d3b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --soft: #9aa4af; --hair: #2b3139;
  --page: #0f1216; --c0: #6aa8ff; --c1: #fb9f4b; --c3: #3cc7a0; --c4: #dd8ad8; --c5: #d2b072; } }
body { margin: 0 auto; max-width: 900px; padding: 32px 16px; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h2 { font-size: 17px; margin: 0; } p, small, footer, .tiles div { color: var(--soft); margin: 0; }
figure { margin: 24px 0 0; padding-top: 16px; border-top: 1px solid var(--hair); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); gap: 16px;
  margin: 24px 0; } .tiles b { display: block; font-size: 24px; color: var(--ink); }
.advice { border-left: 3px solid var(--c0); padding-left: 12px; color: var(--ink); }
svg { display: block; width: 100%; } svg text { font-size: 12px; fill: var(--soft); }
.grid { stroke: var(--hair); } .axis { stroke: var(--soft); } .line { fill: none; stroke-width: 2; }
.legend span { margin-right: 16px; } .legend span::before { content: "\\25A0  "; color: var(--c); }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); }
.c4 { --c: var(--c4); } .c5, .c6, .c7, .c8, .c9 { --c: var(--c5); }
.line { stroke: var(--c); } rect, circle { fill: var(--c); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: right; padding: 4px 8px; border-bottom: 1px solid var(--hair); }
th:first-child, td:first-child { text-align: left; } small { display: block; font-weight: 400; }
footer { margin-top: 24px; font-size: 13px; }
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
