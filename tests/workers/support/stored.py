"""Samples that lie in a payload store."""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import Sample
from rollout_workers.stores.file import FileStore
from rollout_workers.stores.interface import PayloadStore
from tests.support.samples import span_of
from tests.workers.support.peers import PATIENCE_S, Peer

#: Where nothing is.
NOWHERE = StoredObject("file:///nowhere", "p.1/0", 1 << 30)


def make_store(address: str) -> FileStore:
    """A store in a new directory."""
    Path(address.removeprefix("file://")).mkdir()
    return FileStore.open(address)


def referenced(samples: Sequence[Sample], stored: StoredObject = NOWHERE) -> list[Sample]:
    """The same in an object, end to end."""
    found, offset = [], 0
    for sample in samples:
        reference = Reference(stored, offset, sample.nbytes)
        found.append(sample._replace(payload=reference))
        offset += sample.nbytes
    return found


def frees_before_it_leaves(peer: Peer, closing: Future[None], store: FileStore) -> None:
    """A client that says goodbye frees what nobody else is there to free."""
    store.put("p.1/0", [b"x"])
    peer.expect(m.Bye)
    peer.send(m.Free(number=1, store=store.address, keys=["p.1/0"]))
    assert peer.expect(m.Freed) == m.Freed(number=1)
    peer.send(m.Bye())
    closing.result(PATIENCE_S)
    assert store.list("") == []


def put(store: PayloadStore, key: str, *samples: Sample) -> list[Sample]:
    """Put samples into one object; the same as references."""
    return referenced(samples, store.put(key, list(map(span_of, samples))))
