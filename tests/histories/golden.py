"""The histories that are kept: recorded by today's code, and what has changed since."""

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.histories import core, play, service

HERE = Path(__file__).parent
CORE, SERVICE = range(260), range(40)
Replay = Callable[[dict[str, Any], Path], Iterator[dict[str, Any]]]


def record() -> Iterator[str]:
    """Play all of them anew; returns how large each file is."""
    for name, seeds, make in (
        ("core", CORE, play.record),
        ("service", SERVICE, service.record),
    ):
        with _in_a_folder() as folder:
            found = [make(seed, folder) for seed in seeds]
        lines = [json.dumps(one, separators=(",", ":")) for one in found]
        path = HERE / f"{name}.json.gz"
        path.write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))
        yield f"{path}: {len(lines)} histories, {path.stat().st_size:,} bytes"


def kept(name: str) -> list[dict[str, Any]]:
    """The recorded histories of the core, or of the service."""
    lines = gzip.decompress((HERE / f"{name}.json.gz").read_bytes()).decode().splitlines()
    return [json.loads(line) for line in lines]


def check() -> Iterator[str]:
    """What comes out otherwise than it was recorded."""
    yield from differences("core", kept("core"), core.replay)
    yield from differences("service", kept("service"), service.replay)


def differences(name: str, histories: Iterable[dict[str, Any]], replay: Replay) -> Iterator[str]:
    """The first event of each history that has another outcome."""
    for history in histories:
        with _in_a_folder() as folder:
            found = _difference(history, replay(history, folder))
        if found:
            yield f"{name} history {history['seed']}, {found}"


def _difference(history: dict[str, Any], replayed: Iterator[dict[str, Any]]) -> str:
    try:
        for at, (event, then) in enumerate(history["events"]):
            now = json.loads(json.dumps(next(replayed)))
            if now != then:
                return f"event {at} {json.dumps(event)[:200]}: {_shown(then, now)}"
    except AssertionError as error:
        return f"event {at} {json.dumps(event)[:200]}: {error}"
    return ""


def _shown(then: dict[str, Any], now: dict[str, Any]) -> str:
    """Only what differs."""
    parts = []
    for key in sorted({*then, *now}):
        before, after = then.get(key, {}), now.get(key, {})
        if isinstance(before, dict) and isinstance(after, dict):
            names = sorted({*before, *after})
            pairs = [(f"{key} {name}", before.get(name), after.get(name)) for name in names]
        elif isinstance(before, list) and isinstance(after, list):
            pairs = [(key, one, two) for one, two in zip_longest(before, after)]
        else:
            pairs = [(key, before, after)]
        parts += [
            f"{name} was {json.dumps(one)}, is {json.dumps(two)}"
            for name, one, two in pairs
            if one != two
        ]
    return "; ".join(parts)[:1000]


@contextmanager
def _in_a_folder() -> Iterator[Path]:
    """A folder of its own that is gone afterwards."""
    with TemporaryDirectory(prefix="histories-") as path:
        yield Path(path) / "run"
