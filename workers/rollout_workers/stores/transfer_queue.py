"""Payloads in a TransferQueue: `transferqueue://PARTITION`, of the job in the Ray cluster.

    transferqueue://rollouts                                     what our own producers put
    transferqueue://train?fields=input_ids,loss_mask,logprobs    what is there already

In the first an object is one key with one field, `span`. In the second a key is a sample that
somebody else has put, and a reference to it is the span that these fields make in this order, which
has to be that of the push that names it; nothing can be put there by us. The queue has to run: the
process that begins one takes it along when it ends, which no worker should be.

    call --answer--> done
      +--none for a while--> has a process of the queue ended? --yes--> StoreFailed, ask again:
                                                                        what it had is Missing then

The queue's clients do not notice: they wait for a unit for minutes, and for the controller for
ever. Ray knows. None of them comes back, so what one had is gone when it has ended; without the
controller nobody knows which key is where, so everything is.
"""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Self
from urllib.parse import parse_qsl, urlsplit

import ray
import torch
import transfer_queue as tq
from ray.exceptions import ActorDiedError, RayError

from rollout_dispatcher.errors import StoreFailed
from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.protocol.outbox import Buffer
from rollout_dispatcher.spans import join
from rollout_workers.stores.interface import Missing, PayloadStore, part_of

CONTROLLER, NAMESPACE = "TransferQueueController", "transfer_queue"
#: Seconds; one that does not answer is not known to have ended.
ANSWERED_WITHIN_S = 5.0


class QueueProcesses:
    """Of one queue. units: names of actors, in the order in which samples are dealt to them."""

    def __init__(self, controller: Any, units: Sequence[str]) -> None:
        self._controller, self._units = controller, units
        #: Names of those that are known to have ended.
        self.ended: frozenset[str] = frozenset()

    @classmethod
    def of_the_cluster(cls) -> Self:
        """Of the queue that runs. Raises ValueError if none does, RayError if Ray fails."""
        controller = ray.get_actor(CONTROLLER, NAMESPACE)
        backend = ray.get(controller.get_config.remote()).backend
        # Another backend has no such units, and says by itself what it does not have.
        in_units = backend.storage_backend == "SimpleStorage"
        return cls(controller, list(backend.SimpleStorage.zmq_info) if in_units else [])

    def look(self) -> frozenset[str]:
        """Ask Ray; all that have ended. Nothing new while Ray does not answer."""
        with suppress(RayError):
            listed = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
            self.ended |= set(self._units) - listed
            if not self._has_controller():
                self.ended |= {CONTROLLER}
        return self.ended

    def is_lost(self, index: int) -> bool:
        """Whether the sample of this index was in a unit that has ended."""
        return bool(self._units) and self._units[index % len(self._units)] in self.ended

    def _has_controller(self) -> bool:
        """Whether it is there: by itself, since one of the same name has nothing of this queue."""
        try:
            ray.get(self._controller.get_zmq_server_info.remote(), timeout=ANSWERED_WITHIN_S)
        except ActorDiedError:
            return False
        return True


#: The field of what is put here.
SPAN = "span"
#: Seconds that a call takes before, and between, looks at whether the queue's processes still run.
LOOKED_AFTER_S = 2.0
#: Names of processes.
Ended = frozenset[str]


class TransferQueueStore(PayloadStore):
    """One partition. fields: of samples that others put; empty for objects of ours."""

    scheme: ClassVar[str] = "transferqueue"

    def __init__(
        self, address: str, partition: str, fields: Sequence[str], processes: QueueProcesses
    ) -> None:
        self._address, self._partition, self._fields = address, partition, list(fields)
        self._processes, self._client = processes, tq.get_client()

    @classmethod
    def open(cls, address: str) -> Self:
        """Attach to the queue of the cluster that this process is in, or that RAY_ADDRESS names."""
        parts = urlsplit(address)
        words = dict(parse_qsl(parts.query))
        if not parts.netloc or words.keys() - {"fields"}:
            raise StoreFailed(
                address, "an address is transferqueue://PARTITION, and may say ?fields=a,b"
            )
        try:
            if not ray.is_initialized():
                ray.init("auto", log_to_driver=False)
            ray.get_actor(CONTROLLER, NAMESPACE)  # or this process would begin one
            tq.init()
            processes = QueueProcesses.of_the_cluster()
            processes.look()
        except (RayError, ConnectionError, RuntimeError, ValueError) as error:
            raise StoreFailed(
                address,
                f"there is no TransferQueue to attach to ({error}); call transfer_queue.init() in "
                "the job that lasts longest",
            ) from error
        fields = [name for name in words.get("fields", "").split(",") if name]
        return cls(address, parts.netloc, fields, processes)

    def put(self, key: str, spans: Sequence[Buffer]) -> StoredObject:
        """As one field."""
        if self._fields:
            raise StoreFailed(self._address, "it is for samples that others put: push references")
        if ended := self._processes.ended:
            # Which unit it would be in is known only when the queue has dealt it to one.
            raise StoreFailed(self._address, f"it takes nothing without {', '.join(sorted(ended))}")
        value = torch.frombuffer(bytearray(b"".join(spans)), dtype=torch.uint8)
        self._asked(tq.async_kv_put(key, self._partition, {SPAN: value}), ended)
        return StoredObject(self._address, key, value.nbytes)

    def get(self, references: Sequence[Reference]) -> list[memoryview | Missing]:
        """All keys at once; where one of them is not there, one by one."""
        keys = list(dict.fromkeys(reference.stored.key for reference in references))
        ended = self._processes.ended
        lost = self._lost(keys, ended)
        there = [key for key in keys if key not in lost]
        gone = Missing("what had it of the queue has ended")
        rows = self._objects(there, ended)
        found = dict.fromkeys(lost, gone) | dict(zip(there, rows, strict=True))
        return [part_of(found[reference.stored.key], reference) for reference in references]

    def release(self, keys: Sequence[str]) -> list[str]:
        """All at once; a queue that has none of them says so by an error."""
        ended = self._processes.ended
        lost = self._lost(keys, ended)
        with suppress(_NotThere):
            if there := [key for key in keys if key not in lost]:
                self._asked(tq.async_kv_clear(there, self._partition), ended)
        for meta in lost.values():
            if meta is not None:
                # `async_kv_clear` would wait for the unit; the controller has to forget them too.
                self._asked(self._client._clear_meta_in_controller(meta), ended)  # noqa: SLF001
        return []

    def close(self) -> None:
        """The connection is the process's, which may use it for more than this."""

    def _objects(self, keys: Sequence[str], ended: Ended) -> "Iterator[memoryview | Missing]":
        # A queue leaves out what it does not have, so what comes may be of other keys.
        rows = self._rows(keys, ended) if keys else []
        if len(rows) == len(keys):
            yield from rows
            return
        for key in keys:
            yield next(
                iter(self._rows([key], ended)), Missing(f"{self._partition} does not have it")
            )

    def _rows(self, keys: Sequence[str], ended: Ended) -> "list[memoryview]":
        """The spans of as many of these as there are."""
        names = self._fields or [SPAN]
        try:
            got = tq.async_kv_batch_get(list(keys), self._partition, names)
            found = self._asked(got, ended)
        except _NotThere:
            return []
        columns = [found[name].unbind() for name in names]
        if self._fields:
            return [memoryview(join(map(_bytes, row))) for row in zip(*columns, strict=True)]
        return [_bytes(row) for row in columns[0]]

    def _lost(self, keys: Sequence[str], ended: Ended) -> dict[str, Any]:
        """The keys of what was in one of these; what the controller has of each, if any."""
        if CONTROLLER in ended:
            return dict.fromkeys(keys)
        if not ended:
            return {}
        # One by one, as it leaves out in silence what it does not know.
        metas = {
            key: self._asked(self._client.async_kv_retrieve_meta([key], self._partition), ended)
            for key in keys
        }
        return {
            key: meta
            for key, meta in metas.items()
            if any(map(self._processes.is_lost, meta.global_indexes))
        }

    def _asked(self, call: Coroutine[Any, Any, Any], ended: Ended) -> Any:
        """What it answers. Raises _NotThere if it has none of these, else StoreFailed.

        ended: what was known to have ended when it was decided what to ask for. What another thread
        has found out since may be what this call waits for.
        """
        try:
            return self._awaited(call, ended)
        except (ValueError, tq.StorageKeyNotFoundError) as error:
            raise _NotThere(self._address, error) from error
        except (RayError, RuntimeError, TimeoutError, OSError) as error:
            raise StoreFailed(self._address, error) from error

    def _awaited(self, call: Coroutine[Any, Any, Any], ended: Ended) -> Any:
        """Where the queue's own calls run: from there it can be taken back."""
        future = asyncio.run_coroutine_threadsafe(call, self._client._loop)  # noqa: SLF001
        while True:
            with suppress(TimeoutError):
                return future.result(LOOKED_AFTER_S)
            if future.done():
                return future.result()
            if new := self._processes.look() - ended:
                future.cancel()
                raise StoreFailed(self._address, f"{', '.join(sorted(new))} has ended")

    def list(self, prefix: str) -> list[str]:
        """Of the partition."""
        ended = self._processes.ended
        if CONTROLLER in ended:
            return []
        found = self._asked(tq.async_kv_list(self._partition), ended)
        return [key for key in found.get(self._partition, ()) if key.startswith(prefix)]


class _NotThere(StoreFailed):
    """The queue has none of the keys that it was asked for, or not all of their fields."""


def _bytes(row: torch.Tensor) -> memoryview:
    return memoryview(row.contiguous().reshape(-1).view(torch.uint8).numpy().data)
