"""A chaos run: faults on a cluster one after the other, then the end of the stream, then the check.

Each fault waits until some steps went by since the one before it. Its recovery time is from its
beginning, a pause's length and the start of new processes included, to the commit by all ranks of
the first step that was planned after the last thing it did.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from time import monotonic

from tests.chaos.cluster.cluster import Cluster
from tests.chaos.cluster.processes import NotInTime, Stalled
from tests.chaos.faults.decks import (
    DISK_FAULTS,
    ENGINES,
    FAULTS,
    REFERENCES,
    REWINDS,
    TORCHRUN_FAULTS,
)
from tests.chaos.settings import Settings
from tests.chaos.verdict.check import GONE, Verdict, check

#: Steps that go by between two faults.
FEWEST_STEPS, MOST_STEPS = 1, 8


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds until a fault was over and its effects too; `fault_seconds` of them were the fault
    itself: a pause, or the time until what was killed had been started again and was ready.
    """

    fault: str
    seconds: float
    fault_seconds: float


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a run. stalled: why it did not get to its end, or not without a traceback in
    some log. times_full: faults in which the disk was full and the dispatcher said so. sizes:
    numbers of DP ranks that a process group had. unresolved: samples dropped, as what they were in
    was gone; released: objects of a payload store.
    """

    recoveries: tuple[Recovery, ...]
    verdict: Verdict
    stalled: str | None
    acknowledged: int
    steps: int
    times_full: int
    steps_rewound: int
    sizes: frozenset[int]
    unresolved: int
    released: int


def run(
    folder: Path,
    settings: Settings,
    faults: Iterable[str],
    random: Random,
    report: Callable[[str], None] = lambda _: None,
) -> Result:
    """Run the faults and judge. A cluster that stalls is judged by what it did until then."""
    recoveries: list[Recovery] = []

    def strike(cluster: Cluster) -> None:
        for name in faults:
            recoveries.append(found := _strike(cluster, name, random))
            report(
                f"fault {len(recoveries)}: {found.fault}, recovered after "
                f"{found.seconds:.2f} s, {found.fault_seconds:.2f} s of them the fault, "
                f"step {cluster.group.newest}"
            )

    result = live(folder, settings, strike, report)
    return replace(result, recoveries=tuple(recoveries))


def live(
    folder: Path,
    settings: Settings,
    disturb: Callable[[Cluster], None],
    report: Callable[[str], None] = lambda _: None,
) -> Result:
    """Run a cluster from its beginning over what disturbs it to its end, and judge."""
    stalled = None
    cluster = Cluster(folder, settings)
    try:
        with cluster:
            try:
                disturb(cluster)
                cluster.finish()
            except NotInTime:
                cluster.stuck = cluster.look() or None
                raise
    except Stalled as error:
        stalled = str(error)
        report(f"stalled: {stalled}")
    if stalled is None and (logs := cluster.complaints()):
        stalled = f"there are tracebacks in {', '.join(logs)}"
    history, final = cluster.history(), cluster.final or {}
    return Result(
        recoveries=(),
        verdict=check(history),
        stalled=stalled,
        acknowledged=sum(len(one.acknowledged) for one in history.producers),
        steps=len({step for one in history.ranks for step in one.takes}),
        times_full=cluster.times_full,
        steps_rewound=final.get("steps_rewound", 0),
        sizes=frozenset(len(group.seen) for group in cluster.groups),
        unresolved=final.get("dropped", {}).get(GONE, 0),
        released=final.get("objects", {}).get("freed", 0),
    )


def _strike(cluster: Cluster, name: str, random: Random) -> Recovery:
    cluster.await_steps(random.randint(FEWEST_STEPS, MOST_STEPS))
    began = monotonic()
    (FAULTS | DISK_FAULTS | TORCHRUN_FAULTS | REWINDS | REFERENCES | ENGINES)[name](cluster, random)
    over = monotonic()
    recovered = cluster.await_recovery()
    cluster.look()
    where = " under torchrun" if cluster.settings.torchrun else ""
    return Recovery(name + where, recovered - began, min(over, recovered) - began)
