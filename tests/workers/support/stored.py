"""Samples that lie in a payload store."""

from collections.abc import Sequence

from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.sample import Sample
from rollout_workers.stores.interface import PayloadStore
from tests.support.samples import span_of

#: Where nothing is.
NOWHERE = StoredObject("file:///nowhere", "p.1/0", 1 << 30)


def referenced(samples: Sequence[Sample], stored: StoredObject = NOWHERE) -> list[Sample]:
    """The same in an object, end to end."""
    found, offset = [], 0
    for sample in samples:
        reference = Reference(stored, offset, sample.nbytes)
        found.append(sample._replace(payload=reference))
        offset += sample.nbytes
    return found


def put(store: PayloadStore, key: str, *samples: Sample) -> list[Sample]:
    """Put samples into one object; the same as references."""
    return referenced(samples, store.put(key, list(map(span_of, samples))))
