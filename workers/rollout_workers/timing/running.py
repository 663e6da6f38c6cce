"""Whose micro-batch is being computed now: what probes in the trainer's model report to.

A process has one training loop, and several streams of it take turns. Backward passes call from
autograd's threads while the training thread waits for them, so no two threads are here at once.
"""

from collections.abc import Callable
from typing import Any, Protocol

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


class Blocked:
    """A method in which the rank waits for others.

    No closure, so that the object that has it can be copied and pickled as before.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, and tell."""
        heard = listener
        if heard is None:
            return self._method(*args, **kwargs)
        heard.block()
        try:
            return self._method(*args, **kwargs)
        finally:
            heard.unblock()


class Begins:
    """A method that begins collectives, and does not wait for them."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, and tell."""
        heard = listener
        if heard is None:
            return self._method(*args, **kwargs)
        heard.will_begin()
        try:
            return self._method(*args, **kwargs)
        finally:
            heard.has_begun()


class EndsBackward(Blocked):
    """A method that ends a backward pass by waiting for others."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, and tell."""
        answer = super().__call__(*args, **kwargs)
        if listener is not None:
            listener.saw_backward()
        return answer
