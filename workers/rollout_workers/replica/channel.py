"""Frames from the first of some processes to the others, over a gloo group of their own.

A frame is that of the sample plane (`rollout_dispatcher.protocol.frame`): a header of JSON, which
nothing unpickles, and a payload. Its beginning is broadcast in a block of a known size, which most
headers fit in, then what is left of the header, then the payload in one piece, from and into the
memory where it lies.

The group is no part of what torch.distributed knows by name: nothing of the trainer's uses it, its
watchdogs do not see it, and `destroy_process_group` leaves it alone. Its connections are closed
when it is let go of, which whoever waits for this process notices at once.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple, cast

import torch
import torch.distributed as dist

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.frame import MAGIC, PREFIX, Frame
from rollout_dispatcher.transport.memory import Memory, uninitialised

#: Most headers of micro-batches are smaller: a hundred samples with their ids.
BLOCK_BYTES = 8 * 1024
#: To connect: processes that load models reach this point minutes apart.
JOIN_TIMEOUT = timedelta(minutes=30)
#: A peer that says nothing for so long is gone, though its connection was not closed: its machine
#: or network has failed. Nobody is this long without a word: see `relay.KEEP_ALIVE_S`.
PEER_TIMEOUT = timedelta(minutes=5)

#: How many groups of each name and set of ranks this process has made: the same number in all of
#: them, as they make them together. The store remembers where the earlier ones listened.
_made: Counter[str] = Counter()


#: Above the number of any step.
NO_STEP = 2**60


class Leave(NamedTuple):
    """A process has closed its stream.

    rank: of the default group. step: the last that it, and whoever leaves with it, has begun.
    """

    rank: int
    step: int


class Channel:
    """A collective of `ranks` (of the default group), of which this process is one.

    name: what it is for; two channels of one name and the same ranks are made in the same order.
    timeout: for each frame, and each agreement.
    """

    def __init__(self, ranks: Sequence[int], name: str, timeout: timedelta = PEER_TIMEOUT) -> None:
        key = f"{name}-{hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]}"
        _made[key] += 1
        world = dist.group.WORLD
        assert world is not None, "whoever has a mesh has a process group"
        name = f"rollout-{key}-{_made[key]}"
        store = dist.PrefixStore(name, world.get_group_store())  # type: ignore[attr-defined]
        self.ranks = tuple(ranks)
        self.index = self.ranks.index(dist.get_rank())
        gloo = dist.ProcessGroupGloo(store, self.index, len(ranks), JOIN_TIMEOUT)
        # It has the same collectives as any group; torch's stubs do not say so.
        self._group: dist.ProcessGroup | None = cast("dist.ProcessGroup", gloo)
        self._timeout = timeout
        self._block = torch.zeros(BLOCK_BYTES, dtype=torch.uint8)
        self._view = memoryview(self._block.numpy().data)

    def say(self, message: m.Message, payload: memoryview | None = None) -> None:
        """Tell the others, as the first of them. Raises RuntimeError when one of them is gone."""
        frame = codec.encode(message, 0 if payload is None else payload.nbytes)
        begin = frame[:BLOCK_BYTES]
        self._view[: len(begin)] = begin
        parts = [self._block]
        if len(frame) > BLOCK_BYTES:
            parts.append(torch.frombuffer(bytearray(frame[BLOCK_BYTES:]), dtype=torch.uint8))
        if payload is not None and payload.nbytes:
            parts.append(torch.frombuffer(payload, dtype=torch.uint8))
        for work in [self._begin(part) for part in parts]:  # all under way before the first is done
            work.wait()

    def hear(self, memory: Memory = uninitialised) -> tuple[m.Message, memoryview]:
        """What the first of them says next; raises RuntimeError when it, or another, is gone."""
        self._broadcast(self._block)
        magic, kind, _, header_bytes, payload_bytes = PREFIX.unpack_from(self._view)
        if magic != MAGIC:
            raise ProtocolError("what the DP leader says is no frame; is it of this release?")
        header = self._view[PREFIX.size : PREFIX.size + header_bytes]
        if len(header) < header_bytes:
            rest = torch.empty(header_bytes - len(header), dtype=torch.uint8)
            self._broadcast(rest)
            header = memoryview(bytes(header) + rest.numpy().tobytes())
        payload = memory(payload_bytes) if payload_bytes else memoryview(b"")
        if payload_bytes:
            self._broadcast(torch.frombuffer(payload, dtype=torch.uint8))
        return codec.decode(Frame(kind, header)), payload

    def agree(self, leaving: int | None = None) -> Leave | None:
        """Wait for all of them; who takes its leave, if anyone does.

        leaving: the last step that this process has begun, if it leaves.
        """
        assert self._group is not None
        said = [0, -NO_STEP] if leaving is None else [self.index + 1, -leaving]
        word = torch.tensor(said)
        self._group.allreduce(word, dist.ReduceOp.MAX, self._timeout).wait()
        who, last = word.tolist()
        return Leave(self.ranks[who - 1], -last) if who else None

    def close(self) -> None:
        """Close the connections; whoever waits for this process raises."""
        self._group = None

    def _broadcast(self, tensor: torch.Tensor) -> None:
        self._begin(tensor).wait()

    def _begin(self, tensor: torch.Tensor) -> dist.Work:
        assert self._group is not None
        return self._group.broadcast(tensor, 0, self._timeout)
