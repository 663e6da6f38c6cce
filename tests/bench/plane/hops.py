"""`dispatcher-to-rank-1m` and `hop-latency-50mbps`: the dispatcher's hops one by one.

**dispatcher-to-rank-1m**: a whole run of samples of 1 MB is in the dispatcher before the ranks
join. The clock runs from when the last rank begins to connect to the last commit, so the handshake
and the first plan count; nothing is received meanwhile. Beside it, blocking TCP from one sender to
two receivers.

**hop-latency-50mbps**: what the dispatcher adds to a sample that nobody has to wait for. Each push
holds exactly one step (16 samples of 26 kB in the mean, a micro-batch of 8 for either rank), the
window is that one step and both ranks wait for it: so no sample waits for others to fill a batch,
and what is left is encoding, two hops, the plan, the agreement of the ranks that all of them hold
the step, and tensors. Taken from the call of push to each micro-batch in its rank's training loop,
at 50 MB/s. Beside it the raw relay with the same buffers at the same pace.
"""

from collections.abc import Iterator
from itertools import chain

from tests.bench.plane.end_to_end import MEGA
from tests.bench.plane.floor import floor
from tests.bench.plane.loads import LOADS
from tests.bench.plane.plane import plane
from tests.bench.plane.rows import Row, latency_rows, row

PACE = 50 * MEGA


def one_hop(rounds: int) -> Iterator[Row]:
    """The floor's row, then ours."""
    load = LOADS["1m"]
    ours: list[float] = []
    raw: list[float] = []
    with plane(load, buffer_capacity=load.samples) as moving, floor(load, relay=False) as floors:
        for _ in range(rounds + 1):
            raw.append(floors.run() / MEGA)
            moving.push(load.samples)
            ours.append(load.run_bytes / moving.unload() / MEGA)
        moving.join()
        moving.finish()
    yield (tcp := row("raw-tcp-1m", "MB/s", raw[1:]))
    yield row("dispatcher-to-rank-1m", "MB/s", ours[1:], tcp)


def hop_latency(rounds: int) -> Iterator[Row]:
    """The floor's rows, then ours."""
    load = LOADS["hop"]
    ours: list[list[float]] = []
    raw: list[list[float]] = []
    with plane(load, window_multiple=1) as moving, floor(load, relay=True) as floors:
        moving.join()
        for _ in range(rounds + 1):
            raw.append(floors.pace(PACE))
            pushed, arrived = moving.pace(PACE)
            ours.append(
                [at - began for rank in arrived for began, at in zip(pushed, rank, strict=True)]
            )
        moving.finish()
    relay = list(latency_rows("raw-relay-latency-50mbps", raw[1:]))
    yield from chain(relay, latency_rows("hop-latency-50mbps", ours[1:], relay))
