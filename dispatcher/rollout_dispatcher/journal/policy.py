"""When a batch of facts counts as durable.

    off             once written: survives the death of the process, not a power cut
    interval:100ms  once written, and synced this often: a power cut loses the last interval
    batch           once synced: survives a power cut

Under every policy a snapshot syncs the log before the index, so that a power cut shortens the
journal and never makes it unreadable. So `off` syncs too, once a segment.
"""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum

from rollout_dispatcher.errors import ConfigError

_INTERVAL = re.compile(r"interval:(\d+(?:\.\d+)?)(ms|s)")
#: Above a minute, `off` is the honest name.
_LONGEST = 60.0


class SyncMode(StrEnum):
    """The condition for a batch to be durable."""

    OFF = "off"
    INTERVAL = "interval"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class SyncPolicy:
    """interval: seconds between syncs, for `SyncMode.INTERVAL`."""

    mode: SyncMode
    interval: float = 0.0


def parse_sync(text: str) -> SyncPolicy:
    """`off`, `batch` or `interval:100ms` as a policy. Raises ConfigError."""
    if text in {SyncMode.OFF, SyncMode.BATCH}:
        return SyncPolicy(SyncMode(text))
    found = _INTERVAL.fullmatch(text)
    if found is None:
        near = get_close_matches(text, [*SyncMode, "interval:100ms"], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"journal sync {text!r} is none of off, batch and interval:<time> (say interval:100ms)"
            f"{hint}"
        )
    seconds = float(found[1]) / (1000 if found[2] == "ms" else 1)
    if not 0.001 <= seconds <= _LONGEST:
        raise ConfigError(
            f"journal sync {text!r}: the interval must be 1ms to 60s; for longer ones take off"
        )
    return SyncPolicy(SyncMode.INTERVAL, seconds)
