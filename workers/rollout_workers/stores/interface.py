"""The interface of payload stores: objects by key, put once, read by any worker, then released.

    producer --put--> store                      push of references --> dispatcher
                      store --get--> DP rank     of a step, before any rank begins it
                      store <--release-- any worker, at the dispatcher's request

Only workers call a store; the dispatcher passes on addresses and keys. An *object* has the spans of
one push, end to end, so a sample is a part of it. Invariant: an object stays until it is released,
however long that takes, and whichever process ends meanwhile: a store has no time-outs of its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar, NamedTuple, Self

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.protocol.outbox import Buffer
from rollout_dispatcher.transport.memory import copy_bytes, uninitialised


@dataclass(frozen=True, slots=True)
class Missing:
    """An object that is gone, or not whole. why: text for people."""

    why: str


class Part(NamedTuple):
    """`nbytes` bytes of a reference, from its byte `source` on, to byte `target` of some memory."""

    source: int
    target: int
    nbytes: int


class PayloadStore(ABC):
    """One engine at one address. Calls may block, come from any thread, and raise StoreFailed.

    `Missing` is for an object that is known to be gone; a store that cannot be reached raises, and
    is called again.
    """

    #: Of its addresses, before the colon.
    scheme: ClassVar[str]

    def __init_subclass__(cls) -> None:
        """Raise TypeError for a store without `get` and `get_into`."""
        super().__init_subclass__()
        if cls.get is PayloadStore.get and cls.get_into is PayloadStore.get_into:
            raise TypeError(f"{cls.__name__} must define get or get_into")

    @classmethod
    @abstractmethod
    def open(cls, address: str) -> Self:
        """Connect. Raises StoreFailed with a remedy."""

    @abstractmethod
    def put(self, key: str, spans: Sequence[Buffer]) -> StoredObject:
        """Keep these bytes, end to end, until they are released, even if this process ends.

        The spans are copied, or not needed any more, when it returns. To put the same bytes under
        the same key again changes nothing.
        """

    def get(self, references: Sequence[Reference]) -> list[memoryview | Missing]:
        """`nbytes` bytes each, in their order; any number of processes may call it repeatedly.

        The returned memory does not change, also after a release. A store has this, or `get_into`,
        or both; each is made of the other.
        """
        starts = [0, *accumulate(reference.nbytes for reference in references)]
        memory = uninitialised(starts[-1])
        whole = [[Part(0, start, stop - start)] for start, stop in pairwise(starts)]
        found = self.get_into(references, memory, whole)
        each = zip(found, pairwise(starts), strict=True)
        return [why or memory[start:stop] for why, (start, stop) in each]

    def get_into(
        self,
        references: Sequence[Reference],
        memory: memoryview,
        parts: Sequence[Sequence[Part]],
    ) -> list[Missing | None]:
        """Copy parts of each reference into memory; None for each that is there.

        parts: of each reference, ascending, within its bytes; a store that can reads these alone.
        An engine that copies copies once if it has a method of its own for that. The memory for a
        missing one is undefined. Raises ProtocolError where `get` returns another number of bytes.
        """
        found = self.get(references)
        for data, reference, own in zip(found, references, parts, strict=True):
            if not isinstance(data, Missing):
                if data.nbytes != reference.nbytes:
                    raise ProtocolError(
                        f"{type(self).__name__} returned {data.nbytes} bytes of "
                        f"{reference.stored.key}, of which {reference.nbytes} were asked for"
                    )
                for source, target, nbytes in own:
                    copy_bytes(memory[target : target + nbytes], data[source : source + nbytes])
        return [data if isinstance(data, Missing) else None for data in found]

    @abstractmethod
    def release(self, keys: Sequence[str]) -> list[str]:
        """Delete objects that are not needed any more; returns the keys of those that remain.

        An object that is not there counts as released. Any worker may release any object, and may
        do so again after a crash.
        """

    @abstractmethod
    def list(self, prefix: str) -> list[str]:
        """The keys of its objects that begin so."""

    @abstractmethod
    def close(self) -> None:
        """Release this process's part of the engine; objects stay."""


def part_of(found: memoryview | Missing, reference: Reference) -> memoryview | Missing:
    """The part of the whole object that a reference names."""
    if isinstance(found, Missing):
        return found
    part = found[reference.offset : reference.offset + reference.nbytes]
    if part.nbytes == reference.nbytes:
        return part
    return Missing("it has fewer bytes than its reference says")
