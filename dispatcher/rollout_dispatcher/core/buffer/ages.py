"""Ready samples by what may end their stay: their policy version, and their length.

So that what has become too old, or is too long, is found without a look at what is not. Nothing is
kept by versions before somebody asks for them, which only settings and phases make anybody do.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, groupby

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.buffer.limits import NO_LIMITS, MicroBatchLimits
from rollout_dispatcher.core.indexes.lowest import Lowest


class Ages:
    """Ready samples, of which groups come and leave whole.

    too_long: above so many tokens. micro_batch: what groups have to fit, if they are dropped else.
    """

    def __init__(
        self, too_long: int | None = None, micro_batch: MicroBatchLimits = NO_LIMITS
    ) -> None:
        self._above, self._micro_batch = too_long, micro_batch
        #: Whether anything is to be told of what comes and leaves.
        self.watches = too_long is not None
        self._by_version: dict[int | None, dict[Entry, int]] | None = None
        self._versions: Lowest[int] = Lowest()
        self._unknown: Lowest[int] = Lowest()  # tickets of samples without a version
        self._long: dict[Entry, None] = {}
        self._places = count()

    def watch(self, ready: Iterable[Entry]) -> None:
        """Versions will be asked for: of these samples, and of those that come from now on."""
        if self._by_version is None:
            self._by_version, self.watches = {}, True
            self._place(list(ready))

    # -- they come and leave ------------------------------------------------------------------

    def add(self, entries: Sequence[Entry]) -> None:
        """These are ready, behind all others: one group, or samples without one."""
        if self._by_version is not None:
            self._place(entries)
        if (above := self._above) is not None:
            long = [entry for entry in entries if entry.sample.tokens > above]
            if long or self._are_too_long(entries):
                self._long.update(dict.fromkeys(entries if entries[0].group >= 0 else long))

    def _are_too_long(self, entries: Sequence[Entry]) -> bool:
        """Whether they are a group that is dropped for its tokens."""
        if not self._micro_batch.drops or entries[0].group < 0:
            return False
        return self._micro_batch.too_long(entry.sample for entry in entries)

    def _place(self, entries: Sequence[Entry]) -> None:
        assert self._by_version is not None
        for version, same in _by_version(entries):
            if version is None:
                for entry in same:
                    self._unknown.set(entry.ticket, entry.ticket)
            elif version not in self._by_version:
                self._versions.set(version, version)
            self._by_version.setdefault(version, {}).update(zip(same, self._places, strict=False))

    def remove(self, entries: Sequence[Entry]) -> None:
        """These are ready no more."""
        if self._by_version is not None:
            for version, gone in _by_version(entries):
                same = self._by_version[version]
                for entry in gone:
                    del same[entry]
                if version is None:
                    for entry in gone:
                        self._unknown.remove(entry.ticket)
                elif not same:
                    self._versions.remove(version)
                    del self._by_version[version]
        if self._long:
            for entry in entries:
                self._long.pop(entry, None)

    # -- which are asked for --------------------------------------------------------------------

    def too_long(self) -> list[Entry]:
        """Samples that are too long, each with its whole group, in the order that they came in."""
        return list(self._long)

    def older_than(self, version: int) -> list[Entry]:
        """Samples of older policy versions than this, in the order that they came in."""
        if not self.has_before(version, 0):
            return []
        assert self._by_version is not None
        found: dict[Entry, int] = {}
        for old in self._versions.take_below(version):
            found |= self._by_version[old]
            self._versions.set(old, old)  # they are here until they are removed
        return sorted(found, key=found.__getitem__)

    def has_before(self, version: int, ticket: int) -> bool:
        """Whether there is an older one, or one without a version of a lower ticket."""
        oldest, first = self._versions.lowest, self._unknown.lowest
        return (oldest is not None and oldest < version) or (first is not None and first < ticket)


def _by_version(entries: Sequence[Entry]) -> Iterator[tuple[int | None, Sequence[Entry]]]:
    """Neighbours of one version, as a rule all of them."""
    # `Entry.version` of each, which as a call for each would take as long as all the rest.
    versions = [
        entry.oldest
        if entry.oldest is not None
        else None
        if (sample := entry.sample).staleness_exempt
        else sample.policy_version
        for entry in entries
    ]
    stop = 0
    for version, same in groupby(versions):
        start, stop = stop, stop + len(list(same))
        yield version, entries[start:stop]
