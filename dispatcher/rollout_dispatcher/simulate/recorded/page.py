"""The page of a recorded run: what balancing bought, by rank and over time.

Invariant: it is made from the record alone, and says where something was planned, not measured.
"""

from collections import Counter
from datetime import UTC, datetime

import numpy as np

from rollout_dispatcher.record.recording import RecordedStep, Recording
from rollout_dispatcher.simulate.recommend import percent
from rollout_dispatcher.simulate.recorded.arrivals import trained_steps
from rollout_dispatcher.simulate.recorded.charts import lines_plot
from rollout_dispatcher.simulate.recorded.course import (
    Course,
    RankShare,
    lost_share,
    rank_shares,
    slowness,
)
from rollout_dispatcher.simulate.replay.virtual import Setting
from rollout_dispatcher.simulate.report.charts import shares_plot
from rollout_dispatcher.simulate.report.parts import document, figure, table, tiles

#: A rank that takes this many times the median rank's time for its cost is worth a word.
SLOW = 1.1
FOOTER = "Made by <code>dispatcher report</code> from what <code>serve --record</code> wrote."


def recorded_page(recording: Recording, setting: Setting) -> str:
    """A whole HTML document. Raises ConfigError if no step was committed."""
    steps = trained_steps(recording)
    course = Course.of(steps, setting)
    ranks = rank_shares(recording, steps, setting)
    sections = [_tiles(recording, steps, course), _lost_section(course)]
    if ranks:
        sections += [_rank_section(ranks), _rank_table(ranks)]
    sections += [_window_section(course), _stale_section(course), _counts(recording, steps)]
    title = f"What did balancing buy? {recording.name}"
    return document(title, _head(recording, steps, setting), filter(None, sections), FOOTER)


def _head(recording: Recording, steps: list[RecordedStep], setting: Setting) -> list[str]:
    began, ended = (
        datetime.fromtimestamp(at, UTC) for at in (steps[0].at, steps[-1].committed or 0.0)
    )
    samples = sum(len(step.tickets) for step in steps)
    course = (
        f"{len(steps):,} steps of {samples:,} samples on {steps[-1].dp_size} DP ranks, from "
        f"{began:%Y-%m-%d %H:%M:%S} to {ended:%Y-%m-%d %H:%M:%S} UTC, strategy "
        f"{setting.strategy}, window {setting.window:g}, sync {setting.plan.sync}"
    )
    lines = [course]
    if (count := len(recording.processes)) > 1:
        runs = len(recording.runs)
        of_runs = "one run" if runs == 1 else f"{runs} runs (--run shows one of them)"
        lines.append(f"written by {count} processes, of {of_runs}")
    if recording.lost:
        lines.append(f"{recording.lost} events could not be written when it was recorded")
    return lines + recording.notes


def _tiles(recording: Recording, steps: list[RecordedStep], course: Course) -> str:
    fifo, planned, measured = map(course.lost, (course.fifo, course.planned, course.measured))
    shown = []
    if measured is not None:
        shown.append((percent(measured), "of rank time lost to waiting for others, measured"))
    planned_words = "of it, as planned" if shown else "of rank time lost to waiting, as planned"
    shown.append((percent(planned or 0.0), planned_words))
    shown.append((percent(fifo or 0.0), "had samples been dealt as they came"))
    bought = (1 - (planned or 0.0)) / (1 - min(fifo or 0.0, 0.999))
    shown.append((f"{bought:.2f} x", "training speed against that, as planned"))
    samples = recording.samples
    waits = [step.at - samples[step.run, ticket].at for step in steps for ticket in step.tickets]
    shown.append((f"{float(np.median(waits)):.1f} s", "median wait of a sample for its step"))
    return tiles(shown, _advice(steps, course, planned or 0.0, measured))


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


def _lost_section(course: Course) -> str:
    lines = [
        ("round-robin", "dealt as they came", lost_share(course.fifo)),
        ("window", "as planned", lost_share(course.planned)),
        ("bound", "the least possible", lost_share(course.bound)),
    ]
    if not np.isnan(course.measured).all():
        lines.insert(2, ("kk", "measured", lost_share(course.measured)))
    return figure(
        "What was lost to waiting for other ranks, over time?",
        "Share of rank time. What is planned rests on the cost model, what is measured on the "
        "ranks' own clocks.",
        lambda width: lines_plot("time lost over time", "time lost", course.at, lines, width=width),
    )


def _rank_section(ranks: list[RankShare]) -> str:
    by = _told_by(ranks[0])
    rows = [(f"rank {each.rank}", each.shares) for each in ranks]
    label = "share of its time"
    return figure(
        "Who waits for whom?",
        f"Work and waiting for other ranks are {by}. The rank that waits least is the one that "
        "the others wait for. What is left blank is neither: the optimizer, a weight sync, "
        "evaluation, or a time that nobody told.",
        lambda width: shares_plot("what each rank does with its time", label, rows, width),
    )


def _told_by(share: RankShare) -> str:
    if share.measured_steps == share.steps:
        return "measured by the ranks"
    others = "by the plans' costs"
    if not share.measured_steps:
        return others
    measured = f"{share.measured_steps:,} of {share.steps:,} steps"
    return f"measured by the ranks in {measured}, and {others} in the others"


def _rank_table(ranks: list[RankShare]) -> str:
    head = [("DP rank", ""), ("at work", "s"), ("for ranks", "s"), ("for data", "s"), ("lost", "%")]
    rows = [
        [
            str(each.rank), f"{each.work:.1f}", f"{each.stragglers:.1f}", f"{each.data:.1f}",
            f"{100 * each.stragglers / (each.work + each.stragglers or 1.0):.1f}",
        ]
        for each in ranks
    ]  # fmt: skip
    return table("By rank", head, rows)


def _window_section(course: Course) -> str:
    lines = [("window", "eligible samples when planned", course.fill)]
    return figure(
        "Was the window full?",
        "What a plan could choose from, over what a full window has. Below 100 % ranks were "
        "hungry before it was full: rollouts are the bottleneck, or max_wait is short.",
        lambda width: lines_plot(
            "window fill over time", "fill", course.at, lines, width=width, most=1.0
        ),
    )


def _stale_section(course: Course) -> str:
    if np.isnan(course.stale).all():
        return ""
    mean = float(np.nanmean(course.stale))
    return table(
        "How stale?",
        [("policy versions behind", ""), ("mean", ""), ("largest step's mean", "")],
        [["of the samples trained on", f"{mean:.2f}", f"{float(np.nanmax(course.stale)):.2f}"]],
    )


def _counts(recording: Recording, steps: list[RecordedStep]) -> str:
    triggers = Counter(step.trigger for step in steps)
    rows = [[f"steps planned: {name}", f"{count:,}"] for name, count in triggers.most_common()]
    rows += [
        [f"steps delivered again: {name}", f"{count:,}"]
        for name, count in recording.redelivered.most_common()
    ]
    dropped = recording.dropped.most_common() or [("none", 0)]
    rows += [[f"samples dropped: {name}", f"{count:,}"] for name, count in dropped]
    return table("What else happened?", [("what", ""), ("count", "")], rows)
