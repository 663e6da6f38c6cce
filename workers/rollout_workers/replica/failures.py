"""An error of one process becomes the same in another: its class, by its code, and its text."""

import re
from collections.abc import Iterator

from rollout_dispatcher.errors import DispatcherError
from rollout_dispatcher.protocol import messages as m


def told(error: BaseException) -> m.Error:
    """What to tell others of an error; what is none of ours goes by its name."""
    if isinstance(error, DispatcherError):
        return m.Error(code=error.code, message=str(error), retriable=error.retriable)
    text = f"{type(error).__name__}: {error}"
    return m.Error(code=DispatcherError.code, message=text)


def restored(message: m.Error) -> DispatcherError:
    """The error that was told."""
    # Of a class and others made of it that have its code, the class itself: it comes first.
    kinds = (kind for kind in _kinds(DispatcherError) if kind.code == message.code)
    kind = next(kinds, DispatcherError)
    # Not by its own constructor, which makes the text from facts that are not here.
    error = kind.__new__(kind, message.message)
    Exception.__init__(error, message.message)
    return error


def _kinds(kind: type[DispatcherError]) -> Iterator[type[DispatcherError]]:
    yield kind
    for special in kind.__subclasses__():
        yield from _kinds(special)


def reason(error: BaseException) -> str:
    """What gloo says that has happened, without where in its source and what may have caused it."""
    text = (str(error) or type(error).__name__).splitlines()[0].partition(". ")[0]
    return re.sub(r"^\[[^]]*\] ", "", text)
