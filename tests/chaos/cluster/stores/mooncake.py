"""A Mooncake Store: its master, or the process that has its memory, may be killed or stopped."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

from mooncake.store import MooncakeDistributedStore

from rollout_workers.stores.mooncake import LOCAL_BUFFER_BYTES, MooncakeStore
from tests.chaos.cluster.stores.store import Store
from tests.support.mooncake import Mooncake

#: Of a read, as each may find that one of the connections to the master is broken.
TRIES = 4


class MooncakeEngine(Store):
    """folder: for the logs of both processes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._engine = Mooncake(folder)
        super().__init__(self._engine.address)
        self._store = MooncakeStore.open(self.address)
        self._client = MooncakeDistributedStore()
        master = self.address.removeprefix("mooncake://").partition("?")[0]
        self._client.setup("127.0.0.1", "P2PHANDSHAKE", 0, LOCAL_BUFFER_BYTES, "tcp", "", master)

    def keys(self) -> list[str]:
        """By the numbers of their pushes, which is about when they were put."""
        return sorted(self._store.list(""), key=lambda key: int(key.rpartition("/")[2]))

    def read(self, key: str) -> bytes | None:
        """The whole of an object. A call that finds its connection broken says so, once."""
        for _ in range(TRIES):
            if (there := self._client.is_exist(key)) == 0:
                return None
            if there > 0 and (data := bytes(self._client.get(key))):
                return data
        return None

    def release(self, keys: Sequence[str]) -> None:
        """Tell the master."""
        self._store.release(keys)

    @contextmanager
    def away(self, random: Random) -> Iterator[None]:
        """One of its two processes answers nobody."""
        stopped = random.choice((self._engine.master, self._engine.memory))
        stopped.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            stopped.send_signal(signal.SIGCONT)

    def restart(self, random: Random) -> None:
        """The master, or the process that has the memory."""
        random.choice((self._engine.restart_master, self._engine.restart_memory))()

    def close(self) -> None:
        """End both processes."""
        self._store.close()
        self._client.close()
        self._engine.close()
