"""A whole plane of some source tree, which says after each run what its processes have computed.

Started by its path with that tree in PYTHONPATH, so that a tree is measured that does not have this
file: everything that is imported is the tree's own. Beside the load it may be told `rank`, what its
ranks are told, and `options` of the dispatcher.
"""

from collections.abc import Sequence
from pathlib import Path

from tests.bench.plane.children.children import answer, arguments, orders
from tests.bench.plane.load.loads import find
from tests.bench.plane.measure.end_to_end import RANK
from tests.bench.plane.planes.plane import Plane, plane

#: Runs that do not count: imports, caches and memory are there then.
WARM_UP = 2


def main() -> None:
    """Run when told, each time the whole load; the answer is CPU seconds by process."""
    given = arguments()
    rank, options = RANK | given.get("rank", {}), given.get("options", {})
    with plane(find(given), rank=rank, **options) as moving:
        moving.join()
        for _ in range(WARM_UP):
            moving.run()
        answer(ready=True)
        for order in orders():
            if order["do"] == "end":
                break
            before = spent(moving)
            moving.run()
            answer(**{name: after - before[name] for name, after in spent(moving).items()})
        moving.finish()
    answer(ended=True)


def spent(moving: Plane) -> dict[str, float]:
    """CPU seconds of its processes so far."""
    return {
        "producer": cpu_seconds([moving.producer.pid]),
        "dispatcher": cpu_seconds([moving.server.pid]),
        "ranks": cpu_seconds([rank.pid for rank in moving._ranks]),
    }


def cpu_seconds(pids: Sequence[int]) -> float:
    """So far, to the nanosecond, of all threads that are alive; they live as long as the plane."""
    threads = [file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(file.read_text().split()[0]) for file in threads) / 1e9


if __name__ == "__main__":
    main()
