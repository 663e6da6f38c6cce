"""The demo's table, from the ranks' records and the dispatcher's metrics.

Every figure is measured, except the share lost as planned, which is the dispatcher's estimate.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
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


#: Title, figure, factor and format. Of a figure of all ranks, the row with the title is their mean.
_FIGURES = (
    ("tokens/s", "tokens_per_second", 1, ",.0f"),
    ("time waiting for other ranks, %", "wait_share", 100, ".1f"),
    ("", "wait_share_per_rank", 100, ".1f"),
    ("waiting, as planned, %", "lost_planned", 100, ".1f"),
    ("time waiting for data, %", "data_wait_share", 100, ".1f"),
    ("compute by wall clock, s", "compute_seconds_per_rank", 1, ".1f"),
    ("compute by thread CPU, s", "compute_cpu_seconds_per_rank", 1, ".1f"),
    ("first loss", "first_loss", 1, ".3f"),
    ("final loss", "final_loss", 1, ".3f"),
    ("trained, s", "seconds", 1, ".1f"),
)


def table(results: Mapping[str, Any]) -> str:
    """A row for each figure, a column for each strategy, within 80 characters."""
    runs: Mapping[str, Any] = results["strategies"]
    rows = [("", *runs), *_rows(runs.values())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(["", *lines, ""])


def _rows(runs: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for title, name, factor, form in _FIGURES:
        figures = [run[name] if isinstance(run[name], list) else [run[name]] for run in runs]
        if title:
            yield (title, *(format(factor * fmean(figure), form) for figure in figures))
        if name.endswith("_per_rank"):
            for rank, found in enumerate(zip_longest(*figures)):
                cells = ("-" if each is None else format(factor * each, form) for each in found)
                yield (f"  rank {rank}", *cells)


def verdict(results: Mapping[str, Any]) -> str:
    """The last strategy against the first, in a sentence."""
    runs: Mapping[str, Any] = results["strategies"]
    (first, before), *_, (last, after) = runs.items() if len(runs) > 1 else 2 * list(runs.items())
    gain = after["tokens_per_second"] / before["tokens_per_second"] - 1
    return (
        f"{last}: ranks wait for each other {100 * after['wait_share']:.1f} % of the time, against "
        f"{100 * before['wait_share']:.1f} % with {first}; {100 * gain:+.0f} % tokens/s"
    )
