"""Things by number for which something holds, each asked again only after it has changed.

What is asked may itself depend on something, such as the last step: where that is another than the
last time, all are asked.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class Census(Generic[T]):
    """Asks `things`, by number; whoever changes one says so."""

    def __init__(self, things: Mapping[int, T]) -> None:
        self._things = things
        self._found: set[int] = set()
        self._about: Hashable = None
        #: Those that are others, or gone, and are to be asked again: a set to add to, since a word
        #: of one thing is one of many censuses.
        self.changed: set[int] = set()

    def find(self, about: Hashable, holds: Callable[[T], bool]) -> set[int]:
        """Those for which it holds, not to be changed; about: what it depends on beside them."""
        if about != self._about:
            self._about = about
            self._found = {number for number, thing in self._things.items() if holds(thing)}
        else:
            for number in self.changed:
                thing = self._things.get(number)
                if thing is not None and holds(thing):
                    self._found.add(number)
                else:
                    self._found.discard(number)
        self.changed.clear()
        return self._found
