"""Random problems, each corner's against each peer: how far we are behind at worst.

Differences are ours less theirs, in step time over an even share. An answer over its budget is no
comparison, and is counted. `worst_same_number` is the worst where both have as many micro-batches:
fewer of them come before less waiting. `worst_priced` is the worst with what it costs to begin
each.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rollout_planner.types import IntArray, Layout, Sync
from tests.peers import table
from tests.peers.corners import PADDED_COST
from tests.peers.lengths import FILES, available, draw
from tests.peers.measure import with_memory_of
from tests.peers.problem import Corner, Peer, Problem, Rating, Unanswered, rate

Rng = np.random.Generator
Draw = Callable[[Rng], Problem]


def lengths(rng: Rng, n: int) -> IntArray:
    """Of one of many shapes: narrow, wide, heavy-tailed, in two clusters, all alike, or real."""
    traces = [name for name in FILES if available(name)]
    shape = rng.integers(6 if traces else 5)
    if shape == 5:
        return draw(traces[rng.integers(len(traces))], n, int(rng.integers(2**31)))
    scale = 10 ** rng.uniform(1, 4)
    found = (
        lambda: rng.lognormal(0, rng.uniform(0.1, 1.5), n),
        lambda: rng.uniform(0.1, 2, n),
        lambda: rng.pareto(rng.uniform(1.2, 3), n) + 0.1,
        lambda: np.where(rng.random(n) < rng.uniform(0.02, 0.5), 5.0, 0.5) * rng.uniform(0.9, 1, n),
        lambda: np.ones(n),
    )[shape]()
    return np.clip(found * scale, 1, 131072).astype(np.int64)


def shape(rng: Rng, least: int = 1) -> tuple[int, int]:
    """Ranks, and samples a rank: few, so that peers in plain Python answer 2,000 in a minute."""
    R = int(rng.choice([2, 4, 8, 16]))
    return R, int(rng.integers(least, max(least + 1, 257 // R)))


def budget(rng: Rng, tokens: IntArray) -> int:
    """From the longest sample up to four of them."""
    return int(tokens.max() * rng.uniform(1, 4))


def padded(rng: Rng) -> Problem:
    """R x M micro-batches, and on average some samples in each."""
    R, M = int(rng.choice([2, 4, 8])), int(rng.integers(1, 5))
    n = R * M * int(rng.integers(1, 7))
    return Problem(lengths(rng, n), R, PADDED_COST, layout=Layout.PADDED, micro_batches=M)


def budgets(rng: Rng) -> Problem:
    """Ranks meet at every micro-step."""
    R, p = shape(rng)
    found = lengths(rng, R * p)
    return Problem(found, R, micro_batch_tokens=budget(rng, found))


def step_budgets(rng: Rng) -> Problem:
    """Ranks meet once a step."""
    return replace(budgets(rng), sync=Sync.STEP)


def groups(rng: Rng) -> Problem:
    """Groups of one size, as many on each rank if a peer wants so."""
    R, size = int(rng.choice([2, 4, 8])), int(rng.integers(1, 9))
    count = R * int(rng.integers(1, 9))
    members = np.repeat(np.arange(count), size)
    found = np.repeat(lengths(rng, count), size) * rng.uniform(0.7, 1, len(members))
    return Problem(np.maximum(found, 1).astype(np.int64), R, sync=Sync.STEP, group=members)


def equal(rng: Rng) -> Problem:
    """As many samples on each rank."""
    R, p = shape(rng)
    return Problem(lengths(rng, R * p), R, sync=Sync.STEP)


def multiples(rng: Rng) -> Problem:
    """Enough samples that no micro-batch need be empty."""
    multiple = int(rng.integers(2, 5))
    R, p = shape(rng, 2 * multiple)
    found = lengths(rng, R * p)
    return Problem(found, R, micro_batch_tokens=budget(rng, found), multiple=multiple)


def minimums(rng: Rng) -> Problem:
    """Likewise."""
    problem = multiples(rng)
    return replace(problem, multiple=1, minimum=problem.multiple)


def together(rng: Rng) -> Problem:
    """A budget that the largest group fits."""
    problem = groups(rng)
    assert problem.group is not None
    largest = np.bincount(problem.group, weights=problem.lengths)
    tokens = budget(rng, largest.astype(np.int64))
    return replace(problem, sync=Sync.MICRO_STEP, micro_batch_tokens=tokens, together=True)


#: Name of a row, its corner, and what draws its problems. In `budget`, numbers of micro-batches are
#: compared as well.
DRAWS: tuple[tuple[str, Corner, Draw], ...] = (
    ("padded", Corner.PADDED, padded),
    ("budget, step", Corner.BUDGET, step_budgets),
    ("budget", Corner.BUDGET, budgets),
    ("groups", Corner.GROUPS, groups),
    ("equal", Corner.EQUAL, equal),
    ("multiple", Corner.MULTIPLE, multiples),
    ("minimum", Corner.MINIMUM, minimums),
    ("together", Corner.TOGETHER, together),
)


def measure_all(
    corners: set[str], us: Peer, peers: Sequence[Peer], cases: int
) -> list[dict[str, Any]]:
    """Rows of all corners and peers, printed as they come."""
    rows: list[dict[str, Any]] = []
    if cases:
        print(table.RANDOM_HEADING)
    for name, corner, draw_one in DRAWS:
        if not cases or corner not in corners:
            continue
        began = time.monotonic()
        asked = [peer for peer in peers if corner in peer.solves]
        print(f"{name}: {cases} beside {', '.join(peer.name for peer in asked)}", flush=True)
        for row in measure(corner, draw_one, us, asked, cases):
            rows.append({"corner": name} | row)
            print(table.random_line(rows[-1]), flush=True)
        print(f"{'':12} {time.monotonic() - began:.0f} s", flush=True)
    return rows


def measure(
    corner: Corner,
    draw_one: Draw,
    us: Peer,
    peers: Sequence[Peer],
    cases: int,
) -> list[dict[str, Any]]:
    """One row for each peer."""
    found: dict[str, list[tuple[int, Rating, Rating]]] = {peer.name: [] for peer in peers}
    unanswered, why = 0, ""
    for seed in range(cases):
        problem = with_memory_of(draw_one(np.random.default_rng(seed)), peers)
        mine = _answer(us, corner, problem)
        if isinstance(mine, str):
            unanswered, why = unanswered + 1, why or mine
            continue
        for peer in peers:
            theirs = _answer(peer, corner, problem)
            if not isinstance(theirs, str):
                found[peer.name].append((seed, mine, theirs))
    return [
        {"peer": name, "drawn": cases, "ours_unanswered": unanswered, "why": why} | compared(pairs)
        for name, pairs in found.items()
    ]


def _answer(peer: Peer, corner: Corner, problem: Problem) -> Rating | str:
    try:
        return rate(problem, peer.solves[corner](problem))
    except Unanswered as error:
        return str(error)


def compared(pairs: Sequence[tuple[int, Rating, Rating]]) -> dict[str, Any]:
    """Of ours and theirs: how far we are behind, in how many we need more, or break a cap."""
    legal = [(seed, a, b) for seed, a, b in pairs if not b.over_cap]
    behind = [(a.time - b.time, seed) for seed, a, b in legal]
    same = [a.time - b.time for _, a, b in legal if a.micro_batches == b.micro_batches]
    worst, at = max(behind, default=(None, None))
    return {
        "cases": len(pairs),
        "p95": float(np.quantile([one for one, _ in behind], 0.95)) if behind else None,
        "worst": worst,
        "worst_seed": at,
        "worst_same_number": max(same, default=None),
        "worst_priced": max((a.priced - b.priced for _, a, b in legal), default=None),
        "more_micro_batches": sum(a.micro_batches > b.micro_batches for _, a, b in legal),
        "fewer_micro_batches": sum(a.micro_batches < b.micro_batches for _, a, b in legal),
        "more_empty": sum(a.empty > b.empty for _, a, b in legal),
        "ours_over_cap": sum(a.over_cap > 0 for _, a, _ in pairs),
        "peer_over_cap": sum(b.over_cap > 0 for _, _, b in pairs),
    }
