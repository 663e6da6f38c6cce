"""Delivery of micro-batches to the device of the training loop: as they are, or copied to a GPU.

The copy is made on a stream of its own, and that of the next micro-batch is issued before the
training loop gets the present one, so that it runs while that is computed:

    training loop    | compute 0        | compute 1        | compute 2
    copying       0  | 1    (idle)      | 2    (idle)      | ...

Invariant: the loop's stream reads a tensor only after its copy; the host's memory is held until its
copy is done; and the GPU's memory is not given to another tensor before the loop's stream is done
with it, though the loop dropped it earlier (`record_stream`).
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from rollout_dispatcher.transport.memory import Memory
from rollout_workers.micro_batch.layouts import Collation
from rollout_workers.micro_batch.micro_batch import MicroBatch

T = TypeVar("T")
#: A micro-batch on its way: a call returns it, ready for the kernels that the loop issues then.
Coming = Callable[[], MicroBatch]


class Delivery:
    """Sends micro-batches to a device; this one without a stream of its own.

    copies: whether they are in other memory there. ahead: whether to send one while the loop
    computes the one before.
    """

    ahead = False

    def __init__(self, device: torch.device | None = None) -> None:
        self._device, self.copies = device, device is not None

    def send(self, batch: MicroBatch) -> Coming:
        """Copy it and wait; without a device it is there already."""
        there = batch if self._device is None else batch.to(self._device)
        return lambda: there


def delivery_to(device: torch.device | None) -> Delivery:
    """The delivery to a device; None for the memory that they are in."""
    if device is None or device.type == "cpu":
        return Delivery()
    return ToGpu(device) if device.type == "cuda" else Delivery(device)


def memory_for(device: torch.device | None) -> Memory | None:
    """Memory to receive payloads for a GPU, which it copies from by itself; else None.

    Pinned memory has a pool already: torch's.
    """
    if device is None or device.type != "cuda":
        return None
    return lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy().data


def look_ahead(count: int, here: Callable[[int], bool], send: Callable[[int], T]) -> Iterator[T]:
    """What `send` makes of 0 to count - 1, in order; the next of each if it is here by then.

    Example: if all are here, 0 and 1 are sent, 0 is yielded, 2 is sent, 1 is yielded.
    """
    following: list[T] = []
    for index in range(count):
        present = following.pop() if following else send(index)
        if index + 1 < count and here(index + 1):
            following.append(send(index + 1))
        yield present


class ToGpu(Delivery):
    """Copies micro-batches to a GPU on a stream of its own."""

    ahead = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        #: Host memory that is being copied from, and when that is done.
        self._sent: deque[tuple[torch.cuda.Event, MicroBatch]] = deque()
        weakref.finalize(self, _finish, self._stream, self._sent).atexit = False

    def send(self, batch: MicroBatch) -> Coming:
        """Issue the copies."""
        while self._sent and self._sent[0][0].query():  # type: ignore[no-untyped-call]
            self._sent.popleft()
        nested = batch.layout is Collation.JAGGED  # of which the tensors inside are copied
        host = (batch.as_packed() if nested else batch).pin_memory()
        with torch.cuda.stream(self._stream):
            there = host.to(self._device, non_blocking=True)
            if nested:
                there = there.as_jagged()
            done = self._stream.record_event()
        self._sent.append((done, host))
        return partial(_arrived, there, done)


def _finish(stream: torch.cuda.Stream, sent: deque[tuple[torch.cuda.Event, MicroBatch]]) -> None:
    stream.synchronize()
    sent.clear()


def _arrived(batch: MicroBatch, done: torch.cuda.Event) -> MicroBatch:
    """The current stream waits for the copy, this thread does not."""
    current = torch.cuda.current_stream(next(iter(batch.values())).device)
    current.wait_event(done)
    for tensor in _buffers(batch):
        tensor.record_stream(current)
    return batch


def _buffers(batch: MicroBatch) -> Iterator[Tensor]:
    for tensor in batch.values():
        if tensor.is_nested:
            yield from (tensor.values(), tensor.offsets())  # type: ignore[attr-defined]
        else:
            yield tensor
