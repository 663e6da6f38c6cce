"""`dispatcher-to-rank-1m` and `push-to-loop-50mbps`: one hop alone, and the way of one push.

**dispatcher-to-rank-1m**: a whole run of samples of 1 MB is in the dispatcher before the ranks
join. The clock runs from when the last rank begins to connect to the last commit, so the handshake
and the first plan count; nothing is received meanwhile. Ranks prefetch two steps. Beside it,
blocking TCP from one sender to two receivers.

**push-to-loop-50mbps**: from the call of push to the tensors in the training loop, for each
micro-batch, where nothing has to be waited for: each push holds exactly one step (16 samples of 26
kB in the mean, a micro-batch of 8 for either rank), the window is that one step, and both ranks
wait for it. Pushed at 50 MB/s, whether earlier ones have come or not. Encoding is in it, and the
agreement of all ranks that they hold the step.
"""

from collections.abc import Iterator

from tests.bench.plane.load.loads import Load
from tests.bench.plane.measure.end_to_end import MEGA, RANK
from tests.bench.plane.planes.floor import floor
from tests.bench.plane.planes.plane import plane
from tests.bench.plane.rows import Row, latency_rows, row

PACE = 50 * MEGA


def one_hop(load: Load, rounds: int) -> Iterator[Row]:
    """The floor's row, then ours."""
    ours: list[float] = []
    raw: list[float] = []
    with plane(load, rank=RANK, buffer_capacity=load.samples) as moving, floor(load) as floors:
        for _ in range(rounds + 1):
            raw.append(floors.run() / MEGA)
            moving.push(load.samples)
            ours.append(load.run_bytes / moving.unload() / MEGA)
        moving.join()
        moving.finish()
    yield (tcp := row("raw-tcp-1m", "MB/s", raw[1:]))
    yield row("dispatcher-to-rank-1m", "MB/s", ours[1:], tcp)


def push_to_loop(load: Load, rounds: int) -> Iterator[Row]:
    """Two rows, p50 and p99."""
    ours: list[list[float]] = []
    with plane(load, window=1) as moving:
        moving.join()
        for _ in range(rounds + 1):
            pushed, arrived = moving.pace(PACE)
            ours.append(
                [at - began for rank in arrived for began, at in zip(pushed, rank, strict=True)]
            )
        moving.finish()
    yield from latency_rows("push-to-loop-50mbps", ours[1:])
