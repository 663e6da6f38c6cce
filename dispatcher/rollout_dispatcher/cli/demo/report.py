"""The demo's table, from the ranks' records and the dispatcher's metrics.

Every figure is measured, except the share lost as planned, which is the dispatcher's estimate.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

Record = dict[str, float]
#: Steps at the end of a run over which the final loss is averaged.
LAST_STEPS = 5


def summarise(folder: Path) -> dict[str, Any]:
    """The figures of one run, from `rank*.jsonl` and `metrics.txt`."""
    ranks = [_records(path) for path in sorted(folder.glob("rank*.jsonl"))]
    steps = list(zip(*ranks, strict=True))
    seconds = max(_total(rank, "step_s") for rank in ranks)
    everything = [record for rank in ranks for record in rank]
    spent = _total(everything, "step_s")
    return {
        "steps": len(steps),
        "tokens": int(_total(everything, "tokens")),
        "seconds": seconds,
        "tokens_per_second": _total(everything, "tokens") / seconds,
        "wait_share": _total(everything, "wait_s") / spent,
        "wait_share_per_rank": [_total(r, "wait_s") / _total(r, "step_s") for r in ranks],
        "data_wait_share": _total(everything, "data_s") / spent,
        "reduce_share": _total(everything, "reduce_s") / spent,
        "compute_seconds_per_rank": [_total(rank, "compute_s") for rank in ranks],
        "compute_cpu_seconds_per_rank": [_total(rank, "cpu_s") for rank in ranks],
        "first_loss": _mean_loss(steps[:1]),
        "final_loss": _mean_loss(steps[-LAST_STEPS:]),
        "lost_planned": _lost_planned(folder.joinpath("metrics.txt").read_text()),
    }


def _records(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _total(records: Iterable[Record], name: str) -> float:
    return sum(record[name] for record in records)


def _mean_loss(steps: Sequence[tuple[Record, ...]]) -> float:
    records = [record for step in steps for record in step]
    return _total(records, "loss_sum") / _total(records, "loss_tokens")


def _lost_planned(text: str) -> float:
    """Share of the ranks' time lost to waiting, as planned."""
    cost = {
        sample.labels["split"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "dispatcher_planned_cost_total"
    }
    return 1 - cost["even"] / cost["planned"]


def table(results: Mapping[str, Any]) -> str:
    """A row for each figure, a column for each strategy, within 80 characters."""
    runs: Mapping[str, Any] = results["strategies"]
    ranks = range(max(len(run["wait_share_per_rank"]) for run in runs.values()))
    rows = [("", *runs)]
    rows += [(title, *(show(run) for run in runs.values())) for title, show in _rows(ranks)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(["", *lines, ""])


#: A figure's title, with its unit, and how a column shows it.
_Row = tuple[str, Callable[[Mapping[str, Any]], str]]


def _rows(ranks: Iterable[int]) -> list[_Row]:
    """One row per figure; figures of ranks, one row per rank."""
    return [
        ("tokens/s", lambda run: f"{run['tokens_per_second']:,.0f}"),
        ("time waiting for other ranks, %", _percent("wait_share")),
        *_each(ranks, "wait_share_per_rank", 100),
        ("time waiting for data, %", _percent("data_wait_share")),
        ("the same as planned, %", _percent("lost_planned")),
        ("compute by wall clock, s", _mean("compute_seconds_per_rank")),
        *_each(ranks, "compute_seconds_per_rank"),
        ("compute by thread CPU, s", _mean("compute_cpu_seconds_per_rank")),
        *_each(ranks, "compute_cpu_seconds_per_rank"),
        ("first loss", lambda run: f"{run['first_loss']:.3f}"),
        ("final loss", lambda run: f"{run['final_loss']:.3f}"),
        ("trained, s", lambda run: f"{run['seconds']:.1f}"),
    ]


def _percent(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda run: f"{100 * run[name]:.1f}"


def _mean(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda run: f"{fmean(run[name]):.1f}"


def _each(ranks: Iterable[int], name: str, scale: float = 1.0) -> list[_Row]:
    """One figure of each rank."""

    def show(rank: int) -> Callable[[Mapping[str, Any]], str]:
        return lambda run: f"{scale * run[name][rank]:.1f}" if rank < len(run[name]) else "-"

    return [(f"  rank {rank}", show(rank)) for rank in ranks]


def verdict(results: Mapping[str, Any]) -> str:
    """The last strategy against the first, in a sentence."""
    runs: Mapping[str, Any] = results["strategies"]
    (first, before), *_, (last, after) = runs.items() if len(runs) > 1 else 2 * list(runs.items())
    gain = after["tokens_per_second"] / before["tokens_per_second"] - 1
    return (
        f"{last}: ranks wait for each other {100 * after['wait_share']:.1f} % of the time, against "
        f"{100 * before['wait_share']:.1f} % with {first}; {100 * gain:+.0f} % tokens/s"
    )
