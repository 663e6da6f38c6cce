"""Which objects of some classes there are in this process, for what keeps no list of its own."""

import gc
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def instances(kinds: Iterable[type[T]]) -> list[T]:
    """All of these classes and of those below them that the garbage collector knows.

    Classes are compared, as `isinstance` asks the object, and a proxy may do anything then.

    An object refers to its class, so those that do are asked for, not all there are: who holds a
    tuple that another thread is filling just then makes CPython raise SystemError there.
    """
    wanted = _with_subclasses(kinds)
    return [item for item in gc.get_referrers(*wanted) if type(item) in wanted]


def _with_subclasses(kinds: Iterable[type[T]]) -> set[type[T]]:
    found, untold = set[type[T]](), list(kinds)
    while untold:
        kind = untold.pop()
        if kind not in found:
            found.add(kind)
            untold += type.__subclasses__(kind)
    return found
