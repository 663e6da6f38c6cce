"""A chaos run: faults on a cluster one after the other, then the end of the stream, then the check.

Each fault waits until some steps went by since the one before it. Its recovery time is from its
beginning, a pause's length and the start of new processes included, to the commit by all ranks of
the first step that was planned after the last thing it did.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import monotonic

from tests.chaos.cluster.cluster import Cluster
from tests.chaos.cluster.processes import Stalled
from tests.chaos.faults.campaign import DISK_FAULTS, FAULTS, TORCHRUN_FAULTS
from tests.chaos.settings import Settings
from tests.chaos.verdict.check import Verdict, check

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
    some log. times_full: faults in which the disk was full and the dispatcher said so.
    """

    recoveries: tuple[Recovery, ...]
    verdict: Verdict
    stalled: str | None
    acknowledged: int
    steps: int
    times_full: int


def run(
    folder: Path,
    settings: Settings,
    faults: Iterable[str],
    random: Random,
    report: Callable[[str], None] = lambda _: None,
) -> Result:
    """Run the faults and judge. A cluster that stalls is judged by what it did until then."""
    recoveries: list[Recovery] = []
    stalled = None
    cluster = Cluster(folder, settings)
    try:
        with cluster:
            for name in faults:
                recoveries.append(found := _strike(cluster, name, random))
                report(
                    f"fault {len(recoveries)}: {found.fault}, recovered after "
                    f"{found.seconds:.2f} s, {found.fault_seconds:.2f} s of them the fault, "
                    f"step {cluster.group.newest}"
                )
            cluster.finish()
    except Stalled as error:
        stalled = f"{error} (after fault {len(recoveries)})"
        report(f"stalled: {stalled}")
    if stalled is None and (logs := cluster.complaints()):
        stalled = f"there are tracebacks in {', '.join(logs)}"
    history = cluster.history()
    return Result(
        recoveries=tuple(recoveries),
        verdict=check(history),
        stalled=stalled,
        acknowledged=sum(len(one.acknowledged) for one in history.producers),
        steps=len({step for one in history.ranks for step in one.takes}),
        times_full=cluster.times_full,
    )


def _strike(cluster: Cluster, name: str, random: Random) -> Recovery:
    cluster.await_steps(random.randint(FEWEST_STEPS, MOST_STEPS))
    began = monotonic()
    (FAULTS | DISK_FAULTS | TORCHRUN_FAULTS)[name](cluster, random)
    over = monotonic()
    recovered = cluster.await_recovery()
    where = " under torchrun" if cluster.settings.torchrun else ""
    return Recovery(name + where, recovered - began, min(over, recovered) - began)
