"""Space: which samples are written again at the end of the log, so that their segments are freed.

Segments that hold a few long-lived samples each would add up. So while there is more than twice the
live bytes, and a few segments, the emptiest segment's samples are moved. Invariant: the disk used
is bounded by what is live, not by how long it lives.
"""

from rollout_dispatcher.errors import JournalCorrupt
from rollout_dispatcher.journal.files.segments import SegmentFiles
from rollout_dispatcher.journal.records import MOVED, Row
from rollout_dispatcher.journal.replay import read_payload
from rollout_dispatcher.journal.state import State

#: Segments beyond twice the live bytes that are left alone.
_SLACK_SEGMENTS = 4


def moves(
    state: State, files: SegmentFiles, active: int
) -> tuple[list[Row], list[memoryview]] | None:
    """The samples of the emptiest segment, to be placed again, if space is wasted on them.

    active: the segment that is written to, which is left alone, as one is with damaged payloads.
    Raises JournalError.
    """
    live, sizes = state.live, files.sizes
    held = [number for number in live if number != active and number not in files.damaged]
    slack = _SLACK_SEGMENTS * files.segment_bytes
    if sum(sizes[number] for number in held) <= 2 * state.live_bytes + slack:
        return None
    emptiest = min(held, key=lambda number: live[number].nbytes)
    members = [kept for kept in state.kept.values() if kept.segment == emptiest]
    try:
        with files.reader(emptiest) as reader:
            payloads = [memoryview(read_payload(reader, kept)) for kept in members]
    except JournalCorrupt:
        files.damaged.add(emptiest)
        return None
    return [[MOVED, kept.ticket, kept.nbytes, 0] for kept in members], payloads
