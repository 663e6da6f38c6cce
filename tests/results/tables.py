"""The tables of docs/*.md, made from docs/results: one function for each generated part.

Nothing is computed here but percentages and names: what a table says, its result file says.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rollout_dispatcher.simulate.table import percent
from tests.chaos import figures as chaos
from tests.convergence.runs import CLAIMED
from tests.peers import table as peers
from tests.results.files import FOLDER, Measured, load
from tests.support.generated import rewrite
from tests.support.source import ROOT
from tests.workers.normalisers.test_gradients import CP
from tests.workers.support.train_replicas import SHAPES

DOCS = ROOT / "docs"

#: A trace's file -> how it is called here.
SHORT = {
    "lineage_open_reasoning": "lineage",
    "reasoning_gym_rlvr_g3": "reasoning_gym",
    "azure2023_conv": "azure_conv",
    "deepseek_r1_arc_g2": "deepseek_r1",
    "tau_airline_agent_g4": "tau_airline",
}
#: Of the planner's cells those of real lengths, as the README has them.
GAINS = {
    "lineage": "long reasoning (lineage)",
    "reasoning-gym": "RLVR (reasoning-gym)",
    "azure-conv": "chat (azure-conv)",
}
#: Window and --max-step-variation, as they are unless asked otherwise.
DEFAULT = (1.5, "0.25")
#: Of the mixes those in which the bound decides, and of the bounds the default and around it.
MIXES, BOUNDS = ("lineage 512/64", "reasoning_gym 1024/64"), ("off", "0.25", "0.1")
#: Of the rows of the sample plane those of the whole way, and those beside other systems.
PLANE = ("end-to-end", "dispatcher-to-rank", "push-to-loop", "dispatch-", "memory-held", "against-")
#: Packages whose version a trainer's user knows.
TRAINERS = {"accelerate", "torch", "torchtitan", "transformers", "trl", "verl"}
Rows = Iterable[Sequence[str]]


def place(document: str) -> Path:
    """Where it lies."""
    return (ROOT if document == "README.md" else DOCS) / document


def gain_table() -> str:
    """README.md: what ranks wait for each other on real lengths, and with the default options."""
    found, mixes = load("planner"), load("mix")
    by_default = {
        _short(row["lengths"]): row["excess"]
        for row in mixes.figures
        if (row["window"], row["bound"]) == DEFAULT
    }
    rows = []
    for row in found.figures["cells"]:
        trace, sizes, window = row["cell"].rsplit("-", 2)
        if trace not in GAINS:
            continue
        batch, ranks = sizes.split("x")
        shown = [row[f"{way}_excess"] for way in ("fifo", "greedy", "window", "bound")]
        shown.append(by_default[f"{trace.replace('-', '_')} {batch}/{ranks}"])
        rows.append((GAINS[trace], batch, ranks, *(f"{percent(each)} %" for each in shown)))
        assert window == "w1.25", "as the heading says"
    table = _table(
        "lengths | samples a step | DP ranks | as they come | longest first, onto the least loaded "
        "rank | window of 1.25 batches | bound | default: 1.5, a step's loss tokens limited",
        rows,
        found,
    )
    return f"{table}\nThe last column: {mixes}"


def fitted_table() -> str:
    """docs/evidence.md: a real run from a wrong cost."""
    found = load("fitted")
    rows = [
        (
            row["cost"],
            f"{row['early']:.2f} %",
            f"{row['imbalance']:.2f} %",
            ", ".join(f"{each:.2f}" for each in row["rounds"]),
        )
        for row in found.figures
    ]
    return _table("cost | first 20 steps | later steps | later steps, each round", rows, found)


def uneven_table() -> str:
    """docs/evidence.md: one of four ranks is slow, and then another."""
    found = load("uneven")
    rows = [
        (
            row["model"],
            row["arm"],
            f"{row['first_steps']:.1f} %",
            f"{row['before_change']:.1f} %",
            f"{row['after_change']:.1f} %",
            f"{row['known']:.2f} %",
            f"{row['load']:.0f}",
        )
        for row in found.figures
    ]
    return _table(
        "model | speeds | first five steps | steps 20 to 30 | the last ten | "
        "planned, speeds known | load of the machine",
        rows,
        found,
    )


def blocks_table() -> str:
    """docs/evidence.md: steps with long samples over several ranks, where any is."""
    found = load("blocks")
    rows = [
        (
            f"{SHORT[row['lengths']]} {row['batch']}/{row['dp_size']}",
            "step" if row["budget"] is None else f"micro-step, {row['budget']:,}",
            *(percent(row[name]) for name in ("without", "excess", "largest", "bound", "split")),
            percent(row["whole"]),
            f"{row['ms']:.0f}",
        )
        for row in found.figures
        if row["split"] > 0
    ]
    return _table(
        "lengths, batch/ranks | ranks meet, token budget | excess % without splits | "
        "with splits | with splits, worst step | bound | samples split % | "
        "whole samples: more bytes % | ms to plan",
        rows,
        found,
    )


def splitting_table() -> str:
    """docs/evidence.md: what four real ranks wait with blocks and without."""
    found = load("splitting")
    rows = []
    for row in found.figures:
        waiting = [percent(each) for each in (row["waiting"], *row["waiting_of_each"])]
        speed = [
            f"{each:,.0f}" for each in (row["tokens_per_second"], *row["tokens_per_second_of_each"])
        ]
        shown = (f"{median} ({', '.join(each)})" for median, *each in (waiting, speed))
        rows.append((f"{row['max_split']}", *shown, percent(row["split"])))
    return _table(
        "`max-split` | waiting %, median (each run) | tokens/s | tokens on several ranks %",
        rows,
        found,
    )


def random_table() -> str:
    """docs/evidence.md: random cases beside other projects' planners, a row a corner."""
    found = load("peers")
    corners: dict[str, list[dict[str, Any]]] = {}
    for row in found.figures["random"]:
        corners.setdefault(row["corner"], []).append(row)
    names = (f"{one['name']} {one['version']}".strip() for one in found.figures["peers"])
    table = _table(peers.RANDOM_CELLS, map(peers.random_cells, corners.values()), found)
    return f"{table} With {', '.join(names)}."


def mix_table() -> str:
    """docs/losses.md: what a bound on a step's loss tokens costs and leaves, where it matters."""
    found = load("mix")
    rows = [
        (
            _short(row["lengths"]),
            f"{row['window']:g}",
            row["bound"],
            percent(row["excess"]),
            f"{row['long_weight']:.2f}",
            f"{row['long_weight_expected']:.2f}",
            percent(row["without_long"]),
        )
        for row in found.figures
        if _short(row["lengths"]) in MIXES and row["bound"] in BOUNDS
    ]
    return _table(
        "lengths, batch/ranks | window | bound | excess % | weight of the longest 1 % | "
        "their weight under `token-mean-expected` | steps without any of these %",
        rows,
        found,
    )


def seams_table() -> str:
    """docs/planner.md: its seams beside what they replace, all traces and sizes in one mean."""
    found = load("seams")
    by_seam: dict[str, list[dict[str, Any]]] = {}
    for row in found.figures:
        by_seam.setdefault(row["seam"], []).append(row)

    def means(rows: list[dict[str, Any]]) -> list[str]:
        return [percent(fmean(row[side] for row in rows)) for side in ("theirs", "ours")]

    rows = []
    for seam, cases in by_seam.items():
        at_random = [row for row in cases if row["lengths"].startswith("random")]
        real = [row for row in cases if row not in at_random]
        behind = f"{sum(row['lost'] for row in cases)} of {sum(row['cases'] for row in cases)}"
        rows.append((seam, *means(real), *means(at_random), behind))
    versions = dict.fromkeys(f"{row['seam'].split()[0]} {row['version']}" for row in found.figures)
    table = _table(
        "seam | theirs, real lengths % | ours, real lengths % | theirs, random % | "
        "ours, random % | behind",
        rows,
        found,
    )
    return f"{table}\nWith {', '.join(versions)}."


def _with_interval(mean: float, interval: Sequence[float]) -> str:
    low, high = interval
    return f"{mean:+.4f} ({low:+.4f} to {high:+.4f})"


def convergence_table() -> str:
    """docs/evidence.md: whether training comes out the same."""
    found = load("convergence")
    rows = []
    for task in found.figures["tasks"]:
        of_fifo = _with_interval(task["fifo_gain"], task["fifo_gain_interval_95"])
        name = f"{task['name']}, {task['seeds']} seeds"
        rows.append((name, "`fifo`, gain", of_fifo, ""))
        rows += [
            (f"margin {task['margin']:.4f}", f"`{arm}`, less FIFO",
             _with_interval(each["mean"], each["interval_95"]), each["verdict"])
            for arm, each in task["differences"].items()
        ]  # fmt: skip
        claimed = " and ".join(f"`{arm}`" for arm in CLAIMED if arm in task["differences"])
        claim = f"claim: FIFO gains, {claimed} same, `control` differs"
        rows.append((name, claim, "", "**shown**" if task["shown"] else "**not shown**"))
    return _table("task | arm | score, 95 % interval | verdict", rows, found)


def training_table() -> str:
    """docs/evidence.md: training with each way to balance."""
    found = load("training")
    rows = [
        (
            f"`{row['name']}`",
            f"{row['tokens_per_second']:,.0f} ({row['lowest']:,.0f} to {row['highest']:,.0f})",
            f"{row['of_dataloader']:.2f}",
            f"{100 * row['wait_share']:.1f} %",
            f"{100 * row['data_wait_share']:.1f} %",
        )
        for row in found.figures["rows"]
    ]
    return _table(
        "row | tokens/s (lowest to highest) | over `dataloader` | waiting for ranks | "
        "waiting for data",
        rows,
        found,
    )


def plane_table() -> str:
    """docs/evidence.md: rates and latencies that a user plans with."""
    found = load("plane")
    rows = [
        (
            f"`{row['name']}`",
            f"{row['value']:.4g} {row['unit']}",
            f"{row['lowest']:.4g} to {row['highest']:.4g}, {row['runs']}",
            "" if row["against"] is None else f"{row['ratio']:.3g} of `{row['against']}`",
        )
        for row in found.figures
        if row["name"].startswith(PLANE)
    ]
    return _table("row | value | lowest to highest, runs | compared with", rows, found)


def inline_limit_table() -> str:
    """docs/evidence.md: what a reference costs each process, by size."""
    found = load("inline-limit")

    def each(used: dict[str, float]) -> str:
        return ", ".join(f"{us:,.0f}" for name, us in used.items() if name != "all")

    rows = [
        (
            f"{at['push']}",
            f"{at['kib']} KiB",
            each(at["inline_us"]),
            each(at["reference_us"]),
            *(_spread(at["ratios"][name]) for name in ("all", "dispatcher")),
        )
        for at in found.figures
    ]
    return _table(
        "samples a push | a sample | inline: producer, dispatcher, ranks | by reference | "
        "all, reference over inline (quartiles) | dispatcher, reference over inline",
        rows,
        found,
    )


def integrations_table() -> str:
    """docs/guide.md: every framework that an example trains with."""
    rows: list[Sequence[str]] = []
    dates = set()
    for name in sorted(path.stem for path in FOLDER.glob("frameworks-*.json")):
        found = load(name)
        versions = (
            f"{package} {said}"
            for package, said in found.figures["versions"].items()
            if package in TRAINERS
        )
        tested = ", ".join(versions)
        for one in found.figures["integrations"]:
            dates.add(found.date)
            example = f"[{one['example']}](../{one['example']})"
            apart = f"{one['gradient_difference']:.1e}"
            rows.append((one["framework"], example, f"{one['lines']}", apart, tested))
    heading = "framework | example | lines | largest difference of a gradient | tested with"
    measured = f"Measured with `make test-frameworks` on {' and '.join(sorted(dates))}, 2 DP ranks."
    return f"{_rows(heading, rows)}\n\n{measured}"


def meshes_table() -> str:
    """docs/guide.md: the meshes that tests train on."""
    by_loss, whole = "gradients of every loss", "parameters after training"
    rows: list[Sequence[str]] = [
        (name, f"{2 * cp}", "dp", "DDP, FSDP2", by_loss) for name, cp in CP.items()
    ]
    for shape in SHAPES.values():
        names = " x ".join(shape.names)
        leads = shape.dp_dims if isinstance(shape.dp_dims, str) else ", ".join(shape.dp_dims)
        rows.append((names, f"{2 ** len(shape.names)}", leads, "DDP", whole))
    (torch,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    heading = "mesh | ranks | `dp_dims` | trainer | equal to those of one process"
    tested = f"Tested with torch {torch} over gloo on CPU, two ranks a dimension"
    return f"{_rows(heading, rows)}\n\n{tested}, the whole model on each."


#: Document -> name of the generated part -> what writes it.
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"gain": gain_table},
    "evidence.md": {
        "random": random_table,
        "blocks": blocks_table,
        "splitting": splitting_table,
        "convergence": convergence_table,
        "training": training_table,
        "fitted": fitted_table,
        "uneven": uneven_table,
        "plane": plane_table,
        "inline-limit": inline_limit_table,
        **chaos.TABLES,
    },
    "guide.md": {"meshes": meshes_table, "integrations": integrations_table},
    "losses.md": {"mix": mix_table},
    "planner.md": {"seams": seams_table},
}


def write_all() -> None:
    """Write the generated parts of the documents again."""
    for document, parts in TABLES.items():
        rewrite(place(document), parts)


def _spread(of: dict[str, float]) -> str:
    return f"{of['ratio']:.2f} ({of['low']:.2f} to {of['high']:.2f})"


def _short(lengths: str) -> str:
    trace, size = lengths.split()
    return f"{SHORT[trace]} {size}"


def _table(heading: str, rows: Rows, found: Measured) -> str:
    return "\n".join([_rows(heading, rows), "", str(found)])


def _rows(heading: str, rows: Rows) -> str:
    lines = [f"| {heading} |", "|" + "---|" * (heading.count("|") + 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
