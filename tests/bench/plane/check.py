"""What a receiver checks of the samples it gets: cheap enough not to be what is measured.

Of every sample: its length, the first and the last token id, and the last log-probability (and the
last feature), which a shifted or overwritten buffer gets wrong. Of one sample in `WHOLE_EVERY` all
values of all fields. `seen` and `ids` are for the question asked after the clock has stopped:
whether each sample came exactly once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.bench.plane.loads import SPACING, Array, IntArray, Load

WHOLE_EVERY = 64


@dataclass(slots=True)
class Checker:
    """Checks samples of one load, packed one after the other."""

    load: Load
    ids: list[str] = field(default_factory=list)
    seen: list[IntArray] = field(default_factory=list)
    count: int = 0

    def packed(self, fields: Mapping[str, Array], cu_seqlens: IntArray, ids: Sequence[str]) -> None:
        """Check the samples of a micro-batch; raises AssertionError that names the first bad one.

        fields: [total tokens, ...] each. cu_seqlens: [samples + 1].
        """
        starts, stops = cu_seqlens[:-1], cu_seqlens[1:]
        token_ids = fields["input_ids"]
        index = token_ids[starts] // SPACING
        last = stops - starts - 1
        right = (self.load.lengths[index] == last + 1) & (
            token_ids[stops - 1] == token_ids[starts] + last
        )
        right &= token_ids[starts] == SPACING * index
        right &= fields["logprobs"][stops - 1] == (index + last) % 1024
        if "features" in fields:
            right &= fields["features"][stops - 1, -1] == (index + last) % 512
        assert right.all(), f"sample {ids[int(np.argmin(right))]} is not what was pushed"
        before, self.count = self.count, self.count + len(ids)
        if before // WHOLE_EVERY != self.count // WHOLE_EVERY:
            self._whole(fields, int(starts[0]), int(stops[0]), int(index[0]), ids[0])
        self.seen.append(index)
        self.ids += ids

    def _whole(
        self, fields: Mapping[str, Array], start: int, stop: int, index: int, name: str
    ) -> None:
        for key, expected in self.load.fields(index).items():
            found = fields[key][start:stop]
            assert np.array_equal(found, expected), f"{key} of {name} is not what was pushed"

    def take(self) -> tuple[list[str], list[int]]:
        """Ids of the samples since the last call, and how often each of the pool came."""
        ids, self.ids = self.ids, []
        seen, self.seen = self.seen, []
        found = np.concatenate(seen) if seen else np.zeros(0, np.int64)
        return ids, np.bincount(found, minlength=self.load.pool).tolist()
