"""Process groups as the checker sees them: which steps each took, and which it committed."""

from itertools import groupby, pairwise

from tests.chaos.verdict.history import History, RankHistory, Take


class Group:
    """One process group: its ranks, and its time until the next one began."""

    def __init__(self, ranks: list[RankHistory]) -> None:
        self.ranks = sorted(ranks, key=lambda one: one.rank)
        self.launch = self.ranks[0].launch
        self.began = min((one.began for one in ranks if one.began is not None), default=None)
        self.over = float("inf")
        #: The step of the checkpoint that its ranks have loaded, if they have.
        self.resumed = max((one.resumed for one in ranks if one.resumed is not None), default=None)
        #: The earliest step that a later group went back to; beyond any if none did.
        self.rewound_to = float("inf")

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.ranks)

    @property
    def generations(self) -> set[int]:
        """The numbers that its ranks were given; one if all is well."""
        return {one.generation for one in self.ranks if one.generation is not None}

    def takes(self, step: int) -> list[Take]:
        """What its ranks got of a step, as far as they took it."""
        return [one.takes[step] for one in self.ranks if step in one.takes]

    def steps(self) -> set[int]:
        """Every step that some rank took."""
        return {step for one in self.ranks for step in one.takes}

    def said_committed(self, step: int) -> bool:
        """Whether every rank has begun to commit it, and the dispatcher may have heard of it."""
        return all(one.committing.get(step, self.over) < self.over for one in self.ranks)

    def commits(self, step: int) -> bool:
        """Whether it said so, and no later group has made that void."""
        return step <= self.rewound_to and self.said_committed(step)


def groups_of(history: History) -> list[Group]:
    """The groups that got a generation, in order."""
    ordered = sorted(history.ranks, key=lambda one: one.launch)
    found = [Group(list(ranks)) for _, ranks in groupby(ordered, lambda one: one.launch)]
    begun = [group for group in found if group.began is not None]
    for before, after in pairwise(begun):
        assert after.began is not None
        before.over = after.began
    for at, group in enumerate(begun):
        later = [one.resumed for one in begun[at + 1 :] if one.resumed is not None]
        group.rewound_to = min(later, default=group.rewound_to)
    return begun
