"""A row: our answers to a case's problems beside everyone's, rated alike.

    {"case", "ours", "peer", "best_peer", "ratio", ...}

`peer` is the best peer's figure and `ratio` ours over it; `figure` says what is compared, and less
is better. An answer over the budget is none. null: no answer, and `why` or `others` says why.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.peers.corners import Case
from tests.peers.problem import (
    Corner,
    Figure,
    Peer,
    Problem,
    Rating,
    Unanswered,
    rate,
    tokens,
)

#: Nobody is ahead by less than this share of the step: no cost model knows better.
EVEN = 2e-4
#: Calls of which the fastest counts, where time is compared.
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Answers:
    """A planner's ratings, problem by problem, and the milliseconds that they took in all."""

    ratings: list[Rating]
    ms: float

    @property
    def micro_batches(self) -> int:
        """Of one rank, over all problems."""
        return sum(rating.micro_batches for rating in self.ratings)

    def figures(self, figure: Figure) -> list[float]:
        """What is compared, problem by problem."""
        if figure is Figure.MS:
            return [self.ms]
        if figure is Figure.TIME:
            return [rating.time for rating in self.ratings]
        if figure is Figure.COUNT:
            return [rating.micro_batches for rating in self.ratings]
        return [rating.empty for rating in self.ratings]

    def figure(self, figure: Figure) -> float:
        """All problems in one: the mean step time, or a sum."""
        found = self.figures(figure)
        return float(np.mean(found)) if figure is Figure.TIME else float(np.sum(found))


def measure(case: Case, us: Peer, peers: Sequence[Peer]) -> dict[str, Any]:
    """One row."""
    asked = [peer for peer in peers if case.corner in peer.solves]
    problems = [with_memory_of(problem, asked) for problem in case.problems()]
    repeats = REPEATS if case.figure is Figure.MS else 1
    others: dict[str, float | str] = {}
    found: dict[str, Answers] = {}
    for peer in asked:
        try:
            found[peer.name] = answers(peer, case.corner, problems, repeats)
            others[peer.name] = found[peer.name].figure(case.figure)
        except Unanswered as error:
            others[peer.name] = str(error)[:160]
    row: dict[str, Any] = {"case": case.name, "corner": case.corner, "figure": case.figure}
    row |= dict.fromkeys(("ours", "peer", "best_peer", "ratio")) | {"why": "", "others": others}
    best = min(found, key=lambda name: found[name].figure(case.figure), default=None)
    if best is not None:
        row |= {"peer": found[best].figure(case.figure), "best_peer": best}
    try:
        mine = answers(us, case.corner, problems, repeats)
    except Unanswered as error:
        return row | {"why": str(error)}
    if best is None:
        return row | {"ours": mine.figure(case.figure), "why": "no peer answers"}
    return row | beside(case.figure, mine, found, best)


def answers(peer: Peer, corner: Corner, problems: Sequence[Problem], repeats: int = 1) -> Answers:
    """Rated answers; Unanswered if one is missing, or over the budget."""
    ratings, total = [], 0.0
    for problem in problems:
        spent = []
        for _ in range(repeats):
            began = time.perf_counter()
            schedule = peer.solves[corner](problem)
            spent.append(time.perf_counter() - began)
        rating = rate(problem, schedule)
        if rating.over_cap and corner is not Corner.TIME:
            raise Unanswered(f"{rating.over_cap} micro-batches are over the budget")
        ratings.append(rating)
        total += min(spent)
    return Answers(ratings, 1e3 * total)


def with_memory_of(problem: Problem, peers: Sequence[Peer]) -> Problem:
    """A padded problem with, as its budget, the most tokens that a peer puts into a micro-batch.

    Those peers know no budget: so we get the memory that they use, and no more. Without such a peer
    it is what as many samples each would take, beside the longest.
    """
    if problem.micro_batches is None or problem.micro_batch_tokens is not None:
        return problem
    each = -(-len(problem.lengths) // (problem.dp_size * problem.micro_batches))
    largest = each * int(problem.lengths.max())
    for peer in peers[:1]:
        with suppress(Unanswered):
            schedule = peer.solves[Corner.PADDED](problem)
            largest = max(tokens(problem, part) for rank in schedule for part in rank if len(part))
    return replace(problem, micro_batch_tokens=largest)


def beside(figure: Figure, mine: Answers, found: dict[str, Answers], best: str) -> dict[str, Any]:
    """Our figure, over the best one; `behind`: problems in which anyone at all is ahead."""
    pairs = zip(
        mine.figures(figure),
        *(answered.figures(figure) for answered in found.values()),
        strict=True,
    )
    return {
        "ours": mine.figure(figure),
        "ratio": ratio(mine.figure(figure), found[best].figure(figure)),
        "ours_ms": mine.ms,
        "peer_ms": found[best].ms,
        "ours_micro_batches": mine.micro_batches,
        "peer_micro_batches": found[best].micro_batches,
        "behind": sum(ours > min(theirs) * (1 + EVEN) for ours, *theirs in pairs),
        "problems": len(mine.ratings),
    }


def ratio(ours: float, theirs: float) -> float | None:
    """Ours over theirs; 1 where both are nothing, None where only theirs is."""
    if theirs == 0:
        return 1.0 if ours == 0 else None
    return ours / theirs


def is_behind(row: dict[str, Any]) -> bool:
    """Whether the best peer has a better figure, or the only one."""
    if row["peer"] is None:
        return False
    return row["ours"] is None or row["ours"] > row["peer"] * (1 + EVEN)
