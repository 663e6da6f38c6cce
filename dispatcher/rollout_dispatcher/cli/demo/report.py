"""What the demo measured: from the ranks' records and the dispatcher's metrics to one table.

Every figure is measured, except the planned imbalance, which is what the dispatcher expected.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev, pvariance
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
    compute = [[record["compute_s"] for record in step] for step in steps]
    everything = [record for rank in ranks for record in rank]
    spent = _total(everything, "step_s")
    return {
        "steps": len(steps),
        "tokens": int(_total(everything, "tokens")),
        "seconds": seconds,
        "tokens_per_second": _total(everything, "tokens") / seconds,
        "flops_per_second": _total(everything, "flops") / seconds,
        "compute_variance": fmean(pvariance(times) for times in compute),
        "compute_deviation": fmean(pstdev(times) / fmean(times) for times in compute),
        "wait_share": _total(everything, "wait_s") / spent,
        "wait_share_per_rank": [_total(r, "wait_s") / _total(r, "step_s") for r in ranks],
        "data_wait_share": _total(everything, "data_s") / spent,
        "reduce_share": _total(everything, "reduce_s") / spent,
        "compute_seconds_per_rank": [_total(rank, "compute_s") for rank in ranks],
        "compute_cpu_seconds_per_rank": [_total(rank, "cpu_s") for rank in ranks],
        "imbalance_measured": fmean(max(times) / fmean(times) - 1 for times in compute),
        "first_loss": _mean_loss(steps[:1]),
        "final_loss": _mean_loss(steps[-LAST_STEPS:]),
        **_from_metrics(folder.joinpath("metrics.txt").read_text()),
    }


def _records(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _total(records: Iterable[Record], name: str) -> float:
    return sum(record[name] for record in records)


def _mean_loss(steps: Sequence[tuple[Record, ...]]) -> float:
    records = [record for step in steps for record in step]
    return _total(records, "loss_sum") / _total(records, "loss_tokens")


def _from_metrics(text: str) -> dict[str, float]:
    """What the dispatcher saw of the run."""
    samples = {
        (sample.name, sample.labels.get("stage", ""), sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    name, stage = "dispatcher_step_imbalance_ratio", "planned"
    buckets = [
        (float(le), count)
        for (metric, _, le), count in samples.items()
        if metric == "dispatcher_sample_wait_seconds_bucket"
    ]
    return {
        "imbalance_planned": samples[f"{name}_sum", stage, ""]
        / samples[f"{name}_count", stage, ""],
        "sample_wait_p50": quantile(buckets, 0.5),
        "sample_wait_p99": quantile(buckets, 0.99),
    }


def quantile(buckets: Iterable[tuple[float, float]], q: float) -> float:
    """Quantile of cumulative (upper bound, count) buckets, linear inside one like Prometheus's.

    0 for an empty histogram; the largest finite bound for what lies beyond it.
    """
    ordered = sorted(buckets)
    rank = q * ordered[-1][1]
    below, lower = 0.0, 0.0
    for bound, count in ordered:
        if bound == float("inf") or not ordered[-1][1]:
            break
        if count >= rank and count > below:
            return lower + (bound - lower) * (rank - below) / (count - below)
        below, lower = count, bound
    return lower


def table(results: Mapping[str, Any]) -> str:
    """A row a figure, a column a strategy."""
    runs: Mapping[str, Any] = results["strategies"]
    rows = [("", *runs)]
    rows += [(title, *(show(run) for run in runs.values())) for title, show in _ROWS]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(["", *lines, ""])


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _each(values: Iterable[float], form: str = "{:.1f}") -> str:
    return " / ".join(form.format(value) for value in values)


_ROWS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("tokens/s", lambda run: f"{run['tokens_per_second']:,.0f}"),
    ("achieved GFLOP/s, all ranks", lambda run: f"{run['flops_per_second'] / 1e9:.1f}"),
    ("share of time waiting for other ranks", lambda run: _percent(run["wait_share"])),
    ("  rank 0 / rank 1, %", lambda run: _each(100 * x for x in run["wait_share_per_rank"])),
    ("compute variance between ranks, ms^2", lambda run: f"{1e6 * run['compute_variance']:,.0f}"),
    ("  deviation over mean", lambda run: _percent(run["compute_deviation"])),
    ("step imbalance, planned", lambda run: _percent(run["imbalance_planned"])),
    ("step imbalance, measured", lambda run: _percent(run["imbalance_measured"])),
    ("compute by wall clock, s a rank", lambda run: _each(run["compute_seconds_per_rank"])),
    ("compute by thread CPU, s a rank", lambda run: _each(run["compute_cpu_seconds_per_rank"])),
    ("share of time waiting for data", lambda run: _percent(run["data_wait_share"])),
    ("sample wait p50 / p99 (runs take turns), s", lambda run: _each(
        (run["sample_wait_p50"], run["sample_wait_p99"]), "{:.2f}")),
    ("first loss / final loss", lambda run: _each(
        (run["first_loss"], run["final_loss"]), "{:.3f}")),
    ("trained, s", lambda run: f"{run['seconds']:.1f}"),
)  # fmt: skip


def verdict(results: Mapping[str, Any]) -> str:
    """The last strategy against the first, in a sentence."""
    runs: Mapping[str, Any] = results["strategies"]
    (first, before), *_, (last, after) = runs.items() if len(runs) > 1 else 2 * list(runs.items())
    gain = after["tokens_per_second"] / before["tokens_per_second"] - 1
    return (
        f"{last}: ranks wait for each other {_percent(after['wait_share'])} of the time, against "
        f"{_percent(before['wait_share'])} with {first}; {100 * gain:+.0f} % tokens/s"
    )
