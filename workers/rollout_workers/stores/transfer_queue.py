"""Payloads in a TransferQueue: `transferqueue://PARTITION`, of the job in the Ray cluster.

    transferqueue://rollouts                                     what our own producers put
    transferqueue://train?fields=input_ids,loss_mask,logprobs    what is there already

In the first an object is one key with one field, `span`. In the second a key is a sample that
somebody else has put, and a reference to it is the span that these fields make in this order, which
has to be that of the push that names it; nothing can be put there by us. The queue has to run: the
process that begins one takes it along when it ends, which no worker should be.

Its clients wait for a storage unit that has ended for minutes, and for the controller for ever: a
call is given up after `ANSWERED_WITHIN_S`, and tried again. None of the queue's processes comes
back, so a run that needs what one of them had goes on no more.
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
#: The field of what is put here.
SPAN = "span"


class TransferQueueStore(PayloadStore):
    """One partition. fields: of samples that others put; empty for objects of ours."""

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
        """All at once; a queue that has none of them says so by an error."""
        with suppress(_NotThere):
            if keys:
                self._asked(tq.async_kv_clear(list(keys), self._partition))
        return []

    def close(self) -> None:
        """The connection is the process's, which may use it for more than this."""

    def _objects(self, keys: Sequence[str]) -> "Iterator[memoryview | Missing]":
        # A queue leaves out what it does not have, so what comes may be of other keys.
        rows = self._rows(keys) if keys else []
        if len(rows) == len(keys):
            yield from rows
            return
        for key in keys:
            yield next(iter(self._rows([key])), Missing(f"{self._partition} does not have it"))

    def _rows(self, keys: Sequence[str]) -> "list[memoryview]":
        """The spans of as many of these as there are."""
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
        """What it answers. Raises _NotThere if it has none of these, else StoreFailed."""
        # Where the queue's own calls run: from there it can be taken back.
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
    """The queue has none of the keys that it was asked for, or not all of their fields."""


def _bytes(row: torch.Tensor) -> memoryview:
    return memoryview(row.contiguous().reshape(-1).view(torch.uint8).numpy().data)
