"""What came of a chaos run in figures, and the tables of docs/evidence.md from those that are kept.

python -m tests.chaos.figures        writes the tables again, from docs/results/chaos.json
"""

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any

from tests.chaos.faults.campaign import fill_disk
from tests.chaos.run import Recovery, Result
from tests.chaos.verdict.check import KINDS
from tests.results.files import load
from tests.support.generated import rewrite
from tests.support.source import ROOT

DOCUMENT = ROOT / "docs" / "evidence.md"

#: Faults whose recovery is shown, and what they are.
MET = {
    "kill_dispatcher": "SIGKILL of the dispatcher, started again 1 s later",
    "kill_dispatcher_and_ranks": "of the dispatcher and the ranks",
    "kill_rank": "of a rank, without torch",
    "kill_rank under torchrun": "of a rank, under torchrun",
    "kill_producer": "of a producer",
    "other_dp_size under torchrun": "another number of ranks, under torchrun",
    "rewind": "roll back to a checkpoint",
    "pause_rank under torchrun": "SIGSTOP of a rank, under torchrun",
    "cut_connections": "all connections cut",
    "fill_disk": "the disk of the journal full, and freed",
}


def figures(results: Sequence[Result], caught: Mapping[str, Sequence[bool]]) -> dict[str, object]:
    """What is written to the file; caught: of each planted bug, with one seed after the other."""
    recoveries = [item for result in results for item in result.recoveries]
    kinds = sorted({one.fault for one in recoveries})
    verdicts = [result.verdict for result in results]
    return {
        "faults": len(recoveries),
        **{kind: sum(len(getattr(one, kind)) for one in verdicts) for kind in KINDS},
        "planted": len(caught),
        "seeds_of_each": max(map(len, caught.values()), default=0),
        "caught": sum(map(all, caught.values())),
        "caught_by_seed": {bug: sum(found) for bug, found in caught.items()},
        "recovery_seconds": _quantiles([one.seconds for one in recoveries]),
        "recovery_seconds_without_the_fault_itself": _quantiles(
            [one.seconds - one.fault_seconds for one in recoveries]
        ),
        "by_fault": {kind: _by_fault(kind, recoveries) for kind in kinds},
        "disk_full": {
            "faults": sum(one.fault == fill_disk.__name__ for one in recoveries),
            "refused_and_recovered": sum(result.times_full for result in results),
        },
        "under_torchrun": sum("torchrun" in one.fault for one in recoveries),
        "acknowledged": sum(result.acknowledged for result in results),
        "committed": sum(len(one.committed) for one in verdicts),
        "steps": sum(result.steps for result in results),
        "steps_rewound": sum(result.steps_rewound for result in results),
        "unresolved": sum(result.unresolved for result in results),
        "released": sum(result.released for result in results),
        "dp_sizes": sorted({size for result in results for size in result.sizes}),
        "stalled": [result.stalled for result in results if result.stalled is not None],
    }


def _by_fault(kind: str, recoveries: Sequence[Recovery]) -> dict[str, object]:
    found = [one for one in recoveries if one.fault == kind]
    after = _quantiles([one.seconds - one.fault_seconds for one in found])
    return _quantiles([one.seconds for one in found]) | {"without_the_fault_itself": after}


def _quantiles(seconds: list[float]) -> dict[str, object]:
    ordered = sorted(seconds)
    shares = {"p50": 0.5, "p99": 0.99} if ordered else {}
    return {"count": len(ordered)} | {
        name: round(ordered[max(ceil(share * len(ordered)) - 1, 0)], 3)
        for name, share in shares.items()
    }


# -- the document -------------------------------------------------------------------------------


def chaos_table() -> str:
    """docs/evidence.md: what was done, and what came of it; a column a kind of run."""
    found = {
        "payloads in the dispatcher": load("chaos"),
        "samples on up to 4 ranks": load("chaos-blocks"),
        "in a file store": load("chaos-references"),
        "in Ray": load("chaos-ray"),
        "in Mooncake": load("chaos-mooncake"),
    }
    each: list[dict[str, Any]] = [one.figures for one in found.values()]
    rows: list[tuple[str, list[object]]] = [
        ("faults", [at["faults"] for at in each]),
        ("runs that did not get to their end", [len(at["stalled"]) for at in each]),
        ("samples acknowledged", [at["acknowledged"] for at in each]),
        ("steps trained, and again after a rewind",
         [f"{at['steps']}, {at['steps_rewound']}" for at in each]),
        ("samples dropped, as their object was removed or its engine killed",
         [at.get("unresolved", "") for at in each]),
        (f"promises broken: {', '.join(KINDS)}",
         [", ".join(str(at.get(kind, "-")) for kind in KINDS) for at in each]),
        ("planted bugs, caught with each seed",
         [f"{at['planted']}, {at['caught']}" if at["planted"] else "" for at in each]),
    ]  # fmt: skip
    lines = [f"| seen | {' | '.join(found)} |", f"|---|{'---|' * len(found)}"]
    lines += [f"| {name} | {' | '.join(map(str, values))} |" for name, values in rows]
    return "\n".join([*lines, "", *map(str, found.values())])


def recovery_table() -> str:
    """docs/evidence.md: seconds until a fault is over, of the kinds that operators meet."""
    at: dict[str, Any] = load("chaos").figures
    rows = [
        ("all of them", at["recovery_seconds"], at["recovery_seconds_without_the_fault_itself"])
    ]
    rows += [
        (name, at["by_fault"][kind], at["by_fault"][kind]["without_the_fault_itself"])
        for kind, name in MET.items()
    ]
    lines = ["| fault | number | p50, p99 | without the fault itself |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {all_of['count']} | {all_of['p50']} s, {all_of['p99']} s "
        f"| {rest['p50']} s, {rest['p99']} s |"
        for name, all_of, rest in rows
    ]
    return "\n".join(lines)


#: Name of the generated part -> what writes it.
TABLES: dict[str, Callable[[], str]] = {"chaos": chaos_table, "recovery": recovery_table}
#: What a run may be kept as.
RESULTS = ("chaos", "chaos-blocks", "chaos-references", "chaos-ray", "chaos-mooncake")


def write_tables() -> None:
    """Write the generated parts of the document again."""
    rewrite(DOCUMENT, TABLES)


if __name__ == "__main__":
    write_tables()
