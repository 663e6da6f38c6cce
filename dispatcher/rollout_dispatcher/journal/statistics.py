"""What a journal tells of itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Trouble(StrEnum):
    """Why nothing more became durable."""

    FULL = "full"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class JournalStatistics:
    """A snapshot. LSNs are as `append` returned them; bytes are on disk, preallocated ones too.

    errors: how often each trouble began.
    """

    durable_lsn: int
    appended_lsn: int
    queued_batches: int
    batches: int
    records: int
    blocks: int
    syncs: int
    nbytes: int
    live_bytes: int
    live_samples: int
    segments: int
    torn_tail: bool
    errors: Mapping[Trouble, int] = field(default_factory=dict)
