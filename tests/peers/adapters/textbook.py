"""Bin packing as textbooks have it: first fit and best fit by falling length."""

from bisect import bisect_left, insort
from collections.abc import Callable

from tests.peers.problem import Corner, Peer, Problem, Schedule


def peers() -> list[Peer]:
    """Both, always there."""
    ways = {"first fit decreasing": first_fit, "best fit decreasing": best_fit}
    corners = (Corner.COUNT, Corner.BUDGET)
    return [Peer(name, "", dict.fromkeys(corners, _dealt(pack))) for name, pack in ways.items()]


def _dealt(pack: Callable[[list[int], int], list[list[int]]]) -> Callable[[Problem], Schedule]:
    def solve(problem: Problem) -> Schedule:
        assert problem.micro_batch_tokens is not None
        bins = pack(problem.lengths.tolist(), problem.micro_batch_tokens)
        return [bins[rank :: problem.dp_size] for rank in range(problem.dp_size)]

    return solve


def _falling(lengths: list[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: -lengths[i])


def first_fit(lengths: list[int], budget: int) -> list[list[int]]:
    """Each into the first bin with room."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for i in _falling(lengths):
        at = next((b for b, room in enumerate(rooms) if room >= lengths[i]), len(bins))
        if at == len(bins):
            bins.append([])
            rooms.append(budget)
        bins[at].append(i)
        rooms[at] -= lengths[i]
    return bins


def best_fit(lengths: list[int], budget: int) -> list[list[int]]:
    """Each into the bin that it leaves the least room in."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # ascending, with the bin
    for i in _falling(lengths):
        at = bisect_left(rooms, (lengths[i], -1))
        room, b = rooms.pop(at) if at < len(rooms) else (budget, len(bins))
        if b == len(bins):
            bins.append([])
        bins[b].append(i)
        insort(rooms, (room - lengths[i], b))
    return bins
