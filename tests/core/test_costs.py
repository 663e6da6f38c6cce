"""What an event costs does not grow with what there is: counted, not timed.

Counted are the interpreter's instructions, and the bytes that are allocated at the same time, which
is what shows of a pass over everything in C. Each is compared in a state and in one ten times as
large; the first event of a kind is not counted, since what many events have put off may fall to it.
Open steps, ends that are asked for and pushes that a hard cap blocks are passed over one by one:
there are a handful of the first two, and nothing else goes on while a hard cap blocks.
"""

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from tests.support.core.events import EVENTS
from tests.support.core.states import STATES
from tests.support.core.worlds import World

SMALL, LARGE = 12, 120
#: Of each event, of which the cheapest counts: a heap is tidied now and then.
TIMES = 3
#: For logarithms, and bytes of numbers that have become longer.
MARGIN, MARGIN_BYTES = 1.3, 600


def instructions(happens: Callable[[], object]) -> int:
    """How many the interpreter carries out meanwhile."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        happens()
    finally:
        sys.settrace(before)
    return count


def allocated(happens: Callable[[], object]) -> int:
    """Bytes, at most at a time."""
    tracemalloc.start()
    try:
        happens()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def least(world: World, event: str, what: Callable[[Callable[[], object]], int]) -> int | None:
    """The least that this event costs in this world; None if it cannot happen there."""
    found = []
    for at in range(TIMES + 1):
        happens = EVENTS[event](world, (what is allocated) * (TIMES + 1) + at)
        if happens is None:
            return None
        found.append(what(happens))
    return min(found[1:])


@pytest.mark.parametrize("state", STATES)
def test_an_event_costs_no_more_where_there_is_more(state: str) -> None:
    small, large = STATES[state](SMALL), STATES[state](LARGE)
    for event in EVENTS:
        for what, margin in ((instructions, 0), (allocated, MARGIN_BYTES)):
            few, many = least(small, event, what), least(large, event, what)
            if few is None or many is None:
                continue
            assert many <= MARGIN * few + margin, f"{event}: {what.__name__} {few} -> {many}"
