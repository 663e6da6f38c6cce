"""The caps of the sample buffer.

Two are *soft*: they count ready samples only, so that beginnings of groups stop nobody, and they
hold producers back only while a step could be planned of what is ready. Two are *hard*: payload
bytes in memory, and in payload stores, whatever they belong to.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from rollout_dispatcher.sample import Sample
from rollout_planner.types import round_up

#: How the hard caps are called: of what is in memory, and in payload stores.
MEMORY_CAP, STORES_CAP = "bytes", "referenced-bytes"


@dataclass(frozen=True, slots=True)
class MicroBatchLimits:
    """What a micro-batch takes of a group that has to stay in one; None: any.

    length_multiple: a sample counts as many tokens as the next multiple of this. drops: a group of
    more tokens is accepted and dropped, not refused.
    """

    samples: int | None = None
    tokens: int | None = None
    length_multiple: int = 1
    drops: bool = False

    def tokens_of(self, samples: Iterable[Sample]) -> int:
        """Tokens that a micro-batch has of these."""
        return sum(round_up(sample.tokens, self.length_multiple) for sample in samples)

    def too_long(self, samples: Iterable[Sample]) -> bool:
        """Whether these are more tokens than a micro-batch takes of one group."""
        return self.tokens is not None and self.tokens_of(samples) > self.tokens


#: Groups need not stay in one micro-batch.
NO_LIMITS = MicroBatchLimits()


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """samples, tokens: soft; `samples` counts groups where a batch is counted in groups.

    group: samples of the largest group, None: any. tokens=None: not capped. nbytes: hard.
    max_sample_tokens: of one sample. held_bytes: payloads of pushes that are held back.
    stores: addresses of those that references may be into; referenced_bytes: there, hard.
    micro_batch: for groups that have to stay in one.
    """

    samples: int
    group: int | None
    tokens: int | None
    nbytes: int
    max_sample_tokens: int
    held_bytes: int = 1 << 30
    stores: frozenset[str] = frozenset()
    referenced_bytes: int = 1 << 40
    micro_batch: MicroBatchLimits = NO_LIMITS

    def too_large(self, size: int) -> str:
        """What does not take a group of so many samples, in words; empty if all does."""
        for what, most in (("step", self.group), ("micro-batch", self.micro_batch.samples)):
            if most is not None and size > most:
                return f"a {what} takes at most {most} samples"
        return ""
