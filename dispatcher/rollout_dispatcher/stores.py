"""Payload stores: engines that keep payloads outside of the dispatcher, which has references.

    producer --put--> store                      push of references --> dispatcher
                      store --get--> DP rank     of a step, before any rank begins it
                      store <--release-- any worker, when the dispatcher says that nobody needs it

Only workers talk to a store; the dispatcher passes on names and keys. Invariant: what was put stays
until it is released, however long that takes, so a store has no time-outs of its own.

A store is one file with a class that does what `PayloadStore` says, and one line in `STORES`. There
is none yet: a sample that is pushed as a reference is refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from rollout_dispatcher.payload import Reference

#: Stores by name: where its class is, as `module:Class`. Workers import it when it is used, since
#: an engine's client is an optional dependency.
STORES: Mapping[str, str] = MappingProxyType({})


class PayloadStore(Protocol):
    """One engine. Calls may block, come from any thread, and raise DispatcherError when it fails.

    What is small is better pushed as it is: a reference costs an engine's round trip.
    """

    def put(self, spans: Sequence[memoryview]) -> list[Reference]:
        """Keep these payloads until each is released, even if this process ends; in their order.

        The spans are copied, or not needed any more, when it returns.
        """

    def get(self, references: Sequence[Reference]) -> list[memoryview | None]:
        """The payloads, `nbytes` bytes each, in their order; None for what is not there any more.

        Any number of processes may ask for the same one, any number of times.
        """

    def release(self, references: Iterable[Reference]) -> None:
        """Nobody will ask for these again. What is not there counts as released.

        Whoever is left may release what others have put, and may do so again after a crash.
        """
