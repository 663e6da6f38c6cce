"""Whose micro-batch is being computed now: what probes in the trainer's model report to.

A process has one training loop, and several streams of it take turns. Backward passes call from
autograd's threads while the training thread waits for them, so no two threads are here at once.
"""

from collections.abc import Callable
from operator import methodcaller
from typing import Any, ClassVar, Protocol

import torch.distributed as dist


class Listener(Protocol):
    """What hears of probes."""

    def block(self, forgiven: dist.ProcessGroup | None = None) -> None:
        """The rank waits for others from now on.

        forgiven: a group whose collectives until now were begun by who waits for them here.
        """

    def unblock(self) -> None:
        """It does not, any more; pairs may be nested."""

    def will_begin(self) -> None:
        """Collectives begin from now on that are waited for later, in `block` ..."""

    def has_begun(self) -> None:
        """... up to now."""

    def saw_backward(self) -> None:
        """A backward pass has ended."""


#: None while nothing is measured.
listener: Listener | None = None


def listen(to: Listener | None) -> None:
    """From now on probes are heard by this one."""
    global listener  # noqa: PLW0603  one training loop a process
    listener = to


class _Told:
    """A method of which the listener hears when it begins and when it ends.

    No closure, so that the object that has it can be copied and pickled as before.
    """

    begins: ClassVar[methodcaller]
    ends: ClassVar[methodcaller]

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, and tell."""
        heard, told = listener, type(self)
        if heard is None:
            return self._method(*args, **kwargs)
        told.begins(heard)
        try:
            return self._method(*args, **kwargs)
        finally:
            told.ends(heard)


class Blocked(_Told):
    """A method in which the rank waits for others."""

    begins, ends = methodcaller("block"), methodcaller("unblock")


class Begins(_Told):
    """A method that begins collectives, and does not wait for them."""

    begins, ends = methodcaller("will_begin"), methodcaller("has_begun")


class EndsBackward(Blocked):
    """A method that ends a backward pass by waiting for others."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, and tell."""
        answer = super().__call__(*args, **kwargs)
        if listener is not None:
            listener.saw_backward()
        return answer
