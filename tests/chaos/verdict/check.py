"""The history checker: says from what was written down where the promises were broken.

A pure function, so that it can be tested with histories that nobody lived through. Its rules:

*Committed.* commit() only queues, so when a process group is killed after all of its ranks wrote
`committing` for a step, nobody outside knows whether the dispatcher heard of it. The next group
tells: what it is given again was not committed, and what it is not given was. So a step belongs to
the last group of which any rank took it, and is committed if every rank of that group wrote
`committing` for it before the next group began. A step that some rank of its last group did not
get to commit, and that no later group got, has vanished, and its samples with it.

*Forgotten.* The dispatcher plans step n only if fewer than `max_open_steps` are open, so whoever
takes step n proves that step n - max_open_steps is committed, and durably so, since no step leaves
the dispatcher before the facts ahead of it are durable. A later group that is given such a step
trains its samples twice.

*In doubt.* A push without an answer may exist or not, but if so then once.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from tests.chaos.verdict.history import History, RankHistory, Take


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong; nothing if all is empty. committed: the sample's step, for what is."""

    lost: tuple[str, ...]
    duplicated: tuple[str, ...]
    disagreements: tuple[str, ...]
    starved: tuple[str, ...]
    committed: Mapping[str, int]

    @property
    def clean(self) -> bool:
        """Whether every promise was kept."""
        return not (self.lost or self.duplicated or self.disagreements or self.starved)


class _Group:
    """One process group: its ranks, and its time until the next one began."""

    def __init__(self, ranks: list[RankHistory]) -> None:
        self.ranks = sorted(ranks, key=lambda one: one.rank)
        self.launch = self.ranks[0].launch
        self.began = min((one.began for one in ranks if one.began is not None), default=None)
        self.over = float("inf")

    @property
    def generations(self) -> set[int]:
        return {one.generation for one in self.ranks if one.generation is not None}

    def takes(self, step: int) -> list[Take]:
        return [one.takes[step] for one in self.ranks if step in one.takes]

    def steps(self) -> set[int]:
        return {step for one in self.ranks for step in one.takes}

    def commits(self, step: int, dp_size: int) -> bool:
        done = [one for one in self.ranks if one.committing.get(step, self.over) < self.over]
        return len(done) == dp_size


def check(history: History) -> Verdict:
    """Judge one run."""
    groups = _groups(history)
    last = {step: group for group in groups for step in group.steps()}
    committed_steps = {step for step, own in last.items() if own.commits(step, history.dp_size)}
    committed = {
        sample: step
        for step in committed_steps
        for take in last[step].takes(step)
        for sample in take.samples
    }
    return Verdict(
        lost=tuple(sorted(_lost(history, groups, last, committed))),
        duplicated=tuple(sorted(_duplicated(history, groups))),
        disagreements=(
            *_in_groups(groups),
            *_over_groups(groups),
            *_processes(history, groups),
            *_books(history, committed, committed_steps),
        ),
        starved=tuple(_starved(history, committed)),
        committed=committed,
    )


def _groups(history: History) -> list[_Group]:
    """The groups that got a generation, in order."""
    ordered = sorted(history.ranks, key=lambda one: one.launch)
    found = [_Group(list(ranks)) for _, ranks in groupby(ordered, lambda one: one.launch)]
    begun = [group for group in found if group.began is not None]
    for before, after in pairwise(begun):
        assert after.began is not None
        before.over = after.began
    return begun


# -- P1: the books balance ----------------------------------------------------------------------


def _lost(
    history: History, groups: list[_Group], last: dict[int, _Group], committed: Mapping[str, int]
) -> set[str]:
    acknowledged = {name for one in history.producers for name in one.acknowledged}
    vanished = {
        sample
        for step, own in last.items()
        if any(later.launch > own.launch and max(later.steps(), default=-1) > step
               for later in groups)
        for take in own.takes(step)
        for sample in take.samples
        if sample not in committed
    }  # fmt: skip
    missing = acknowledged & vanished
    if history.final is not None:
        dropped = sum(history.final["dropped"].values())
        unaccounted = acknowledged - committed.keys()
        if len(unaccounted) > dropped:
            missing |= unaccounted
    return missing


def _books(
    history: History, committed: Mapping[str, int], committed_steps: set[int]
) -> Iterator[str]:
    pushed = {name for one in history.producers for name in one.pushed}
    for name in sorted(committed.keys() - pushed):
        yield f"sample {name} was committed, and nobody pushed it"
    withdrawn = {name for one in history.producers for name in one.withdrawn}
    for name in sorted(committed.keys() & withdrawn):
        yield f"sample {name} was committed, and its producer was told that it was withdrawn"
    final = history.final
    if final is None:
        return
    facts = {
        "accepted": len(committed) + sum(final["dropped"].values()),
        "samples_committed": len(committed),
        "steps_committed": len(committed_steps),
        "buffered": 0,
        "in_flight": 0,
        "balanced": True,
    }
    for name, expected in facts.items():
        if final[name] != expected:
            yield f"/statusz says {name} is {final[name]}, the histories say {expected}"


# -- P2: all ranks agree ------------------------------------------------------------------------


def _in_groups(groups: list[_Group]) -> Iterator[str]:
    for group in groups:
        for step in sorted(group.steps()):
            seen = {(t.digest, t.micro_batches, t.num_samples) for t in group.takes(step)}
            if len(seen) > 1:
                yield f"ranks of group {group.launch} have different plans of step {step}: {seen}"
        firsts = {min(one.takes) for one in group.ranks if one.takes}
        if len(firsts) > 1:
            yield f"ranks of group {group.launch} began with different steps: {firsts}"
        for one in group.ranks:
            for before, after in pairwise(one.takes):
                if after != before + 1:
                    yield f"rank {one.rank} of group {group.launch} took {after} after {before}"


def _over_groups(groups: list[_Group]) -> Iterator[str]:
    known: dict[tuple[int, int], tuple[str, tuple[str, ...]]] = {}
    for group in groups:
        for one in group.ranks:
            for step, take in one.takes.items():
                plan = take.digest, take.samples
                if known.setdefault((step, one.rank), plan) != plan:
                    yield f"step {step} came to rank {one.rank} again with another plan"
    plans: defaultdict[int, set[str]] = defaultdict(set)
    for (step, _), (digest, _) in known.items():
        plans[step].add(digest)
    for step, digests in plans.items():
        if len(digests) > 1:
            yield f"step {step} has several digests: {sorted(digests)}"


def _processes(history: History, groups: list[_Group]) -> Iterator[str]:
    newest = -1
    for group in groups:
        numbers = group.generations
        if len(numbers) != 1 or min(numbers) <= newest:
            yield f"group {group.launch} has generations {sorted(numbers)} after {newest}"
        newest = max(newest, *numbers)
    for one in history.ranks:
        who = f"rank {one.rank} of group {one.launch}"
        for fault in one.faults:
            yield f"{who}: {fault}"
        if (one.launch, one.rank) in history.returned and one.fenced is None:
            yield f"{who} came back after its successor had begun, and was not fenced"
        if one.fenced is not None and one.launch == max(each.launch for each in history.ranks):
            yield f"{who} was fenced, and there is no newer group"


# -- P3: each accepted sample is trained on once ------------------------------------------------


def _duplicated(history: History, groups: list[_Group]) -> set[str]:
    places: defaultdict[str, set[int]] = defaultdict(set)
    twice: set[str] = set()
    highest = -1
    for group in groups:
        for step in group.steps():
            samples = [name for take in group.takes(step) for name in take.samples]
            twice |= {name for name, times in Counter(samples).items() if times > 1}
            for name in samples:
                places[name].add(step)
            if step <= highest - history.max_open_steps:
                twice.update(samples)
        highest = max(highest, max(group.steps(), default=-1))
    return twice | {name for name, steps in places.items() if len(steps) > 1}


# -- P4: nobody starves -------------------------------------------------------------------------


def _starved(history: History, committed: Mapping[str, int]) -> Iterator[str]:
    """What was acknowledged while step n was the newest must be in one of the steps that follow."""
    taken = sorted((take.at, step) for one in history.ranks for step, take in one.takes.items())
    times = [at for at, _ in taken]
    newest = list(accumulate((step for _, step in taken), max))
    for producer in history.producers:
        for name, at in producer.acknowledged.items():
            before = bisect_right(times, at)
            since = newest[before - 1] if before else -1
            if committed.get(name, since) - since > history.longest_wait:
                yield f"sample {name}: acknowledged at step {since}, trained in {committed[name]}"
