"""The caps of the sample buffer.

Two are *soft*: they count ready samples only, so that beginnings of groups stop nobody, and they
hold producers back only while a step could be planned of what is ready. One is *hard*: payload
bytes in memory, whatever they belong to.
"""

from dataclasses import dataclass

from rollout_dispatcher.stores import STORES


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """samples, tokens: soft; `samples` counts groups where a batch is counted in groups.

    group: samples of the largest group, None: any. tokens=None: not capped. nbytes: hard.
    max_sample_tokens: of one sample. held_bytes: payloads of pushes that are held back.
    stores: names of those that references may be into.
    """

    samples: int
    group: int | None
    tokens: int | None
    nbytes: int
    max_sample_tokens: int
    held_bytes: int = 1 << 30
    stores: frozenset[str] = frozenset(STORES)
