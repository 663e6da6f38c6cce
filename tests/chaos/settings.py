"""What a chaos run is of: how many processes, how they are set, and what is special about them."""

from dataclasses import dataclass
from pathlib import Path

from tests.chaos.actors.samples import LONGEST
from tests.support.options import arguments

Address = tuple[str, int]

#: Samples; more than fit into the segments that the journal has at hand.
LARGE_BUFFER = 600


@dataclass(frozen=True, slots=True)
class Settings:
    """What is run. bug: of `tests.chaos.planted`, if any. patience: seconds until it stalls.

    rank_timeout_s: longer than a rank needs to start, or is stopped; the trainer ends after it.
    dp_size: of the first process group. torchrun: whether ranks train with torch, under torchrun.
    retain: whether steps are kept for checkpoints, which the ranks then save. references: whether
    there is a payload store, in which most samples lie; then the samples that producer 1 pushes
    together are a group. engine: of that store, one of `cluster.stores.ENGINES`.
    max_split: ranks that may train a sample together; above 1 the longest have room on four alone.
    """

    dp_size: int = 3
    producers: int = 3
    batch: int = 12
    window_multiple: int = 2
    buffer_samples: int = 64
    max_open_steps: int = 3
    max_skips: int = 8
    rank_timeout_s: float = 15.0
    patience_s: float = 60.0
    bug: str | None = None
    small_disk: bool = False
    torchrun: bool = False
    retain: bool = False
    references: bool = False
    engine: str = "file"
    max_split: int = 1

    @property
    def dp_sizes(self) -> range:
        """Numbers of ranks that a process group may have."""
        return range(self.max_split, self.max_split + 4)

    @property
    def longest_wait(self) -> int:
        """Steps between a sample's acknowledgement and its own: queued, skipped, open."""
        queued = -(-self.buffer_samples // self.batch)
        return queued + self.max_skips + self.max_open_steps + 1

    @property
    def most_buffered(self) -> int:
        """Samples that may be in the buffer: what makes a step comes in, whatever its cap."""
        return self.buffer_samples + self.batch

    def flags(self, listen: Address, http: Address, journal: Path) -> list[str]:
        """Options of `dispatcher serve`."""
        options = {
            "listen": ":".join(map(str, listen)),
            "http": ":".join(map(str, http)),
            "dp-size": self.dp_size,
            "global-batch-size": self.batch,
            "micro-batch-tokens": 128 if self.max_split == 1 else LONGEST // 2 - 4,
            "window": self.window_multiple,
            "max-split": self.max_split,
            "buffer-capacity": self.buffer_samples,
            "max-open-steps": self.max_open_steps,
            "max-delay": self.max_skips,
            "max-wait": "200ms",
            "heartbeat-interval": "300ms",
            "rank-timeout": f"{self.rank_timeout_s}s",
            "idle-timeout": "1500ms",
            "producer-timeout": "5s",
            "journal-dir": journal,
            "sample-retention": "checkpoint" if self.retain else "commit",
        }
        return arguments(options)
