"""Stragglers: the last samples of a segment, which keep all of it mapped while they wait.

    segment, 64 samples   committed: 60, in an open step: 3, passed over: 1

Once segments hold more than `HELD_RATIO` of the payload that is still needed in them, what is left
in the emptiest is copied, until they do not. Invariant: this takes a bounded share of each turn of
the event loop, however much is held.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from itertools import islice

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.dispatch import Dispatch
from rollout_dispatcher.payload import InMemory
from rollout_dispatcher.service.connections.shared_memory import SharedMemory
from rollout_dispatcher.transport.shared_memory.segments import Segment, segment_of

#: Bytes that may be mapped for each byte of payload that is needed.
HELD_RATIO = 1.15
#: Spans of which is found out, at a time, whether they are needed; entries that are looked through
#: in a turn for those to copy; bytes that are copied in one: a millisecond at most for each.
SPANS_AT_ONCE = 16_384
ENTRIES_A_TURN = 8_192
BYTES_A_TURN = 2 * 1024 * 1024
#: Bytes to copy before it is looked again who has how much left.
BYTES_AT_ONCE = 64 * 1024 * 1024


class Stragglers:
    """Copies them."""

    def __init__(self, shared_memory: SharedMemory, core: Dispatch) -> None:
        self._shared_memory, self._core = shared_memory, core
        #: Bytes needed of each segment, by its number, when that was last found out.
        self._live: dict[int, int] = {}
        #: Who is looked at next.
        self._line: deque[int] = deque()
        #: Segments to be emptied, by `id`, and the entries that may be in them.
        self._chosen: dict[int, Segment] = {}
        self._entries: Iterator[Entry] = iter(())

    def look(self) -> None:
        """Samples are done with, maybe: find out, and begin to copy what has to be."""
        if self._chosen or not self._shared_memory:
            return
        segments = self._shared_memory.segments()
        self._count(segments)
        self._chosen = {id(segment): segment for segment in self._emptiest(segments)}
        if self._chosen:
            self._entries = self._core.entries()
            self._go_on()

    def _count(self, segments: dict[int, Segment]) -> None:
        """Find out how much is needed of some, in turn; of a new one all is."""
        before, line = self._live, self._line
        self._live = live = {at: before.get(at, len(it)) for at, it in segments.items()}
        line.extend(live.keys() - before.keys())
        looked = 0
        for _ in range(len(line)):
            if looked >= SPANS_AT_ONCE:
                break
            number = line.popleft()
            if (segment := segments.get(number)) is not None:
                live[number] = segment.live_bytes
                looked += segment.num_spans
                line.append(number)

    def _emptiest(self, segments: dict[int, Segment]) -> Iterator[Segment]:
        """Those to be emptied for the others to hold no more than they may."""
        held, live = sum(map(len, segments.values())), sum(self._live.values())
        copied = 0
        for number in sorted(segments, key=lambda at: self._live[at] / len(segments[at])):
            if held <= HELD_RATIO * live or copied >= BYTES_AT_ONCE:
                return
            yield segments[number]
            copied += self._live[number]
            held -= len(segments[number])
            live -= self._live[number]

    def _go_on(self) -> None:
        """A turn's share, and the next in a later turn; if this fails, `look` begins anew."""
        chosen, self._chosen = self._chosen, {}
        if self._copy_some(chosen):
            self._chosen = chosen
            asyncio.get_running_loop().call_soon(self._go_on)

    def _copy_some(self, chosen: dict[int, Segment]) -> bool:
        """Copy what is in these segments; returns whether there may be more of it."""
        moved: list[tuple[Entry, InMemory]] = []
        left, looked = BYTES_A_TURN, 0
        for looked, entry in enumerate(islice(self._entries, ENTRIES_A_TURN), 1):  # noqa: B007
            payload = entry.sample.payload
            if not isinstance(payload, InMemory):
                continue
            segment = segment_of(payload)
            if segment is not None and id(segment) in chosen:
                moved.append((entry, segment.copied(payload)))
                left -= len(payload)
                if left <= 0:
                    break
        self._core.payloads_moved(moved)
        self._shared_memory.copied_bytes += BYTES_A_TURN - left
        return looked == ENTRIES_A_TURN or left <= 0
