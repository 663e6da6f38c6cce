"""Payloads in a Mooncake Store: `mooncake://HOST:PORT?admin=HOST:PORT`, the master's addresses.

    mooncake_master -rpc_address HOST -rpc_port PORT ...     knows which objects there are
    mooncake_client -master_server_address HOST:PORT ...     has their bytes, one on each node
    producers, DP ranks                                      put and fetch; they lend no memory

Objects are pinned: Mooncake is a cache, and would evict cold ones. Further words of an
address: `metadata` (default P2PHANDSHAKE: no metadata server), `protocol` (tcp or rdma),
`devices` of RDMA, `hostname` under which this process is reached by the others (default 127.0.0.1).
"""

import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self
from urllib.error import URLError
from urllib.parse import parse_qsl, urlsplit
from urllib.request import urlopen

import numpy as np
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from rollout_dispatcher.errors import StoreFailed
from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.protocol.outbox import Buffer
from rollout_workers.stores.interface import Missing, Part, PayloadStore

#: Of Mooncake's error codes `OBJECT_NOT_FOUND`, and `INVALID_PARAMS` for bytes beyond an object.
NOT_FOUND, NOT_IN_IT = -704, -600
#: Memory for Mooncake's own copies; payloads go from and to their own memory.
LOCAL_BUFFER_BYTES = 16 << 20
#: Objects that are read at once: at first, and at the most. Objects that failed are read again
#: first, and alone: so many of the last failures are remembered.
READ_FIRST, READ_MOST = 4, 16
SUSPECTS = 64
#: Words of an address, and their defaults.
WORDS = {
    "admin": "127.0.0.1:9003",
    "metadata": "P2PHANDSHAKE",
    "protocol": "tcp",
    "devices": "",
    "hostname": "127.0.0.1",
}
TIMEOUT_S = 30.0


class MooncakeStore(PayloadStore):
    """A client of one master."""

    scheme: ClassVar[str] = "mooncake"

    def __init__(self, address: str, client: Any, admin: str) -> None:
        self._address, self._client, self._admin = address, client, admin
        self._pinned = ReplicateConfig()
        self._pinned.with_hard_pin = True
        #: Mooncake registers a region once, and two threads may have the same one.
        self._registering = threading.Lock()
        #: Keys of objects that failed; later reads read them apart from others.
        self._suspects = deque[str](maxlen=SUSPECTS)

    @classmethod
    def open(cls, address: str) -> Self:
        """Connect to the master."""
        parts = urlsplit(address)
        given = dict(parse_qsl(parts.query))
        if not parts.netloc or parts.path.strip("/") or (given.keys() - WORDS.keys()):
            raise StoreFailed(
                address, f"an address is mooncake://HOST:PORT, and may say ?{'=&'.join(WORDS)}="
            )
        words = WORDS | given
        _check_answers(address, parts.hostname, parts.port)
        client = MooncakeDistributedStore()
        code = client.setup(
            words["hostname"], words["metadata"], 0, LOCAL_BUFFER_BYTES, words["protocol"],
            words["devices"], parts.netloc,
        )  # fmt: skip
        if code:
            raise StoreFailed(address, f"the master does not answer (code {code})")
        return cls(address, client, words["admin"])

    def put(self, key: str, spans: Sequence[Buffer]) -> StoredObject:
        """From one piece of memory, as the engine reads it."""
        value = np.frombuffer(spans[0] if len(spans) == 1 else b"".join(spans), np.uint8)
        with self._registered(value):
            code = self._client.put_from(key, value.ctypes.data, value.nbytes, self._pinned)
        if code:
            raise StoreFailed(self._address, f"{key} cannot be put (code {code})")
        return StoredObject(self._address, key, value.nbytes)

    def get_into(
        self,
        references: Sequence[Reference],
        memory: memoryview,
        parts: Sequence[Sequence[Part]],
    ) -> list[Missing | None]:
        """Ranges of objects, many at once."""
        if not references:
            return []
        filled = [[part for part in own if part.nbytes] for own in parts]
        with self._registered(np.frombuffer(memory, np.uint8)) as address:
            return self._read_some(address, references, filled)

    def _read_some(
        self, address: int, references: Sequence[Reference], parts: Sequence[Sequence[Part]]
    ) -> list[Missing | None]:
        """Ever more at once, until all are there or some fail; suspects first.

        The engine takes a second for each object whose node does not answer, and reports failures
        only after it has tried all of a call. Objects may lie on several nodes, of which one is
        gone.
        """
        suspects = set(self._suspects)
        suspected = [reference.stored.key in suspects for reference in references]
        order = sorted(range(len(references)), key=lambda at: not suspected[at])
        found: dict[int, Missing | None] = {}
        count = 1 if suspected[order[0]] else READ_FIRST
        while some := order[len(found) : len(found) + count]:
            read = self._read(address, [references[at] for at in some], [parts[at] for at in some])
            found.update(zip(some, read, strict=True))
            count = min(2 * count, READ_MOST)
        return [found[at] for at in range(len(references))]

    def _read(
        self, address: int, references: Sequence[Reference], parts: Sequence[Sequence[Part]]
    ) -> list[Missing | None]:
        """Parts of each into registered memory, all at once."""
        (found,) = self._client.get_into_ranges(
            [address],
            [[reference.stored.key for reference in references]],
            [[[part.target for part in own] for own in parts]],
            [
                [
                    [reference.offset + part.source for part in own]
                    for reference, own in zip(references, parts, strict=True)
                ]
            ],
            [[[part.nbytes for part in own] for own in parts]],
        )
        return [
            self._missing(got, [part.nbytes for part in own], reference)
            for got, own, reference in zip(found, parts, references, strict=True)
        ]

    def release(self, keys: Sequence[str]) -> list[str]:
        """Pins and leases notwithstanding."""
        codes = self._client.batch_remove(list(keys), True)
        return [key for key, code in zip(keys, codes, strict=True) if code not in (0, NOT_FOUND)]

    def close(self) -> None:
        """Leave the master."""
        self._client.close()

    @contextmanager
    def _registered(self, memory: np.ndarray) -> Iterator[int]:
        """Memory that the engine may read and write while the context lasts; where it is."""
        with self._registering:
            code = self._client.register_buffer(memory.ctypes.data, memory.nbytes)
        if code:
            raise StoreFailed(self._address, f"memory cannot be registered (code {code})")
        try:
            yield memory.ctypes.data
        finally:
            with self._registering:
                self._client.unregister_buffer(memory.ctypes.data)

    def _missing(
        self, got: Sequence[int], sizes: Sequence[int], reference: Reference
    ) -> Missing | None:
        """The error of an object's ranges, by the engine's size or code for each."""
        if list(got) == list(sizes):
            return None
        if NOT_FOUND in got:
            return Missing("the master does not know it")
        wrong = [code for code, size in zip(got, sizes, strict=True) if code != size]
        if all(code >= 0 or code == NOT_IN_IT for code in wrong):
            return Missing("it has fewer bytes than its reference says")
        self._suspects.append(reference.stored.key)
        raise StoreFailed(self._address, f"{reference.stored.key} cannot be had (code {wrong[0]})")

    def list(self, prefix: str) -> list[str]:
        """From the master's administration: its clients have no call for it."""
        try:
            with urlopen(f"http://{self._admin}/get_all_keys", timeout=TIMEOUT_S) as answer:
                keys = answer.read().decode().split("\n")
        except (URLError, TimeoutError, ValueError) as error:
            raise StoreFailed(self._address, f"{self._admin} does not answer: {error}") from error
        return [key for key in keys if key and key.startswith(prefix)]


def _check_answers(address: str, host: str | None, port: int | None) -> None:
    """Raise StoreFailed if nothing listens there: the engine would try for 90 s."""
    try:
        socket.create_connection((host or "", port or 0), TIMEOUT_S).close()
    except OSError as error:
        raise StoreFailed(address, f"the master does not answer ({error})") from error
