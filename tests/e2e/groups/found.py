"""What came of a run: the samples of each step, what /metrics says, and whether both agree."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from tests.e2e.groups.rollouts import Books, Prompt, group_of


def dropped(metrics: Mapping[str, float]) -> dict[str, int]:
    """Accepted samples that were given up, by reason."""
    prefix = "samples_dropped_total{reason="
    return {
        name.removeprefix(prefix).rstrip("}"): int(value)
        for name, value in metrics.items()
        if name.startswith(prefix) and value
    }


@dataclass(frozen=True)
class Found:
    """What came of a run. metrics: /metrics after the last commit."""

    steps: dict[int, list[str]]
    metrics: dict[str, float]

    @cached_property
    def committed(self) -> set[str]:
        """Samples of committed steps; fails on one that is there twice."""
        counts = Counter(name for names in self.steps.values() for name in names)
        assert {name: count for name, count in counts.items() if count > 1} == {}
        return set(counts)

    @property
    def dropped(self) -> dict[str, int]:
        """Accepted samples that were given up, by reason."""
        return dropped(self.metrics)

    def assert_accounted(self, books: Books, *, unheard: Iterable[str] = ()) -> None:
        """Every accepted sample is committed or counted as dropped; the books balance.

        unheard: samples whose producer did not live to hear the answer.
        """
        perhaps = set(unheard) - books.accepted
        assert self.committed <= books.accepted | perhaps
        received = int(self.metrics["samples_received_total{outcome=accepted}"])
        assert len(books.accepted) <= received <= len(books.accepted | perhaps)
        assert received == len(self.committed) + sum(self.dropped.values())
        assert self.metrics["samples_committed_total"] == len(self.committed)
        assert self.metrics["steps_committed_total"] == len(self.steps)
        for still in ("buffer_samples", "samples_in_flight", "open_groups", "pushes_held"):
            assert self.metrics[still] == 0, still
        assert self.split_groups == {}

    @property
    def split_groups(self) -> dict[str, set[int]]:
        """Steps of the groups that are in more than one."""
        places: defaultdict[str, set[int]] = defaultdict(set)
        for number, names in self.steps.items():
            for name in names:
                places[group_of(name)].add(number)
        return {name: found for name, found in places.items() if len(found) > 1}

    def assert_all_committed(self, books: Books, shares: Iterable[Iterable[Prompt]]) -> None:
        """Every sample of every prompt is in a whole step; nothing was refused or dropped."""
        wanted = {name for share in shares for prompt in share for name in prompt.samples}
        assert books.refused == {}
        assert books.accepted == wanted
        assert self.dropped == {}
        assert self.committed == wanted
        self.assert_accounted(books)
        assert self.metrics["partial_steps_total"] == 0
