"""Payloads in a TransferQueue: `transferqueue://PARTITION`, of the job in the Ray cluster.

    transferqueue://rollouts                                     objects of our own producers
    transferqueue://train?fields=input_ids,loss_mask,logprobs    samples that are there already

In the first an object is one key with one field, `span`. In the second a key is a sample of another
writer, and a reference to it is the span that these fields make in this order, which has to be that
of the push that names it; producers cannot put there. The queue has to run already: it ends with
the process that begins it, and a worker may end early.

Its clients wait for a storage unit that has ended for minutes, and for the controller for ever: a
call ends after `ANSWERED_WITHIN_S`, and is tried again. None of the queue's processes comes back,
so a run cannot go on if it needs the objects of one that has ended.
"""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Self
from urllib.parse import parse_qsl, urlsplit

import ray
import torch
import transfer_queue as tq
from ray.exceptions import RayError

from rollout_dispatcher.errors import StoreFailed
from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.protocol.outbox import Buffer
from rollout_dispatcher.spans import join
from rollout_workers.stores.interface import Missing, PayloadStore, part_of

CONTROLLER, NAMESPACE = "TransferQueueController", "transfer_queue"
#: Seconds that the queue has for a call.
ANSWERED_WITHIN_S = 60.0
#: The field of our own objects.
SPAN = "span"


class TransferQueueStore(PayloadStore):
    """One partition. fields: of other writers' samples; empty for our own objects."""

    scheme: ClassVar[str] = "transferqueue"

    def __init__(self, address: str, partition: str, fields: Sequence[str]) -> None:
        self._address, self._partition, self._fields = address, partition, list(fields)
        self._client = tq.get_client()

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
        except (RayError, ConnectionError, RuntimeError, ValueError) as error:
            raise StoreFailed(
                address,
                f"there is no TransferQueue to attach to ({error}); call transfer_queue.init() in "
                "the job that lasts longest",
            ) from error
        fields = [name for name in words.get("fields", "").split(",") if name]
        return cls(address, parts.netloc, fields)

    def put(self, key: str, spans: Sequence[Buffer]) -> StoredObject:
        """As one field."""
        if self._fields:
            raise StoreFailed(self._address, "it is for samples that others put: push references")
        value = torch.frombuffer(bytearray(b"".join(spans)), dtype=torch.uint8)
        self._asked(tq.async_kv_put(key, self._partition, {SPAN: value}))
        return StoredObject(self._address, key, value.nbytes)

    def get(self, references: Sequence[Reference]) -> list[memoryview | Missing]:
        """All keys at once; where one of them is not there, one by one."""
        keys = list(dict.fromkeys(reference.stored.key for reference in references))
        found = dict(zip(keys, self._objects(keys), strict=True))
        return [part_of(found[reference.stored.key], reference) for reference in references]

    def release(self, keys: Sequence[str]) -> list[str]:
        """All at once; a queue that has none of them raises."""
        with suppress(_NotThere):
            if keys:
                self._asked(tq.async_kv_clear(list(keys), self._partition))
        return []

    def close(self) -> None:
        """Nothing: the process may use its connection for other things."""

    def _objects(self, keys: Sequence[str]) -> "Iterator[memoryview | Missing]":
        # A queue leaves out missing keys, so fewer rows cannot be matched to keys.
        rows = self._rows(keys) if keys else []
        if len(rows) == len(keys):
            yield from rows
            return
        for key in keys:
            yield next(iter(self._rows([key])), Missing(f"{self._partition} does not have it"))

    def _rows(self, keys: Sequence[str]) -> "list[memoryview]":
        """The spans of those of the keys that are there."""
        names = self._fields or [SPAN]
        try:
            found = self._asked(tq.async_kv_batch_get(list(keys), self._partition, names))
        except _NotThere:
            return []
        columns = [found[name].unbind() for name in names]
        if self._fields:
            return [memoryview(join(map(_bytes, row))) for row in zip(*columns, strict=True)]
        return [_bytes(row) for row in columns[0]]

    def _asked(self, call: Coroutine[Any, Any, Any]) -> Any:
        """The queue's answer. Raises _NotThere if it has none of the keys, else StoreFailed."""
        # On the loop of the queue's own calls, so that the call can be cancelled.
        future = asyncio.run_coroutine_threadsafe(call, self._client._loop)  # noqa: SLF001
        try:
            return future.result(ANSWERED_WITHIN_S)
        except (ValueError, tq.StorageKeyNotFoundError) as error:
            raise _NotThere(self._address, error) from error
        except (RayError, RuntimeError, TimeoutError, OSError) as error:
            future.cancel()
            why = str(error) or "it does not answer; look whether its processes run"
            raise StoreFailed(self._address, why) from error

    def list(self, prefix: str) -> list[str]:
        """Of the partition."""
        found = self._asked(tq.async_kv_list(self._partition))
        return [key for key in found.get(self._partition, ()) if key.startswith(prefix)]


class _NotThere(StoreFailed):
    """The queue has none of the keys of a call, or not all of their fields."""


def _bytes(row: torch.Tensor) -> memoryview:
    return memoryview(row.contiguous().reshape(-1).view(torch.uint8).numpy().data)
