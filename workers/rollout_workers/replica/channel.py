"""Frames from the first of some processes to the others, over a gloo group of their own.

A frame is that of the sample plane (`rollout_dispatcher.protocol.frame`): a header of JSON, which
nothing unpickles, and a payload. The channel broadcasts its beginning in a block of fixed size,
which most headers fit in, then the rest of the header, then the payload in one piece, from and into
the memory where it lies.

torch.distributed does not know the group: the trainer does not use it, torch's watchdogs do not see
it, and `destroy_process_group` leaves it alone. Dropping the last reference closes its connections,
and processes that wait for this one get an error at once.

The relay is a thread of the DP leader that sends its peers the messages that the leader receives,
in order. While it has none it sends a Ping every second, so that no peer waits in a broadcast for
longer, and after a Ping all of them agree whether one leaves: all know that within a second, and
nobody closes a connection that others still use. A process that dies closes its connections; a
process that gets that error closes its own, and so all get it.
"""

import hashlib
import re
import threading
from collections import Counter, deque
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic
from typing import NamedTuple, cast

import torch
import torch.distributed as dist

from rollout_dispatcher.errors import PeerLost, ProtocolError
from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.frame import MAGIC, PREFIX, Frame
from rollout_dispatcher.transport.memory import Memory, uninitialised
from rollout_workers.client.role import CLOSE_TIMEOUT_S


def reason(error: BaseException) -> str:
    """The first sentence of gloo's error, without the place in its source."""
    text = (str(error) or type(error).__name__).splitlines()[0].partition(". ")[0]
    return re.sub(r"^\[[^]]*\] ", "", text)


#: Most headers of micro-batches are smaller: a hundred samples with their ids.
BLOCK_BYTES = 8 * 1024
#: To connect: processes that load models reach this point minutes apart.
JOIN_TIMEOUT = timedelta(minutes=30)
#: A peer that sends nothing for so long is lost, though its connection was not closed: its machine
#: or network has failed. A live one sends every `KEEP_ALIVE_S`.
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

    name: of its use; all ranks make channels of one name and the same ranks in the same order.
    timeout: for each frame, and each agreement.
    """

    def __init__(self, ranks: Sequence[int], name: str, timeout: timedelta = PEER_TIMEOUT) -> None:
        key = f"{name}-{hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]}"
        _made[key] += 1
        world = dist.group.WORLD
        assert world is not None, "a mesh needs a process group"
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

    def send(self, message: m.Message, payload: memoryview | None = None) -> None:
        """Send to the others, as the first. Raises RuntimeError when one of them is gone."""
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

    def receive(self, memory: Memory = uninitialised) -> tuple[m.Message, memoryview]:
        """The next message of the first; raises RuntimeError when it, or another, is gone."""
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
        """Wait for all of them; returns a process that leaves, if there is one.

        leaving: the last step that this process has begun, if it leaves.
        """
        assert self._group is not None
        largest = torch.tensor([0, -NO_STEP] if leaving is None else [self.index + 1, -leaving])
        self._group.allreduce(largest, dist.ReduceOp.MAX, self._timeout).wait()
        who, last = largest.tolist()
        return Leave(self.ranks[who - 1], -last) if who else None

    def close(self) -> None:
        """Close the connections; processes that wait for this one raise."""
        self._group = None

    def _broadcast(self, tensor: torch.Tensor) -> None:
        self._begin(tensor).wait()

    def _begin(self, tensor: torch.Tensor) -> dist.Work:
        assert self._group is not None
        return self._group.broadcast(tensor, 0, self._timeout)


#: Seconds between two messages to the peers, at most.
KEEP_ALIVE_S = 1.0


class Queued(NamedTuple):
    """A message to send. epoch: how often the leader had dropped its steps by then."""

    message: m.Message
    payload: memoryview | None = None
    epoch: int = 0


class Relay:
    """Sends messages to the peers until the last one; hold `changed` to read or to change it.

    failure: why it sends no more, where a peer is the cause. last_step: the last that all have
        begun, where one has left.
    """

    def __init__(self, channel: Channel) -> None:
        self.changed = threading.Condition()
        self.failure: PeerLost | None = None
        self.last_step = -1
        self._taken = -1
        self._channel = channel
        self._outbox: deque[Queued] = deque()
        self._last: m.Message | None = None
        #: Of steps that the leader has not committed, by step: the last attempt in the outbox, and
        #: how many micro-batches of it the peers have.
        self._steps: dict[int, tuple[int, int]] = {}
        self._epoch = 0
        self._thread = threading.Thread(target=self._run, name="dispatcher-relay", daemon=True)
        self._thread.start()

    def put(self, message: m.Message, payload: memoryview | None = None) -> None:
        """Queue a message; its payload must not change until `num_sent` counts it."""
        if isinstance(message, m.StepHeader) and message.attempt != self._attempt(message.step):
            self._steps[message.step] = message.attempt, 0
        self._outbox.append(Queued(message, payload, self._epoch))
        self.changed.notify_all()

    def num_sent(self, step: int) -> int:
        """How many micro-batches of a step the peers have."""
        return self._steps.get(step, (0, 0))[1]

    def _attempt(self, step: int) -> int:
        """The last attempt at a step in the outbox, -1 for none."""
        return self._steps.get(step, (-1, 0))[0]

    def forget(self, step: int) -> None:
        """The leader has committed a step, or it is withdrawn."""
        self._steps.pop(step, None)

    def forget_all(self) -> None:
        """All steps so far are void; steps of the same numbers may come again."""
        self._outbox.clear()
        self._steps.clear()
        self._epoch += 1

    def end(self, last: m.Message, taken: int = -1) -> None:
        """Send this after all that is queued, and no more. Only the first such call counts.

        taken: the last step that the leader has begun.
        """
        with self.changed:
            if self._last is None:
                self._last, self._taken = last, taken
            self.changed.notify_all()

    def join(self) -> None:
        """Wait until the last message is sent, for a bounded time."""
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S)

    # -- in the thread

    def _run(self) -> None:
        try:
            failure = self._serve()
        except Exception as error:
            failure = PeerLost(
                "a process that shares this DP rank's model replica is gone, one of the ranks "
                f"{list(self._channel.ranks[1:])}: {reason(error)}; look at what "
                "ended it, and start the trainer again"
            )
        self._channel.close()
        with self.changed:
            self.failure = failure
            self.changed.notify_all()

    def _serve(self) -> PeerLost | None:
        due = monotonic() + KEEP_ALIVE_S
        while True:
            queued = self._next(due)
            self._channel.send(queued.message, queued.payload)
            if not isinstance(queued.message, ROUNDS):
                self._count(queued)
                continue
            is_last = not isinstance(queued.message, m.Ping)
            left = self._channel.agree(self._taken if is_last else None)
            if is_last:
                return None
            if left is not None:
                self.last_step = left.step
                return peer_left(left.rank)
            due = monotonic() + KEEP_ALIVE_S

    def _next(self, due: float) -> Queued:
        """The message to send now: a Ping when it is due, the last one when the outbox is empty."""
        with self.changed:
            while (left := due - monotonic()) > 0:
                if self._outbox:
                    return self._outbox.popleft()
                if self._last is not None:
                    return Queued(self._last)
                self.changed.wait(left)
        return Queued(m.Ping())

    def _count(self, queued: Queued) -> None:
        """The peers have a micro-batch: the leader's training loop may have it too."""
        message = queued.message
        if not isinstance(message, m.MicroBatch):
            return
        with self.changed:
            if queued.epoch == self._epoch and message.attempt == self._attempt(message.step):
                self._steps[message.step] = message.attempt, message.index + 1
                self.changed.notify_all()


#: After one of these all agree whether one leaves.
ROUNDS = (m.Ping, m.Bye, m.Error)


def peer_left(rank: int) -> PeerLost:
    """The error for a peer that closed its stream while others go on."""
    return PeerLost(
        f"rank {rank}, which shares this DP rank's model replica, closed its stream while others "
        "go on; every rank of a mesh takes the same steps, and then closes"
    )
