"""The tables of docs/*.md, made from docs/results: one function for each generated part.

Nothing is computed here but percentages and names: what a table says, its result file says.
"""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from json import dumps
from pathlib import Path
from statistics import fmean
from typing import Any

from rollout_dispatcher.simulate.result import Result
from rollout_dispatcher.simulate.table import percent, table
from tests.bench import cost, groups, orders, planner, properties
from tests.chaos import figures as chaos
from tests.peers import table as peers
from tests.results.files import FOLDER, Measured, load
from tests.support.generated import rewrite
from tests.support.source import ROOT

DOCS = ROOT / "docs"

#: A trace's file -> how it is called here.
SHORT = {
    "lineage_open_reasoning": "lineage",
    "reasoning_gym_rlvr_g3": "reasoning_gym",
    "azure2023_conv": "azure_conv",
    "deepseek_r1_arc_g2": "deepseek_r1",
    "tau_airline_agent_g4": "tau_airline",
    properties.TWO_KINDS: "two kinds",
}
#: Of the planner's cells those of real lengths, as the README has them.
GAINS = {
    "lineage": "long reasoning (lineage)",
    "reasoning-gym": "RLVR (reasoning-gym)",
    "azure-conv": "chat (azure-conv)",
}
#: Window and --max-step-variation, as they are unless asked otherwise.
DEFAULT = (1.5, "0.25")
#: Of the pipelines those with so many stages are shown.
STAGES = 8
Rows = Iterable[Sequence[str]]


def place(document: str) -> Path:
    """Where it lies."""
    return (ROOT if document == "README.md" else DOCS) / document


def planner_table() -> str:
    """docs/balance.md: times and plans beside verl's."""
    found = load("planner")
    lines = [planner.line(planner.Row(**row)) for row in found.figures["cells"]]
    if found.figures["unequal"] is not None:
        lines.append(planner.unequal_line(planner.Unequal(**found.figures["unequal"])))
    return _printed([planner.HEADING, *lines], found)


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
    return f"{table}\nThe last column:\n{_from(mixes)}"


def properties_table() -> str:
    """docs/balance.md: whether more room makes plans worse."""
    found = load("properties")
    rows = [
        (
            row["what"],
            f"{row['cases']:,}",
            f"{row['mean']:+.2f}",
            f"{row['worst']:+.2f}",
            f"{row['worse']:,}",
        )
        for row in found.figures["steps"]
    ]
    times = found.figures["times"]
    table = _table("plans | cases | mean | worst | worse by over 0.1", rows, found)
    return (
        f"{table}\nOf {times['plans']:,} plans of random steps the slowest takes "
        f"{times['worst']:.0f} ms of one core, the mean plan {times['mean']:.1f}."
    )


def widening_table() -> str:
    """docs/balance.md: straggler excess of wider and wider windows."""
    found = load("properties")
    rows = [
        (
            _short(row["lengths"]),
            row["sync"],
            " / ".join(f"{each:.2f}" for each in row["excess"]),
            f"{row['mean_rise']:+.2f}",
            f"{row['worst_rise']:+.2f}",
        )
        for row in found.figures["windows"]
    ]
    windows = " / ".join(f"{each:g}" for each in properties.WINDOWS)
    return _table(
        f"lengths, batch/ranks | ranks meet at | excess % at {windows} | "
        "largest rise of the means, points | of any seed",
        rows,
        found,
    )


def approaches_table() -> str:
    """docs/balance.md: four ways to balance, those of all lengths in one row."""
    found = load("approaches")
    by_way: dict[str, list[str]] = {}
    for row in found.figures:
        step, micro_step = 100 * row["step_excess"], 100 * row["micro_step_excess"]
        cell = f"{step:.2f} / {micro_step:.2f} ({row['distance']:.2f})"
        by_way.setdefault(row["approach"], []).append(cell)
    heading = " | ".join(dict.fromkeys(row["lengths"] for row in found.figures))
    return _table(f"way | {heading}", [(way, *cells) for way, cells in by_way.items()], found)


def groups_table() -> str:
    """docs/balance.md: groups that stay on one rank."""
    found = load("groups")
    return _printed(
        [groups.HEADING, *(groups.line(groups.Row(**row)) for row in found.figures)], found
    )


def plain_table() -> str:
    """docs/balance.md: beside the plain column DP, and what a perfect rhythm would wait."""
    found, rhythm = load("plain"), load("rhythm")
    rhythms = {
        _short(row["lengths"]): " / ".join(f"{100 * each:.1f}" for each in row["excess"][1:])
        for row in rhythm.figures
    }
    by_lengths: dict[str, list[dict[str, Any]]] = {}
    for row in found.figures:
        by_lengths.setdefault(row["lengths"], []).append(row)
    rows = [
        (lengths, *(_of_windows(runs, side) for side in ("plain", "ours")),
         rhythms.get(lengths, ""))
        for lengths, runs in by_lengths.items()
    ]  # fmt: skip
    heading = "lengths, batch/ranks | plain column DP | ours | a perfect rhythm"
    return f"{_table(heading, rows, found)}\nThe last column:\n{_from(rhythm)}"


def _of_windows(runs: Iterable[dict[str, Any]], side: str) -> str:
    excess = " / ".join(f"{100 * run[side]['excess']:.2f}" for run in runs)
    return f"{excess} ({', '.join(format(run[side]['distance'], '.2f') for run in runs)})"


def orders_table() -> str:
    """docs/balance.md: what the order of micro-batches saves."""
    found = load("orders")
    memory = [orders.Memory(**row) for row in found.figures["memory"]]
    memory = [row for row in memory if row.strategy == "window"]
    pipelines = [orders.Pipeline(**row) for row in found.figures["pipelines"]]
    pipelines = [row for row in pipelines if row.stages == STAGES]
    first, second = orders.HEADINGS
    lines = [first, *map(orders.line, memory), "", second, *map(orders.line, pipelines)]
    return _printed(lines, found)


def cost_table() -> str:
    """docs/measured.md: plans while their cost is fitted."""
    found = load("cost")
    models = list(dict.fromkeys(row["model"] for row in found.figures))
    traces = list(dict.fromkeys(row["lengths"] for row in found.figures))

    def cells(at: int, lengths: list[str]) -> list[str]:
        means = [
            [
                fmean(row[arm][at] for row in found.figures if _is_of(row, model, lengths))
                for arm in ("believed", "adapting", "known")
            ]
            for model in models
        ]
        return [" / ".join(f"{each:.2f}" for each in arms) for arms in means]

    rows = [(f"all, after {steps}", *cells(at, traces)) for at, steps in enumerate(cost.AFTER)]
    rows += [
        (f"{SHORT.get(name, name)}, after {cost.AFTER[-1]}", *cells(-1, [name])) for name in traces
    ]
    return _table(" | ".join(["lengths, steps", *models]), rows, found)


def _is_of(row: dict[str, Any], model: str, lengths: list[str]) -> bool:
    return row["model"] == model and row["lengths"] in lengths


def fitted_table() -> str:
    """docs/measured.md: a real run from a wrong cost."""
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
    return _table("cost | first twenty steps | the others | of each round", rows, found)


def uneven_table() -> str:
    """docs/measured.md: one of four ranks is slow, and then another."""
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


def peers_table() -> str:
    """docs/balance.md: beside other projects' planners."""
    found = load("peers")
    windows = [row for row in found.figures["rows"] if row["corner"] == "window"]
    rows = [peers.cells(row) for row in found.figures["rows"] if row["corner"] != "window"]
    if windows:
        rows.append(peers.worst_window(windows))
    names = (f"{one['name']} {one['version']}".strip() for one in found.figures["peers"])
    versions = textwrap.fill(f"With {', '.join(names)}.", 104, break_on_hyphens=False)
    return f"{_table(peers.CELLS, rows, found)}\n{versions}"


def random_table() -> str:
    """docs/balance.md: random cases beside other projects' planners, a row a corner."""
    found = load("peers")
    corners: dict[str, list[dict[str, Any]]] = {}
    for row in found.figures["random"]:
        corners.setdefault(row["corner"], []).append(row)
    return _table(peers.RANDOM_CELLS, map(peers.random_cells, corners.values()), found)


def mix_table() -> str:
    """docs/effects.md: what a bound on a step's loss tokens costs and leaves."""
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
            percent(row["work_variation"]),
            f"{row['ks_step']:.3f}",
        )
        for row in found.figures
    ]
    return _table(
        "lengths, batch/ranks | window | bound | excess % | weight of the longest 1 % | "
        "under `token-mean-expected` | steps without them % | work varies by % | KS of a step",
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
        "seam | theirs, real lengths % | ours | theirs, random cases % | ours | behind", rows, found
    )
    return f"{table}\nWith {', '.join(versions)}."


def _with_interval(mean: float, interval: Sequence[float]) -> str:
    low, high = interval
    return f"{mean:+.4f} ({low:+.4f} to {high:+.4f})"


def convergence_table() -> str:
    """docs/effects.md: whether training comes out the same."""
    found = load("convergence")
    rows = []
    for task in found.figures["tasks"]:
        of_fifo = _with_interval(task["fifo_gain"], task["fifo_gain_interval_95"])
        name = f"{task['name']}, {task['seeds']} seeds"
        rows.append((name, "`fifo`, gain", of_fifo, "shown" if task["shown"] else "NOT SHOWN"))
        rows += [
            (f"margin {task['margin']:.4f}", f"`{arm}`, less FIFO",
             _with_interval(each["mean"], each["interval_95"]), each["verdict"])
            for arm, each in task["differences"].items()
        ]  # fmt: skip
    return _table("task | arm | score, 95 % interval | verdict", rows, found)


def long_answers_table() -> str:
    """docs/effects.md: held-out loss by length."""
    found = load("convergence")
    (task,) = (each for each in found.figures["tasks"] if "losses" in each)
    classes = [name for name in task["losses"]["fifo"] if name != "long_weight"]
    rows = []
    for arm, losses in task["losses"].items():
        cells = []
        for name in classes:
            loss = f"{losses[name]['mean']:.4f} ± {losses[name]['deviation']:.4f}"
            apart = _with_interval(losses[name]["less_fifo"], losses[name]["interval_95"])
            cells.append(loss if arm == "fifo" else f"{loss}; {apart}")
        rows.append((f"`{arm}`", f"{losses['long_weight']:.2f}", *cells))
    return _table(" | ".join(["arm", "weight of the longest 1 %", *classes]), rows, found)


def training_table() -> str:
    """docs/effects.md: training with each way to balance."""
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
        "row | tokens/s (lowest to highest) | of dataloader's | waiting for ranks | for data",
        rows,
        found,
    )


def plane_table(name: str = "plane") -> str:
    """docs/performance.md: every row that is measured."""
    found = load(name)
    rows = [
        (
            f"`{row['name']}`",
            f"{row['value']:.4g} {row['unit']}",
            f"{row['lowest']:.4g} to {row['highest']:.4g}, {row['runs']}",
            "" if row["against"] is None else f"{row['ratio']:.3g} of `{row['against']}`",
        )
        for row in found.figures
    ]
    return _table("row | value | lowest to highest, runs | beside", rows, found)


def references_table() -> str:
    """docs/payload-stores.md: every engine beside itself used bare."""
    found = load("references")
    rows = [
        (
            f"`{at['name']}`",
            f"{at['samples_per_second']:.1f}",
            f"{at['bare_samples_per_second']:.1f}",
            f"{at['ratio']:.2f} ({at['lowest']:.2f} to {at['highest']:.2f}, {at['pairs']})",
            f"{at['wire_bytes_10k']:.0f}, {at['wire_bytes_10m']:.0f}",
        )
        for at in found.figures
    ]
    return _table(
        "samples of 10 MB | samples/s | the engine used bare | ratio (lowest to highest, pairs) | "
        "bytes through the dispatcher at 10 kB, 10 MB",
        rows,
        found,
    )


def inline_limit_table(name: str = "inline-limit") -> str:
    """docs/payload-stores.md: what a reference costs each process, by size."""
    found = load(name)

    def each(used: dict[str, float]) -> str:
        return ", ".join(f"{us:,.0f}" for name, us in used.items() if name != "all")

    rows = [
        (
            f"{at['store']}, {at['socket']}, {at['push']}",
            f"{at['kib']} KiB",
            each(at["inline_us"]),
            each(at["reference_us"]),
            *(_spread(at["ratios"][name]) for name in ("all", "dispatcher")),
        )
        for at in found.figures
    ]
    return _table(
        "store, socket, samples a push | a sample | inline: producer, dispatcher, ranks | "
        "by reference, and the engine | all, over inline (quartiles) | the dispatcher's",
        rows,
        found,
    )


def inline_limit_engines_table() -> str:
    """docs/payload-stores.md: the same with engines."""
    return inline_limit_table("inline-limit-engines")


def prefetch_table() -> str:
    """docs/payload-stores.md: what a rank waits for, by what it fetches ahead."""
    found = load("prefetch")

    def wait(of: dict[str, Any]) -> str:
        median, low, high = (1e3 * of[name] for name in ("wait_s", "low_s", "high_s"))
        return f"{median:.1f} ms ({low:.1f} to {high:.1f}, {of['waits']})"

    rows = [
        (
            f"{at['step_bytes'] >> 20} MiB, {at['prefetch_steps']}",
            f"`{at['prefetch_bytes']}`",
            wait(at),
            f"{at['memory_bytes'] >> 20} MiB",
        )
        for at in sorted(found.figures["rows"], key=_by_step)
    ]
    return _table(
        "a step of the rank, steps ahead | `--set prefetch-bytes` | waits a step "
        "(quartiles, steps) | the rank's memory grows by",
        rows,
        found,
    )


def watched_table() -> str:
    """docs/performance.md: with all that tells of a run, over without."""
    found = load("watched")
    rows = [
        (name, f"{at['ratio']:.3f}", f"{at['low']:.3f} to {at['high']:.3f}")
        for name, at in found.figures["processes"].items()
    ]
    return _table("CPU time of a sample | on over off | quartiles", rows, found)


def soak_table() -> str:
    """docs/faults.md: memory under backpressure."""
    found = load("soak")
    runs = [found.figures[name] for name in ("without_journal", "with_journal")]
    resident, anonymous = ([run[kind] for run in runs] for kind in ("resident", "anonymous"))
    rows = [
        ("resident, first tenth", *(f"{one['first_tenth_mb']:.1f} MB" for one in resident)),
        (
            "resident, last tenth",
            *(f"{one['last_tenth_mb']:.1f} MB ({100 * one['growth']:+.1f} %)" for one in resident),
        ),
        (
            "of it anonymous, first and last",
            *(f"{one['first_tenth_mb']:.1f}, {one['last_tenth_mb']:.1f} MB" for one in anonymous),
        ),
        (
            "trend of the resident, 100,000 samples",
            *(f"{one['trend_mb_per_100k_samples']:+.2f} MB" for one in resident),
        ),
        (
            "looks at which a cap held producers back",
            *(f"{100 * run['backpressure_share']:.0f} %" for run in runs),
        ),
    ]
    return _table(" | without a journal | with", rows, found)


def journal_table() -> str:
    """docs/faults.md: the journal alone, beside a preallocated file."""
    found = load("journal")
    rows = [
        (name, f"{one['mb_per_second']} MB/s", f"{one['share_of_plain_file']:.2f}")
        for name, one in found.figures["alone"].items()
    ]
    return _table("64 samples a sync | rate | of the plain file", rows, found)


def journal_service_table() -> str:
    """docs/faults.md: from push to commit, with the journal and without."""
    found = load("journal-service")
    rows = [
        (
            name,
            f"{one['samples_per_second']} samples/s ({one['lowest']} to {one['highest']})",
            f"{one['share_of_no_journal']:.2f}",
        )
        for name, one in found.figures["push_to_commit"].items()
    ]
    return _table("push to commit, samples of 26 kB | rate | of no journal", rows, found)


def simulation(name: str) -> Callable[[], str]:
    """docs/simulate.md: a command and what it prints."""

    def shown() -> str:
        found = load(name)
        result = Result.from_json(dumps(found.figures))
        typed = "$ " + found.command.removesuffix(" --json")
        lines = textwrap.wrap(typed, 98, break_on_hyphens=False, subsequent_indent="    ")
        said = [" \\\n".join(lines), table(result).rstrip("\n")]
        if result.recommendation is not None:
            why = textwrap.fill(result.recommendation.why, 99, break_on_hyphens=False)
            said.append(f"\n{why}")
        return "\n".join(["```console", *said, "```", "", _from(found)])

    return shown


def integrations_table() -> str:
    """docs/integrate.md: every framework that an example trains with."""
    rows: list[Sequence[str]] = []
    told = []
    for name in sorted(path.stem for path in FOLDER.glob("frameworks-*.json")):
        found = load(name)
        if not found.figures["integrations"]:  # nothing is trained there
            continue
        rows += [
            (
                one["framework"],
                f"[{one['example']}](../{one['example']})",
                f"{one['lines']}",
                f"{one['ranks']}",
                f"{one['gradient_difference']:.1e}",
            )
            for one in found.figures["integrations"]
        ]
        versions = (f"{package} {said}" for package, said in found.figures["versions"].items())
        told.append(f"{_from(found)}\nWith {', '.join(versions)}.")
    heading = "framework | example | lines | ranks | largest difference of a gradient"
    return "\n\n".join([_rows(heading, rows), *told])


#: Document -> name of the generated part -> what writes it.
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"gain": gain_table},
    "balance.md": {
        "planner": planner_table,
        "properties": properties_table,
        "widening": widening_table,
        "peers": peers_table,
        "random": random_table,
        "approaches": approaches_table,
        "groups": groups_table,
        "plain": plain_table,
        "orders": orders_table,
    },
    "effects.md": {
        "mix": mix_table,
        "convergence": convergence_table,
        "long-answers": long_answers_table,
        "training": training_table,
    },
    "faults.md": {
        **chaos.TABLES,
        "soak": soak_table,
        "journal-service": journal_service_table,
        "journal": journal_table,
    },
    "integrate.md": {"integrations": integrations_table},
    "payload-stores.md": {
        "references": references_table,
        "inline-limit": inline_limit_table,
        "inline-limit-engines": inline_limit_engines_table,
        "prefetch": prefetch_table,
    },
    "planner.md": {"seams": seams_table},
    "measured.md": {"cost": cost_table, "fitted": fitted_table, "uneven": uneven_table},
    "performance.md": {"plane": plane_table, "watched": watched_table},
    "simulate.md": {
        name: simulation(name) for name in ("simulate-profile", "simulate-steady", "simulate-timed")
    },
}


def write_all() -> None:
    """Write the generated parts of the documents again."""
    for document, parts in TABLES.items():
        rewrite(place(document), parts)


def _by_step(of: dict[str, Any]) -> tuple[int, int]:
    """Rows of a step together."""
    return of["step_bytes"], of["prefetch_steps"]


def _spread(of: dict[str, float]) -> str:
    return f"{of['ratio']:.2f} ({of['low']:.2f} to {of['high']:.2f})"


def _short(lengths: str) -> str:
    trace, size = lengths.split()
    return f"{SHORT[trace]} {size}"


def _from(found: Measured) -> str:
    return textwrap.fill(str(found), 104, break_on_hyphens=False, break_long_words=False)


def _printed(lines: Sequence[str], found: Measured) -> str:
    return "\n".join(["```text", *lines, "```", "", _from(found)])


def _table(heading: str, rows: Rows, found: Measured) -> str:
    return "\n".join([_rows(heading, rows), "", _from(found)])


def _rows(heading: str, rows: Rows) -> str:
    lines = [f"| {heading} |", "|" + "---|" * (heading.count("|") + 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
