"""Samples for tests: real spans, short to write."""

import numpy as np

from rollout_dispatcher.payload import InMemory, Payload, Reference, StoredObject
from rollout_dispatcher.sample import DType, Field, Sample, Schema

#: What most tests push: token ids and nothing else.
IDS = Schema((Field("input_ids", DType.INT64),))


def span_of(sample: Sample) -> memoryview:
    """The payload of a sample that has it in memory."""
    assert isinstance(sample.payload, InMemory)
    return sample.payload


def make_sample(
    sample_id: str = "s",
    tokens: int = 4,
    *,
    loss_tokens: int | None = None,
    schema: Schema = IDS,
    group_id: str | None = None,
    group_size: int = 1,
    policy_version: int | None = None,
    store: str = "",
    staleness_exempt: bool = False,
) -> Sample:
    """A sample whose payload bytes count up, so that no two places look alike.

    store: that of a sample whose payload is an object there.
    """
    nbytes = schema.nbytes(tokens)
    payload: Payload = memoryview((np.arange(nbytes) % 251).astype(np.uint8).tobytes())
    if store:
        payload = Reference(StoredObject(store, f"of/{sample_id}", nbytes), 0, nbytes)
    loss = tokens - 1 if loss_tokens is None else loss_tokens
    return Sample(
        sample_id, tokens, loss, schema, payload, group_id, group_size, policy_version,
        staleness_exempt=staleness_exempt,
    )  # fmt: skip
