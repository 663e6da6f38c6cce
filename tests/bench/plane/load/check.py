"""What a receiver checks of the samples it gets: cheap enough not to be what is measured.

Of every sample: its length, the first and the last token id, and the last log-probability (and the
last feature), which a shifted or overwritten buffer gets wrong. Of one sample in `WHOLE_EVERY` all
values of all fields. `seen` and `ids` are for the question asked after the clock has stopped:
whether each sample came exactly once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.bench.plane.load.loads import SPACING, Array, IntArray, Load

WHOLE_EVERY = 64


@dataclass(slots=True)
class Checker:
    """Checks samples of one load, packed one after the other."""

    load: Load
    ids: list[str] = field(default_factory=list)
    seen: list[IntArray] = field(default_factory=list)
    _read: list[list[Array]] = field(default_factory=list)

    def packed(self, fields: Mapping[str, Array], cu_seqlens: IntArray, ids: Sequence[str]) -> None:
        """Check the samples of a micro-batch; raises AssertionError that names the first bad one.

        What is read of each is compared by the dozens, here or in `take`.
        fields: [total tokens, ...] each. cu_seqlens: [samples + 1].
        """
        starts, stops = cu_seqlens[:-1], cu_seqlens[1:]
        lasts = stops - 1
        token_ids = fields["input_ids"]
        read = [stops - starts, token_ids[starts], token_ids[lasts], fields["logprobs"][lasts]]
        if "features" in fields:
            read.append(fields["features"][lasts, -1])
        self._read.append(read)
        before = len(self.ids)
        self.ids += ids
        if before // WHOLE_EVERY != len(self.ids) // WHOLE_EVERY:
            self._compare()
            self._whole(fields, int(stops[0]), int(token_ids[0]) // SPACING, ids[0])

    def _compare(self) -> None:
        """Compare what was read since the last time."""
        length, first_id, last_id, last_logprob, *last_feature = (
            np.concatenate(column) for column in zip(*self._read, strict=True)
        )
        index, last = first_id // SPACING, length - 1
        right = (first_id == SPACING * index) & (last_id == first_id + last)
        right &= self.load.lengths[index] == length
        right &= last_logprob == (index + last) % 1024
        if last_feature:
            right &= last_feature[0] == (index + last) % 512
        names = self.ids[-len(index) :]
        assert right.all(), f"sample {names[int(np.argmin(right))]} is not what was pushed"
        self._read.clear()
        self.seen.append(index)

    def _whole(self, fields: Mapping[str, Array], stop: int, index: int, name: str) -> None:
        for key, expected in self.load.fields(index).items():
            same = np.array_equal(_bits(fields[key][:stop]), _bits(expected))
            assert same, f"{key} of {name} is not what was pushed"

    def take(self) -> tuple[list[str], list[int]]:
        """Ids of the samples since the last call, and how often each of the pool came."""
        if self._read:
            self._compare()
        ids, self.ids = self.ids, []
        seen, self.seen = self.seen, []
        found = np.concatenate(seen) if seen else np.zeros(0, np.int64)
        return ids, np.bincount(found, minlength=self.load.pool).tolist()


def _bits(values: Array) -> Array:
    """The same, or what numpy compares as fast: it takes floats of 16 bits one by one."""
    return values.view(np.uint16) if values.dtype == np.float16 else values
