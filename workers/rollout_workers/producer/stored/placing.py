"""Which samples of a push go into a payload store, and what the push says of them then.

    large ones   end to end in one object, under the key `INCARNATION/FIRST-SEQUENCE-NUMBER`
    the others   in the payload of the frame

Invariant: a key is used for one push of one process, so it never stands for other bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.outbox import Buffer


@dataclass(frozen=True, slots=True)
class Put:
    """An object that is to be put before its push goes out.

    handle: of the push. spans: what the object consists of; the caller's memory mostly. large:
    which samples of the push are in it. sizes: bytes of those. payload: what is sent beside it.
    """

    handle: int
    key: str
    spans: Sequence[Buffer]
    large: Sequence[bool]
    sizes: Sequence[int]
    payload: Sequence[Buffer]

    def placed(self, stored: StoredObject) -> dict[str, Any]:
        """Keys of the push, once the object is there."""
        lying = zip(accumulate(self.sizes, initial=0), self.sizes, strict=False)
        return m.places_of(
            Reference(stored, *next(lying)) if is_large else None for is_large in self.large
        )
