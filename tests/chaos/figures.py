"""What came of a chaos run in figures, and the tables of docs/faults.md from those that are kept.

python -m tests.chaos.figures        writes the tables again, from docs/results/chaos.json
"""

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any

from tests.chaos.faults.campaign import fill_disk
from tests.chaos.run import Recovery, Result
from tests.chaos.verdict.check import KINDS
from tests.results.files import Measured, load
from tests.support.generated import rewrite
from tests.support.source import ROOT

DOCUMENT = ROOT / "docs" / "faults.md"


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
    """docs/faults.md: what was done, and what came of it."""
    found = load("chaos")
    at: dict[str, Any] = found.figures
    disk = at["disk_full"]
    rows = [
        ("faults, and runs that did not get to their end", at["faults"], len(at["stalled"])),
        (
            "of them under torchrun; skipped, as nothing small can be mounted",
            at["under_torchrun"],
            at["skipped"],
        ),
        ("disk filled, refused and recovered from", disk["faults"], disk["refused_and_recovered"]),
        ("samples acknowledged, steps trained", at["acknowledged"], at["steps"]),
        ("steps trained again after a rewind", at["steps_rewound"]),
        ("sizes of process groups", *at["dp_sizes"]),
        *_verdict(at),
    ]
    return _seen(rows, found)


def references_table() -> str:
    """docs/faults.md: the same where most samples lie in a payload store."""
    found = load("chaos-references")
    at: dict[str, Any] = found.figures
    rows = [
        ("faults, and runs that did not get to their end", at["faults"], len(at["stalled"])),
        ("samples acknowledged, steps trained", at["acknowledged"], at["steps"]),
        ("objects released", at["released"]),
        ("samples dropped, as an object was removed that had them", at["unresolved"]),
        *_verdict(at),
    ]
    return _seen(rows, found)


def engines_table() -> str:
    """docs/faults.md: the same where they lie in an engine, which may die too."""
    found = {"Ray": load("chaos-ray"), "Mooncake": load("chaos-mooncake")}
    each: list[dict[str, Any]] = [one.figures for one in found.values()]
    rows: list[tuple[str, list[Any]]] = [
        (
            "faults, and runs that did not get to their end",
            [f"{at['faults']}, {len(at['stalled'])}" for at in each],
        ),
        ("of them the engine's processes killed", [_killed(at) for at in each]),
        ("samples acknowledged", [at["acknowledged"] for at in each]),
        ("objects released", [at["released"] for at in each]),
        ("samples dropped, as what held them was killed", [at["unresolved"] for at in each]),
        *((f"promises broken: {kind}", [at[kind] for at in each]) for kind in KINDS),
    ]
    lines = [f"| seen | {' | '.join(found)} |", "|---|---|---|"]
    lines += [f"| {name} | {' | '.join(map(str, values))} |" for name, values in rows]
    return "\n".join([*lines, "", *map(str, found.values())])


def _killed(at: Mapping[str, Any]) -> int:
    return sum(
        one["count"] for name, one in at["by_fault"].items() if name.startswith("kill_store")
    )


def _verdict(at: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    broken = ", ".join(f"{kind} {at[kind]}" for kind in KINDS if kind in at)
    bugs = f"planted bugs, caught with each of {at['seeds_of_each']} seeds"
    return [("promises broken", broken), (bugs, at["planted"], at["caught"])]


def _seen(rows: Sequence[tuple[Any, ...]], found: Measured) -> str:
    lines = ["| what | seen |", "|---|---|"]
    lines += [f"| {name} | {', '.join(map(str, values))} |" for name, *values in rows]
    return "\n".join([*lines, "", str(found)])


def recovery_table() -> str:
    """docs/faults.md: seconds until a fault is over, by kind."""
    at: dict[str, Any] = load("chaos").figures
    rows = [
        ("all of them", at["recovery_seconds"], at["recovery_seconds_without_the_fault_itself"])
    ]
    rows += [
        (f"`{kind}`", one, one["without_the_fault_itself"]) for kind, one in at["by_fault"].items()
    ]
    lines = ["| fault | number | p50, p99 | without the fault itself |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {all_of['count']} | {all_of['p50']} s, {all_of['p99']} s "
        f"| {rest['p50']} s, {rest['p99']} s |"
        for name, all_of, rest in rows
    ]
    return "\n".join(lines)


#: Name of the generated part -> what writes it.
TABLES: dict[str, Callable[[], str]] = {
    "chaos": chaos_table,
    "chaos-references": references_table,
    "chaos-engines": engines_table,
    "recovery": recovery_table,
}
#: What a run may be kept as.
RESULTS = ("chaos", "chaos-references", "chaos-ray", "chaos-mooncake")


def write_tables() -> None:
    """Write the generated parts of the document again."""
    rewrite(DOCUMENT, TABLES)


if __name__ == "__main__":
    write_tables()
