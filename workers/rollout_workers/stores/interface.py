"""What a payload store is: objects by key, put once, read by anybody, released when told.

    producer --put--> store                      push of references --> dispatcher
                      store --get--> DP rank     of a step, before any rank begins it
                      store <--release-- any worker, when the dispatcher says that nobody needs it

Only workers talk to a store; the dispatcher passes on addresses and keys. An *object* has the spans
of one push, end to end, so a sample is a part of it. Invariant: what was put stays until it is
released, however long that takes, and whoever ends meanwhile: a store has no time-outs of its own.
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
    """An object that is not there any more, or not whole; why: for people."""

    why: str


class Part(NamedTuple):
    """Bytes of what a reference means, from `source` on, and where in some memory they go."""

    source: int
    target: int
    nbytes: int


class PayloadStore(ABC):
    """One engine at one address. Calls may block, come from any thread, and raise StoreFailed.

    `Missing` is for what is known to be gone; a store that cannot be asked just now raises, and is
    asked again.
    """

    #: What its addresses begin with, before the colon.
    scheme: ClassVar[str]

    def __init_subclass__(cls) -> None:
        """Raise TypeError for a store that has no way to get anything."""
        super().__init_subclass__()
        if cls.get is PayloadStore.get and cls.get_into is PayloadStore.get_into:
            raise TypeError(f"{cls.__name__} must define get or get_into")

    @classmethod
    @abstractmethod
    def open(cls, address: str) -> Self:
        """Connect. Raises StoreFailed, in words that say what to do."""

    @abstractmethod
    def put(self, key: str, spans: Sequence[Buffer]) -> StoredObject:
        """Keep these bytes, end to end, until they are released, even if this process ends.

        The spans are copied, or not needed any more, when it returns. To put the same under the
        same key again changes nothing.
        """

    def get(self, references: Sequence[Reference]) -> list[memoryview | Missing]:
        """`nbytes` bytes each, in their order; any number of processes may ask, again and again.

        What it returns stays as it is for as long as it is held, whatever is released. A store has
        this, or `get_into`, or both; each is made of the other.
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
        """Put parts of each where they belong; None for what is there.

        parts: of each reference, ascending, within its bytes. An engine that copies what it gets
        copies it once if it has a method of its own for that. What belongs to something that is
        missing is undefined. Raises ProtocolError where `get` returns more or less than asked for.
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
        """Nobody will ask for these objects again; returns the keys of those that are still there.

        What is not there counts as released. Anybody may release what others have put, and may do
        so again after a crash.
        """

    @abstractmethod
    def list(self, prefix: str) -> list[str]:
        """The keys of what is there that begin so."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what this process holds of the engine; objects stay."""


def part_of(found: memoryview | Missing, reference: Reference) -> memoryview | Missing:
    """What a reference means of the whole object."""
    if isinstance(found, Missing):
        return found
    part = found[reference.offset : reference.offset + reference.nbytes]
    if part.nbytes == reference.nbytes:
        return part
    return Missing("it has fewer bytes than its reference says")
