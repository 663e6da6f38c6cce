"""Frames from bytes that are there already."""

from rollout_dispatcher.protocol.frame import (
    Admit,
    Allocate,
    Frame,
    FrameReader,
    at_once,
    in_one_piece,
)


def feed(
    reader: FrameReader, data: bytes, allocate: Allocate = in_one_piece, admit: Admit = at_once
) -> list[Frame]:
    """What `get_buffer` and `received` make of these bytes."""
    frames: list[Frame] = []
    view = memoryview(data)
    while view:
        target = reader.get_buffer()
        taken = min(len(target), len(view))
        target[:taken] = view[:taken]
        view = view[taken:]
        frames += reader.received(taken, allocate, admit)
    return frames
