"""A sample that lies in a payload store already, to be pushed by its place.

    sample = stored_sample("file:///mnt/shared/rollouts", "worker-3/17", ids, mask)
    producer.push_references([sample])

The fields of a sample follow each other in the order of the fields of the run, each at a multiple
of 8 bytes; the dispatcher does not read them. Use each key once, and push all samples of an object
in one call.
"""

import numpy as np
from numpy.typing import NDArray

from rollout_dispatcher.payload import Reference
from rollout_dispatcher.sample import DType, Field, Schema
from rollout_dispatcher.spans import join
from rollout_workers import ReferencedSample
from rollout_workers.stores.registry import open_store

SCHEMA = Schema((Field("input_ids", DType.INT64), Field("loss_mask", DType.BOOL)))


def stored_sample(
    store: str, key: str, input_ids: NDArray[np.int64], loss_mask: NDArray[np.bool_]
) -> ReferencedSample:
    """Put one sample into an object of its own, and say where it is."""
    span = join([input_ids.tobytes(), loss_mask.tobytes()])
    stored = open_store(store).put(key, [span])
    return ReferencedSample(
        Reference(stored, offset=0, nbytes=len(span)),
        SCHEMA,
        tokens=len(input_ids),
        loss_tokens=int(loss_mask[1:].sum()),  # the first token is never a target
    )
