"""Where a sample's payload is, its tensors' bytes, and how large it is.

    InMemory      the span itself
    InJournal     in the journal's log, from where it is read back for its step
    Reference     in an object of a payload store, outside of the dispatcher
    WithProducer  nowhere here: of a held push, let go for want of memory, to be sent again

Invariant: the type alone says where it is, and each has `nbytes`, its size there. No size says
anything of the place: a sample without fields, as a simulation has them, has 0 bytes in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeAlias, TypeGuard, cast

#: The span itself, without an object around it: there is one for every sample that arrives.
InMemory: TypeAlias = memoryview


@dataclass(frozen=True, slots=True)
class InJournal:
    """`nbytes` bytes that only the journal has, under the sample's ticket."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object of `nbytes` bytes that a payload store has: the spans of one push, as a rule.

    store: the store's address, `file:///data/rollouts`, say. key: begins with the incarnation of
    the producer that has put it, so no key is ever used for other bytes.
    """

    store: str
    key: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Reference:
    """`nbytes` bytes of an object, from `offset` on: the span of one sample."""

    stored: StoredObject
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class WithProducer:
    """`nbytes` bytes of a sample that is not accepted yet: its producer still has them."""

    nbytes: int


Payload: TypeAlias = InMemory | InJournal | Reference | WithProducer


def are_in_memory(payloads: Sequence[Payload]) -> TypeGuard[Sequence[InMemory]]:
    """Whether each of them is; some hundredth of a microsecond a payload."""
    return set(map(type, payloads)) <= {InMemory}


def count_references(payloads: Sequence[Payload]) -> int:
    """How many of them lie in payload stores."""
    return 0 if are_in_memory(payloads) else [*map(type, payloads)].count(Reference)


class Footprint(NamedTuple):
    """Bytes of memory, and of payload stores, that payloads take; those in the journal neither."""

    memory: int = 0
    referenced: int = 0

    @classmethod
    def by(cls, payloads: Sequence[Payload]) -> Self:
        """What these take."""
        try:  # as a rule all are in memory, and to look at each type first takes as long again
            return cls(sum(map(len, cast("Sequence[InMemory]", payloads))))
        except TypeError:  # nothing else has a length
            memory = sum(item.nbytes for item in payloads if isinstance(item, InMemory))
            return cls(memory, sum(item.nbytes for item in payloads if isinstance(item, Reference)))
