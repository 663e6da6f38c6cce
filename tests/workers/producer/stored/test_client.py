"""A producer with a real store and a scripted dispatcher: put, then push; and nothing is left."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rollout_dispatcher.errors import StoreFailed
from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.outbox import Buffer
from rollout_dispatcher.sample import DType, Field, Outcome, Schema
from rollout_workers import AsyncRolloutProducer, ReferencedSample
from rollout_workers.stores.file import FileStore
from tests.workers.support.peers import PATIENCE_S, Peer, ScriptedDispatcher
from tests.workers.support.stored import frees_before_it_leaves

LARGE = {"input_ids": np.arange(64)}


def options(store: FileStore) -> dict[str, Any]:
    """Of a welcome."""
    return {"payload_stores": [store.address], "inline_limit": 512}


async def start(
    dispatcher: ScriptedDispatcher, store: FileStore
) -> tuple[AsyncRolloutProducer, Peer]:
    producer = AsyncRolloutProducer(dispatcher.endpoint)
    starting = asyncio.create_task(producer.start())
    peer = await asyncio.to_thread(dispatcher.accept)
    await asyncio.to_thread(peer.welcome, **options(store))
    await starting
    return producer, peer


def reference(push: m.Push, at: int) -> Reference:
    assert push.objects is not None
    assert push.places is not None
    place = push.places[at]
    assert place is not None
    found = push.objects[place[0]]
    size = push.sizes()[at]
    return Reference(StoredObject(found.store, found.key, found.nbytes), place[1], size)


def test_what_a_push_refers_to_is_there_when_it_arrives(
    dispatcher: ScriptedDispatcher, store: FileStore
) -> None:
    producer, peer = dispatcher.producer(**options(store))
    pushing = dispatcher.meanwhile(producer.push_many, [LARGE, {"input_ids": np.arange(3)}])
    push = peer.expect(m.Push)
    assert store.get([reference(push, 0)]) == [memoryview(LARGE["input_ids"].tobytes())]
    assert peer.payload == np.arange(3).tobytes()
    peer.answer(push)
    assert pushing.result(PATIENCE_S) == [Outcome.ACCEPTED] * 2
    peer.send(m.Free(number=1, store=store.address, keys=store.list("")))
    assert peer.expect(m.Freed) == m.Freed(number=1)
    assert store.list("") == []
    peer.send(m.Sweep(number=2, store=store.address, prefix="x."))
    assert peer.expect(m.Swept) == m.Swept(number=2)


def test_who_has_said_goodbye_frees_what_nobody_else_is_there_to_free(
    dispatcher: ScriptedDispatcher, store: FileStore
) -> None:
    producer, peer = dispatcher.producer(**options(store))
    frees_before_it_leaves(peer, dispatcher.meanwhile(producer.close), store)


def test_references_to_what_lies_there_are_pushed_as_they_are(
    dispatcher: ScriptedDispatcher, store: FileStore
) -> None:
    producer, peer = dispatcher.producer(**options(store))
    stored = store.put("theirs/1", [np.arange(4).tobytes()])
    schema = Schema((Field("input_ids", DType.INT64),))
    sample = ReferencedSample(Reference(stored, 0, 32), schema, 4, 3, sample_id="a")
    pushing = dispatcher.meanwhile(producer.push_references, [sample])
    push = peer.expect(m.Push)
    assert reference(push, 0) == sample.reference
    assert len(peer.payload) == 0
    peer.answer(push)
    assert pushing.result(PATIENCE_S) == [Outcome.ACCEPTED]


class Slow(FileStore):
    """A store whose puts last until they may go on."""

    begun, go_on = threading.Event(), threading.Event()

    def put(self, key: str, spans: Sequence[Buffer]) -> StoredObject:
        """Wait, then put."""
        Slow.begun.set()
        if not Slow.go_on.wait(PATIENCE_S):
            raise StoreFailed(self.address, "nobody let it go on")
        return super().put(key, spans)


@pytest.fixture
def _slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_workers.stores.file.FileStore", Slow)
    Slow.begun.clear()
    Slow.go_on.clear()


@pytest.mark.usefixtures("_slow")
async def test_a_push_that_is_given_up_while_it_is_put_leaves_nothing(
    dispatcher: ScriptedDispatcher, store: FileStore
) -> None:
    producer, peer = await start(dispatcher, store)
    pushing = asyncio.create_task(producer.push(LARGE))
    assert await asyncio.to_thread(Slow.begun.wait, PATIENCE_S)
    pushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pushing
    closing = asyncio.create_task(producer.close())
    await asyncio.to_thread(peer.acknowledge_bye)
    Slow.go_on.set()
    await closing
    assert store.list("") == []


@pytest.mark.usefixtures("_slow")
async def test_a_timeout_counts_while_it_is_put(
    dispatcher: ScriptedDispatcher, store: FileStore
) -> None:
    producer, peer = await start(dispatcher, store)
    with pytest.raises(TimeoutError, match="the push was withdrawn"):
        await producer.push(LARGE, timeout=0.01)
    Slow.go_on.set()
    closing = asyncio.create_task(producer.close())
    await asyncio.to_thread(peer.acknowledge_bye)
    await closing
    assert store.list("") == []


def test_a_store_that_is_not_there_is_told_and_the_sample_sent(
    dispatcher: ScriptedDispatcher,
    store: FileStore,
    caplog: pytest.LogCaptureFixture,
) -> None:
    producer, peer = dispatcher.producer(**options(store))
    store.root.rmdir()
    pushing = dispatcher.meanwhile(producer.push, LARGE)
    push = peer.expect(m.Push)
    assert push.objects is None
    assert peer.payload == LARGE["input_ids"].tobytes()
    peer.answer(push)
    assert pushing.result(PATIENCE_S) is Outcome.ACCEPTED
    assert "there is no directory" in caplog.text
