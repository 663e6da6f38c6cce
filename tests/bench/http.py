"""What large request bodies cost everybody else: clients post at the limit, without a pause.

    python -m tests.bench.http [--seconds 6] [--clients 16] [--body-mib 4] [--json FILE]

One dispatcher at its defaults. Meanwhile `/livez` is asked and the sample plane pinged, one after
the other, and the dispatcher's own clock says how late its event loop ran. Nobody trains: the
window fills at once and most samples are answered 429, after all that is measured here was done.
"""

import argparse
import http.client
import json
import math
import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.service.http.samples import MAX_SAMPLES
from tests.support.client import WireClient
from tests.support.server import ServeProcess

MIB = 2**20
OPTIONS: dict[str, Any] = {
    "dp_size": 2, "global_batch_size": 64, "micro_batch_tokens": 65536, "checked": False,
}  # fmt: skip
LAG = "event_loop_lag_seconds_bucket{le="
#: Seconds between two questions of one who asks how long an answer takes.
PAUSE = 0.002

Headers = dict[str, str]


def sample(tokens: int, rng: random.Random) -> bytes:
    """One sample as an engine writes it: ids, a mask, and a log-probability a token."""
    ids = [rng.randrange(150_000) for _ in range(tokens)]
    logprobs = [-rng.expovariate(2) for _ in range(tokens)]
    mask = [at > tokens // 8 for at in range(tokens)]
    fields = {"input_ids": ids, "loss_mask": mask, "logprobs": logprobs}
    return json.dumps({"fields": fields, "policy_version": 3}).encode()


def bodies(nbytes: int) -> dict[str, tuple[bytes, Headers]]:
    """Bodies that are as large as they may be, of each kind."""
    rng = random.Random(0)
    one = sample(1000, rng)
    many = [one] * ((nbytes - 2) // (len(one) + 2))
    tokens = int(1000 * (nbytes / len(one)) * 0.97)
    lines = b"\n".join(many)
    tiny = b'{"fields": {"input_ids": [1, 2, 3]}}'
    zeros = b'{"fields": {"input_ids": [' + b"1," * (nbytes // 2 - 20) + b"1]}}"
    return {
        "none": (b"", {}),
        "one sample": (sample(tokens, rng), {}),
        "array": (b"[" + b", ".join(many) + b"]", {}),
        "NDJSON": (lines, {"Content-Type": "application/x-ndjson"}),
        "short numbers": (zeros, {}),
        "short lines": (b"\n".join([tiny] * MAX_SAMPLES), {}),
    }


class Load:
    """Threads that do something again and again until the end, and how long each time took."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.failures: Counter[str] = Counter()
        self._threads: list[threading.Thread] = []

    def again_and_again(self, do: Callable[[], object], pause: float = 0.0) -> list[float]:
        """Seconds that each time takes, as they come."""
        took: list[float] = []

        def run() -> None:
            while not self.over.is_set():
                began = time.perf_counter()
                try:
                    do()
                except (OSError, http.client.HTTPException) as error:
                    self.failures[type(error).__name__] += 1
                took.append(time.perf_counter() - began)
                time.sleep(pause)

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()
        return took

    def end(self) -> None:
        """Come to an end."""
        self.over.set()
        for thread in self._threads:
            thread.join(60)


class Poster:
    """One client that posts the same body on one connection."""

    def __init__(self, server: ServeProcess, body: bytes, headers: Headers) -> None:
        at = Endpoint.parse(server.http)
        self._connection = http.client.HTTPConnection(at.host, at.port, timeout=60)
        self._body, self._headers = body, headers
        self.statuses: Counter[int] = Counter()

    def post(self) -> None:
        """Once; a connection that was ended is made anew."""
        try:
            self._connection.request("POST", "/v1/samples", self._body, self._headers)
            answer = self._connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
            raise
        self.statuses[answer.status] += 1


def pinger(server: ServeProcess, stack: ExitStack) -> Callable[[], object]:
    """Ping the sample plane once, as a producer does."""
    client = stack.enter_context(WireClient(server.endpoint))
    client.send(m.HelloProducer(client_id="pings"))
    client.expect(m.WelcomeProducer)

    def ping() -> None:
        client.send(m.Ping())
        client.expect(m.Pong, within=60)

    return ping


def percentile(values: list[float], share: float) -> float:
    """By nearest rank; nan of none."""
    at = math.ceil(share * len(values)) - 1
    return sorted(values)[at] if values else math.nan


def lag_of(before: dict[str, float], after: dict[str, float]) -> tuple[float, float]:
    """The buckets that hold the 99th percentile and the latest of all, in seconds."""
    grown = sorted(
        (float(name.removeprefix(LAG).rstrip("}")), count - before.get(name, 0))
        for name, count in after.items()
        if name.startswith(LAG)
    )
    total = grown[-1][1]
    reached = [next(edge for edge, n in grown if n >= share * total) for share in (0.99, 1.0)]
    return reached[0], reached[1]


def measure(
    kind: str, body: bytes, headers: Headers, clients: int, seconds: float
) -> dict[str, object]:
    """One row: what one kind of body does to the others."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        server = stack.enter_context(ServeProcess(Path(folder), **OPTIONS))
        load, before = Load(), server.scrape()
        posters = [Poster(server, body, headers) for _ in range(clients if body else 0)]
        for poster in posters:
            load.again_and_again(poster.post)
        livez = load.again_and_again(lambda: server.get("/livez"), PAUSE)
        pings = load.again_and_again(pinger(server, stack), PAUSE)
        most, until = 0, time.monotonic() + seconds
        while time.monotonic() < until:
            pages = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1])
            most = max(most, pages * os.sysconf("SC_PAGE_SIZE"))
            time.sleep(0.01)
        load.end()
        p99, latest = lag_of(before, server.scrape())
        statuses = sum((poster.statuses for poster in posters), Counter[int]())
        if "Traceback" in server.log():
            load.failures["traceback"] += 1
    posted = sum(statuses.values())
    return {
        "body": kind,
        "bodies/s": posted / seconds,
        "loop lag p99 ms": p99 * 1e3,
        "loop lag max ms": latest * 1e3,
        "livez p99 ms": percentile(livez, 0.99) * 1e3,
        "livez max ms": max(livez) * 1e3,
        "ping p99 ms": percentile(pings, 0.99) * 1e3,
        "ping max ms": max(pings) * 1e3,
        "RSS MiB": most / MIB,
        "answers": {**{str(code): n for code, n in sorted(statuses.items())}, **load.failures},
    }


def main() -> None:
    """Measure each kind of body and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--body-mib", type=float, default=4.0)
    parser.add_argument("--only", action="append", help="kinds of bodies")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = []
    for kind, (body, headers) in bodies(int(asked.body_mib * MIB)).items():
        if asked.only and kind not in asked.only:
            continue
        rows.append(measure(kind, body, headers, asked.clients, asked.seconds))
        if len(rows) == 1:
            print(" | ".join(rows[0]))
        row = [
            f"{value:.1f}" if isinstance(value, float) else str(value)
            for value in rows[-1].values()
        ]
        print(" | ".join(row), flush=True)
    if asked.json is not None:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
