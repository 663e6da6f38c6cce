"""The HTML report: one page that needs no other file, in the reader's light or dark.

Invariant: it is made from a `Result` alone, so a saved one gives the same page.
"""

from rollout_dispatcher.simulate.recommend import percent
from rollout_dispatcher.simulate.report.charts import (
    delay_plot,
    excess_plot,
    lengths_plot,
    ranks_plot,
    timing_plot,
    windows,
)
from rollout_dispatcher.simulate.report.parts import document, figure, table, tiles
from rollout_dispatcher.simulate.result import Result, Run
from rollout_dispatcher.simulate.table import columns_for, headline, rows_of
from rollout_planner.strategies import looks_ahead
from rollout_planner.types import Strategy


def page(result: Result) -> str:
    """A whole HTML document."""
    focus = _focus(result)
    sections = [_tiles(result, focus)]
    if any(run.timing for run in result.runs):
        sections.append(_time_section(result))
    sections += [
        figure(
            "What does a larger window give?",
            "Straggler excess is the time ranks spend waiting for each other, over the time of "
            "the work itself. Dashed: strategies that take the oldest samples and never choose.",
            lambda width: excess_plot(result.runs, width),
        ),
        _step_section(result, focus),
    ]
    if windows(result.runs):
        sections.append(_delay_section(result))
    sections.append(
        figure(
            "Does choosing bend the lengths that the trainer sees?",
            _distance(focus),
            lambda width: lengths_plot(result, focus, width),
        )
    )
    sections.append(_table(result))
    title = f"Which window? {result.trace.name}"
    return document(
        title, headline(result), sections,
        "Made by <code>dispatcher simulate</code>: the planner and triggers of <code>dispatcher "
        "serve</code>, under a virtual clock.",
    )  # fmt: skip


def _focus(result: Result) -> Run:
    """The row that the report looks at closely: recommended, or the best window, or the best."""
    candidates = windows(result.runs) or list(result.runs)
    if result.recommendation is not None:
        wanted = result.recommendation.window
        candidates = [run for run in candidates if run.window == wanted] or candidates
    return min(candidates, key=lambda run: run.time)


def _name(run: Run) -> str:
    return f"{run.strategy} {run.window:g}" if looks_ahead(run.strategy) else run.strategy


def _distance(focus: Run) -> str:
    if focus.ks_fifo == 0.0:
        return "There are too few steps to say by how much: it takes more than 20 dispatches."
    return (
        "Over 20 dispatches the lengths that left differ from the trace's by a "
        f"Kolmogorov-Smirnov distance of {focus.ks:.4f}; as many samples in the order of arrival "
        f"differ by {focus.ks_fifo:.4f}."
    )


def _tiles(result: Result, focus: Run) -> str:
    plain = next((run for run in result.runs if run.strategy == Strategy.ROUND_ROBIN), None)
    shown = [(percent(focus.excess), f"straggler excess, {_name(focus)}")]
    if plain is not None and plain is not focus:
        shown.append((percent(plain.excess), "straggler excess, samples dealt as they come"))
        shown.append((f"{plain.time / focus.time:.2f} x", "training speed against that"))
    shown.append((f"{focus.delay.mean:.2f}", "dispatches a sample is held back, mean"))
    shown.append((f"{focus.delay.max:.0f}", f"at most, of {focus.max_skips} allowed"))
    if focus.timing is not None:
        shown.append((f"{focus.timing.wait.median:.0f} s", "median wait of a sample"))
    why = result.recommendation
    return tiles(shown, advice="" if why is None else why.why)


def _step_section(result: Result, focus: Run) -> str:
    plain = next((run for run in result.runs if run.strategy == Strategy.ROUND_ROBIN), focus)
    before = focus.example.plain if plain is focus else plain.example.planned
    return figure(
        "How does one step look?",
        "A step whose excess is near that of all steps, rank by rank: left without balancing, "
        "right with it. Solid: at work. Pale: waiting. Broken line: what perfect balance takes.",
        lambda width: ranks_plot(before, focus.example.planned, width),
    )


def _time_section(result: Result) -> str:
    return figure(
        "What do ranks do with their time?",
        "Samples come at the times of the trace. Waiting for data is the producers' doing, "
        "waiting for other ranks is what balancing takes away.",
        lambda width: timing_plot(rows_of(result), width),
    )


def _delay_section(result: Result) -> str:
    return figure(
        "How long are samples held back?",
        "A window of W dispatch batches holds samples back for W - 1 dispatches on average, "
        "whatever is chosen; what choosing shapes is the tail, and max_skips ends it.",
        lambda width: delay_plot(result.runs, width),
    )


def _table(result: Result) -> str:
    columns = columns_for(result)
    head = [(heading, unit) for heading, unit, _ in columns]
    rows = [[show(run) for _, _, show in columns] for run in rows_of(result)]
    return table("All figures", head, rows)
