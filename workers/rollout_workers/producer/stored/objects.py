"""What a producer has to do with payload stores: objects to put, and others to take back.

An object is the producer's until its push is sent; from then on the dispatcher says when it goes.
"""

from collections.abc import Sequence
from secrets import token_hex

from rollout_dispatcher.payload import StoredObject
from rollout_dispatcher.protocol import messages as m
from rollout_workers.producer.batches import put_of
from rollout_workers.producer.encode import EncodedSample
from rollout_workers.producer.pushes import PendingPush
from rollout_workers.producer.stored.placing import Put
from rollout_workers.stores.requests import StoreRequests


class Objects:
    """Of one producer object. stores: addresses that are allowed. requests: the dispatcher's."""

    def __init__(self, client_id: str) -> None:
        #: What its keys begin with: never the same in two processes.
        self.incarnation = f"{client_id}.{token_hex(4)}"
        self._inline_limit: int | None = None
        self.stores: tuple[str, ...] = ()
        self.requests = StoreRequests()
        self._puts: list[Put] = []
        self._orphans: list[StoredObject] = []

    def welcomed(self, welcome: m.WelcomeProducer) -> None:
        """The dispatcher says what is allowed, and what to put."""
        self.stores = tuple(welcome.payload_stores)
        self._inline_limit = welcome.inline_limit if self.stores else None

    def put_for(self, samples: Sequence[EncodedSample], first: int) -> Put | None:
        """What is to be put of the samples of a push, if anything is."""
        if self._inline_limit is None:
            return None
        return put_of(samples, self._inline_limit, first, f"{self.incarnation}/{first}")

    def begin(self, put: Put) -> None:
        """This is to be put."""
        self._puts.append(put)

    def take_puts(self) -> list[Put]:
        """What to put now."""
        puts, self._puts = self._puts, []
        return puts

    def withdrawn(self, push: PendingPush) -> None:
        """A push is never sent, or not again."""
        if push.stored is not None and push.owns_object:
            self.orphaned(push.stored)

    def orphaned(self, stored: StoredObject) -> None:
        """Nobody knows of this object but us."""
        self._orphans.append(stored)

    def take_orphans(self) -> list[StoredObject]:
        """What to release now."""
        orphans, self._orphans = self._orphans, []
        return orphans
