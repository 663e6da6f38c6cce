"""A client belongs to the process that made it.

Its socket and the thread or loop that serves it do not survive a fork: a child that used them would
wait for a thread that it does not have, or write into the midst of what its parent says.
"""

import os
from typing import Final, NoReturn

from rollout_dispatcher.errors import ConfigError

#: By kind of client: it names what most often starts processes where such a client is used.
REMEDIES: Final = {
    "producer": "make one in each process that pushes, once it has been started",
    "stream": (
        "make it in the process that uses it; for a torch DataLoader that means num_workers=0 (the "
        "stream receives ahead by itself: prefetch_steps)"
    ),
}


class _Here:
    """This process. A fork tells it, as to ask the kernel takes longer than what it guards."""

    pid = os.getpid()

    @classmethod
    def forked(cls) -> None:
        """It is another one."""
        cls.pid = os.getpid()


os.register_at_fork(after_in_child=_Here.forked)


class OwnProcess:
    """Remembers which process a client is made in. what: a key of `REMEDIES`."""

    def __init__(self, what: str) -> None:
        self._what, self._pid = what, _Here.pid

    @property
    def is_here(self) -> bool:
        """Whether this is that process."""
        return _Here.pid == self._pid

    def check(self) -> None:
        """Raise ConfigError in any other process."""
        if _Here.pid != self._pid:
            raise ConfigError(
                f"this {self._what} was made in process {self._pid}, from which this one "
                f"({_Here.pid}) was forked; its connection is served there: "
                f"{REMEDIES[self._what]}"
            )


def refuse_to_travel(what: str) -> NoReturn:
    """Raise ConfigError for a client that is being pickled or copied."""
    raise ConfigError(f"a {what} cannot be copied or sent to another process; {REMEDIES[what]}")
