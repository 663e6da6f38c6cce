"""A soak: a dispatcher under more load than its ranks take, and what memory it holds meanwhile.

Memory is what the system counts as resident (VmRSS of /proc), `anonymous` that of it which no file
backs: the journal's index is a mapped file, whose pages the system takes back when it wants to.
"""

import http.client
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rollout_dispatcher.protocol.endpoint import Endpoint
from tests.chaos.cluster.processes import Process
from tests.support.options import arguments
from tests.support.server import eventually, series

DP_SIZE = 2
#: Each with as many of the producers; more would take the machine from the dispatcher.
CROWDS = 2
#: Shares of the samples: what comes first fills buffers, pools and memories of bounded size.
WARM_UP, TENTH = 0.1, 0.1
POLL_S = 0.25
#: Beyond this a run does not go on.
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """samples: to be committed. batch: of them in a step, for which ranks need `step_s`.

    ballast: bytes a token.
    """

    samples: int
    journal: bool
    producers: int = 64
    batch: int = 512
    ballast: int = 24
    step_s: float = 0.1
    buffer_samples: int = 1024
    id_horizon: int = 10_000


@dataclass(frozen=True, slots=True)
class Look:
    """The dispatcher at one moment; memory in bytes."""

    seconds: float
    committed: int
    resident: int
    anonymous: int
    backpressure: float
    balanced: bool
    connections: int


def soak(folder: Path, load: Load, report: Callable[[Look], None] = lambda _: None) -> list[Look]:
    """Run until so many samples are committed; what was seen on the way, from the first sample."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:

        def start(name: str, *command: object) -> Process:
            process = Process([str(word) for word in command], folder / f"{name}.log")
            stack.callback(process.kill)
            return process

        ready = folder / "ready.json"
        dispatcher = start(
            "dispatcher", "rollout_dispatcher.cli.main", "serve", *_flags(folder, load)
        )
        eventually(ready.exists, "the dispatcher is ready")
        addresses = json.loads(ready.read_text())
        endpoint, plane = addresses["listen"][0], Endpoint.parse(addresses["http"])
        looks = [_look(dispatcher, plane, time.monotonic())]
        start("ranks", "tests.soak.rank", endpoint, DP_SIZE, load.step_s)
        share = load.producers // CROWDS
        crowds = [
            start(f"crowd-{first}", "tests.soak.crowd", endpoint, addresses["http"],
                  first, first + share, load.ballast)
            for first in range(0, load.producers, share)
        ]  # fmt: skip
        began = moved = time.monotonic()
        while looks[-1].committed < load.samples:
            time.sleep(POLL_S)
            looks.append(_look(dispatcher, plane, began))
            report(looks[-1])
            if looks[-1].committed > looks[-2].committed:
                moved = time.monotonic()
            assert time.monotonic() - moved < PATIENCE_S, f"nothing is committed; see {folder}"
            assert all(crowd.code is None for crowd in crowds), f"producers failed; see {folder}"
    return looks


def _flags(folder: Path, load: Load) -> list[str]:
    options: dict[str, object] = {
        "listen": "127.0.0.1:0",
        "http": "127.0.0.1:0",
        "ready-file": folder / "ready.json",
        "dp-size": DP_SIZE,
        "global-batch-size": load.batch,
        "micro-batch-tokens": 4096,
        "window": 1.5,
        "buffer-capacity": load.buffer_samples,
        "sample-id-horizon": load.id_horizon,
    }
    if load.journal:
        options |= {"journal-dir": folder / "journal", "sample_retention": "commit"}
    return arguments(options)


def _look(dispatcher: Process, plane: Endpoint, began: float) -> Look:
    connection = http.client.HTTPConnection(plane.host, plane.port, timeout=PATIENCE_S)
    connection.request("GET", "/metrics")
    found = series(connection.getresponse().read().decode())
    connection.close()
    status = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{dispatcher.pid}/status").read_text().splitlines()
    )
    accepted = found.get("samples_received_total{outcome=accepted}", 0)
    held = found["buffer_samples"] + found["samples_in_flight"] + found["samples_committed_total"]
    return Look(
        seconds=time.monotonic() - began,
        committed=int(found["samples_committed_total"]),
        resident=_kilobytes(status["VmRSS"]),
        anonymous=_kilobytes(status["RssAnon"]),
        backpressure=found["backpressure_seconds_total"],
        balanced=accepted == held,
        connections=int(found.get("connections_total{role=producer}", 0)),
    )


def _kilobytes(text: str) -> int:
    return 1024 * int(text.split(maxsplit=1)[0])


def figures(looks: Sequence[Look]) -> dict[str, object]:
    """What memory did after the warm-up."""
    total = looks[-1].committed
    after = [look for look in looks if look.committed >= WARM_UP * total]
    first = [look for look in after if look.committed < (WARM_UP + TENTH) * total]
    last = [look for look in after if look.committed >= (1 - TENTH) * total]
    found: dict[str, object] = {
        "samples": total,
        "producer_connections": looks[-1].connections,
        "seconds": round(looks[-1].seconds, 1),
        "samples_per_second": round(total / looks[-1].seconds),
        "backpressure_share": round(
            (after[-1].backpressure - after[0].backpressure)
            / max(after[-1].seconds - after[0].seconds, 1e-9),
            3,
        ),
        "balanced": all(look.balanced for look in looks),
        "looks": len(after),
    }
    for name in ("resident", "anonymous"):
        before, now = (
            statistics.fmean(getattr(look, name) for look in part) for part in (first, last)
        )
        slope = statistics.linear_regression(
            [look.committed for look in after], [getattr(look, name) for look in after]
        ).slope
        found[name] = {
            "start_mb": round(getattr(looks[0], name) / 1e6, 2),
            "first_tenth_mb": round(before / 1e6, 2),
            "last_tenth_mb": round(now / 1e6, 2),
            "peak_mb": round(max(getattr(look, name) for look in looks) / 1e6, 2),
            "growth": round(now / before - 1, 4),
            "trend_mb_per_100k_samples": round(slope * 100_000 / 1e6, 3),
        }
    return found
