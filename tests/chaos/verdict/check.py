"""The history checker: says from what was written down where the promises were broken.

A pure function, so that it can be tested with histories that nobody lived through. Its rules:

*Committed.* commit() only queues, so when a process group is killed after all of its ranks wrote
`committing` for a step, nobody outside knows whether the dispatcher heard of it. The next group
tells: what it is given again was not committed, and what it is not given was. So a step belongs to
the last group of which any rank took it, and is committed if every rank of that group wrote
`committing` for it before the next group began. A step that some rank of its last group did not
get to commit, and that no later group got, has vanished, and its samples with it.

*Deleted.* The dispatcher plans step n only if fewer than `max_open_steps` are open, so whoever
takes step n proves that step n - max_open_steps is committed, and durably so, since no step leaves
the dispatcher before the facts ahead of it are durable. A later group that is given such a step
trains its samples twice.

*Rewound.* A group that has loaded a checkpoint taken after step n makes void what was committed
after n: it begins with n + 1, trains what it is given, and those steps belong to it.

*Of another size.* A group of another number of ranks is given the open steps in other plans, and
the same samples.

*Planned again.* What was removed from a payload store cannot be trained. Its samples may be
dropped, their groups with them; the step that they were in comes again as a later attempt, with
other samples, and the earlier attempts are void. Nothing else may be lost, and nothing may be left
in the store but what a rewind may still need.

*In doubt.* A push without an answer may exist or not, but if so then once. What a rank took does
exist: nothing is in a step that is not durable.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

from tests.chaos.verdict.groups import Group, groups_of
from tests.chaos.verdict.history import History


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong; nothing if all is empty. committed: the sample's step, for what is."""

    lost: tuple[str, ...]
    duplicated: tuple[str, ...]
    disagreements: tuple[str, ...]
    starved: tuple[str, ...]
    overfull: tuple[str, ...]
    stuck: tuple[str, ...]
    leaked: tuple[str, ...]
    committed: Mapping[str, int]

    @property
    def clean(self) -> bool:
        """Whether every promise was kept."""
        return not any(getattr(self, kind) for kind in KINDS)


#: Why the dispatcher drops what is gone from a payload store.
GONE = "unresolved"

#: What may be wrong.
KINDS = ("lost", "duplicated", "disagreements", "starved", "overfull", "stuck", "leaked")


def check(history: History) -> Verdict:
    """Judge one run."""
    groups = groups_of(history)
    last = {step: group for group in groups for step in group.steps()}
    committed_steps = {step for step, own in last.items() if own.commits(step)}
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
            *_rewinds(history, groups),
            *_split(history, committed),
        ),
        starved=tuple(_starved(history, committed)),
        overfull=tuple(sorted(set(_overfull(history)))),
        stuck=tuple(_stuck(history, groups)),
        leaked=tuple(sorted(_leaked(history, committed))),
        committed=committed,
    )


# -- P1: the books balance ----------------------------------------------------------------------


def _lost(
    history: History, groups: list[Group], last: dict[int, Group], committed: Mapping[str, int]
) -> set[str]:
    accepted = {name for one in history.producers for name in one.acknowledged}
    accepted |= {name for one in history.ranks for take in one.takes.values()
                 for name in take.samples}  # fmt: skip
    vanished = {
        sample
        for step, own in last.items()
        if any(later.launch > own.launch and max(later.steps(), default=-1) > step
               for later in groups)
        for take in own.takes(step)
        for sample in take.samples
        if sample not in committed
    }  # fmt: skip
    gone = _gone(history)
    missing = vanished - gone
    if history.final is not None:
        dropped = sum(history.final["dropped"].values()) - history.final["dropped"].get(GONE, 0)
        unaccounted = accepted - committed.keys() - gone
        if len(unaccounted) > dropped:
            missing |= unaccounted
    return missing


def _gone(history: History) -> set[str]:
    """What was removed, and what is in a group with it."""
    groups = [group for one in history.producers for group in one.groups]
    hit = (group for group in groups if not history.deleted.isdisjoint(group))
    return set(history.deleted).union(*hit)


def _split(history: History, committed: Mapping[str, int]) -> Iterator[str]:
    for group in (group for one in history.producers for group in one.groups):
        steps = {committed.get(name) for name in group}
        if len(steps) > 1:
            yield f"the group of {group[0]} was not trained whole, in one step: {steps}"


def _books(
    history: History, committed: Mapping[str, int], committed_steps: set[int]
) -> Iterator[str]:
    pushed = {name for one in history.producers for name in one.pushed}
    for name in sorted(committed.keys() - pushed):
        yield f"sample {name} was committed, and nobody pushed it"
    withdrawn = {name for one in history.producers for name in one.withdrawn}
    for name in sorted(committed.keys() & withdrawn):
        yield f"sample {name} was committed, and its producer was told that it was withdrawn"
    for look in history.looks:
        done = look["samples_committed"] - look["samples_rewound"]
        held = look["buffered"] + look["in_flight"] + done + sum(look["dropped"].values())
        if look["accepted"] != held:
            yield f"/statusz says accepted is {look['accepted']}, and where samples are {held}"
    final = history.final
    if final is None:
        return
    if (unresolved := final["dropped"].get(GONE, 0)) > len(_gone(history)):
        yield f"{unresolved} samples were dropped as {GONE}, {len(_gone(history))} could be"
    facts = {
        "accepted": len(committed) + sum(final["dropped"].values()),
        "samples_committed": len(committed) + final["samples_rewound"],
        "steps_committed": len(committed_steps) + final["steps_rewound"],
        "buffered": 0,
        "in_flight": 0,
        "balanced": True,
    }
    for name, expected in facts.items():
        if final[name] != expected:
            yield f"/statusz says {name} is {final[name]}, the histories say {expected}"


def _rewinds(history: History, groups: list[Group]) -> Iterator[str]:
    """Between what was certainly committed and rewound, and what may have been."""
    fewest = most = 0
    newest = -1
    for group in groups:
        if group.resumed is not None:
            earlier = [one for one in groups if one.launch < group.launch]
            said = {step for one in earlier for step in one.steps() if one.said_committed(step)}
            fewest += max(newest - history.max_open_steps - group.resumed, 0)
            most += sum(step > group.resumed for step in said)
            newest = group.resumed
        newest = max(newest, max(group.steps(), default=-1))
    if history.final is None:
        return
    if not fewest <= (told := history.final["steps_rewound"]) <= most:
        yield f"/statusz says steps_rewound is {told}, the histories say {fewest} to {most}"
    if history.final["steps_lost"]:
        yield f"{history.final['steps_lost']} steps were not given again after a rewind"
    saved = max((one.saved for one in history.ranks), default=-1)
    kept = history.final["steps_retained"]
    if saved >= 0 and kept != max(_last_of(groups) - saved, 0):
        yield f"/statusz says steps_retained is {kept}, and a checkpoint after {saved} was saved"


def _last_of(groups: list[Group]) -> int:
    """The last step that anybody took, but for what was rewound and not taken again."""
    return max((step for group in groups for step in group.steps()), default=-1)


# -- P2: all ranks agree ------------------------------------------------------------------------


def _in_groups(groups: list[Group]) -> Iterator[str]:
    for group in groups:
        for step in sorted(group.steps()):
            takes = group.takes(step)
            seen = {
                (t.digest, t.attempt, t.micro_batches, t.num_samples, t.loss_tokens) for t in takes
            }
            if len(seen) > 1:
                yield f"ranks of group {group.launch} have different plans of step {step}: {seen}"
            trained = sum(take.own_loss for take in takes)
            if len(takes) == group.size and trained != takes[0].loss_tokens:
                yield f"step {step} says {takes[0].loss_tokens} loss tokens, its ranks {trained}"
        firsts = {min(one.takes) for one in group.ranks if one.takes}
        if len(firsts) > 1:
            yield f"ranks of group {group.launch} began with different steps: {firsts}"
        if group.resumed is not None and firsts and firsts != {group.resumed + 1}:
            yield f"group {group.launch} was to go on after {group.resumed}, began with {firsts}"
        for one in group.ranks:
            for before, after in pairwise(one.takes):
                if after != before + 1:
                    yield f"rank {one.rank} of group {group.launch} took {after} after {before}"


def _over_groups(groups: list[Group]) -> Iterator[str]:
    """The same plan for each group of the same size that follows, the same samples for all.

    Of each attempt; a group that is given an earlier one than those before it is told.
    """
    plans: dict[int, tuple[int, str]] = {}
    attempts: dict[int, int] = {}
    shares: dict[tuple[int, int], tuple[str, ...]] = {}
    whole: dict[int, set[str]] = {}
    for group in groups:
        for step in sorted(group.steps()):
            takes = group.takes(step)
            plan, attempt = (group.size, takes[0].digest), takes[0].attempt
            if (before := attempts.get(step, attempt)) > attempt:
                yield f"step {step} came as attempt {attempt} after {before}"
            if before < attempt:
                del plans[step]
                whole.pop(step, None)
                shares = {place: one for place, one in shares.items() if place[0] != step}
            attempts[step] = attempt
            known = plans.setdefault(step, plan)
            if known[0] != group.size:  # it was planned again, for these ranks
                plans[step] = plan
                shares = {place: one for place, one in shares.items() if place[0] != step}
            elif known != plan:
                yield f"step {step} has several digests: {sorted({known[1], plan[1]})}"
            for one in group.ranks:
                samples = one.takes[step].samples if step in one.takes else None
                if samples is not None and shares.setdefault((step, one.rank), samples) != samples:
                    yield f"step {step} came to rank {one.rank} again with another plan"
            names = {name for take in takes for name in take.samples}
            if len(takes) == group.size and whole.setdefault(step, names) != names:
                yield f"step {step} came again with other samples: {sorted(whole[step] ^ names)}"


def _processes(history: History, groups: list[Group]) -> Iterator[str]:
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


def _duplicated(history: History, groups: list[Group]) -> set[str]:
    places: defaultdict[str, set[int]] = defaultdict(set)
    attempts: defaultdict[int, int] = defaultdict(int)
    for one in history.ranks:
        for step, take in one.takes.items():
            attempts[step] = max(attempts[step], take.attempt)
    twice: set[str] = set()
    highest = -1
    for group in groups:
        if group.resumed is not None:
            highest = min(highest, group.resumed)
        for step in group.steps():
            takes = [take for take in group.takes(step) if take.attempt == attempts[step]]
            samples = [name for take in takes for name in take.samples]
            twice |= {name for name, times in Counter(samples).items() if times > 1}
            for name in samples:
                places[name].add(step)
            done = highest - history.max_open_steps if group.resumed is None else group.resumed
            if step <= done:
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


# -- P7: bounded memory -------------------------------------------------------------------------


def _overfull(history: History) -> Iterator[str]:
    for look in history.looks:
        if (buffered := look["buffered"] - look["open_group_samples"]) > history.most_buffered:
            yield f"{buffered} samples were buffered, and {history.most_buffered} may be"


def _leaked(history: History, committed: Mapping[str, int]) -> Iterator[str]:
    """Objects that are left, but for what is kept for a rewind."""
    retains = history.final is not None and history.final["steps_retained"]
    saved = max((one.saved for one in history.ranks), default=-1)
    for key, names in history.left.items():
        if not retains or all(committed.get(name, -1) <= saved for name in names):
            yield key


# -- P8: it never waits for itself --------------------------------------------------------------


def _stuck(history: History, groups: list[Group]) -> Iterator[str]:
    """Nothing moves, ranks wait, and here is what would make a step; or the end has come."""
    at = history.stuck
    if at is None or not groups:
        return
    if history.ended:
        yield f"the stream was ended, and the dispatcher is {at['run_state']}"
    ranks = groups[-1].ranks
    waiting = [
        one for one in ranks if one.began is not None and one.takes.keys() == one.committed.keys()
    ]
    enough = at["buffered"] >= history.batch or at["in_flight"] > 0 or at["pushes_held"] > 0
    if enough and waiting and not any(one.ended for one in ranks):
        yield (
            f"DP ranks {[one.rank for one in waiting]} wait, while {at['buffered']} samples are "
            f"buffered, {at['in_flight']} in flight and {at['pushes_held']} pushes held back"
        )
