"""The list of releases: objects that nobody needs and that are still in their stores.

    waiting --asked of a worker--> asked --it is gone--> forgotten
       ^                             |
       +-------- it is left ---------+

The list is a fact before any worker hears of it, and outlives the process: it has no time-outs, and
what could not be released waits at its end.
"""

from collections.abc import Iterable
from itertools import islice

from rollout_dispatcher.core.references.objects import Name, name_of
from rollout_dispatcher.payload import StoredObject


class Releases:
    """Objects by name, in the order in which they became unneeded."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[Name, StoredObject]] = {}  # by store
        self._asked: dict[str, dict[Name, StoredObject]] = {}

    def __len__(self) -> int:
        return sum(map(len, (*self._waiting.values(), *self._asked.values())))

    def __contains__(self, name: Name) -> bool:
        store, _ = name
        return name in self._waiting.get(store, ()) or name in self._asked.get(store, ())

    @property
    def stores(self) -> list[str]:
        """Those with objects that nobody is asked to release."""
        return list(self._waiting)

    def waits(self, store: str) -> bool:
        """Whether this is one of `stores`."""
        return store in self._waiting

    def has(self, store: str) -> bool:
        """Whether anything of this store is on the list."""
        return store in self._waiting or store in self._asked

    def add(self, objects: Iterable[StoredObject]) -> None:
        """Nobody needs these."""
        for stored in objects:
            if (name := name_of(stored)) not in self:
                self._waiting.setdefault(stored.store, {})[name] = stored

    def take(self, store: str, most: int) -> list[StoredObject]:
        """The first of a store that wait: a worker is asked to release them."""
        waiting = self._waiting[store]
        taken = dict(islice(waiting.items(), most))
        for name in taken:
            del waiting[name]
        if not waiting:
            del self._waiting[store]
        self._asked.setdefault(store, {}).update(taken)
        return list(taken.values())

    def put_back(self, objects: Iterable[StoredObject]) -> None:
        """These are still there."""
        for stored in objects:
            self._answered(stored)
            self._waiting.setdefault(stored.store, {})[name_of(stored)] = stored

    def forget(self, objects: Iterable[StoredObject]) -> None:
        """These are gone."""
        for stored in objects:
            self._answered(stored)

    def _answered(self, stored: StoredObject) -> None:
        asked = self._asked[stored.store]
        del asked[name_of(stored)]
        if not asked:
            del self._asked[stored.store]
