"""Micro-batches of given samples, as a rank makes them of what arrives."""

from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import Sample, Schema
from rollout_workers.micro_batch.collate import CollateConfig, collate
from rollout_workers.micro_batch.loss import LossConfig
from rollout_workers.micro_batch.micro_batch import MicroBatch
from rollout_workers.rank.held_steps import Received
from rollout_workers.rank.payload import cut
from tests.workers.support.peers import SCHEMA, arrived, micro_batch, sample, step

HEADER = step(3, 2, num_samples=2, tokens=5, loss_tokens=3, loss_samples=2)


def received(frame: bytes, schema: Schema = SCHEMA) -> Received:
    message, payload = arrived(frame)
    assert isinstance(message, m.MicroBatch)
    return Received(message, payload, cut(schema, message, payload))


def batch(
    *samples: Sample,
    config: CollateConfig | None = None,
    header: m.StepHeader = HEADER,
    index: int = 1,
) -> MicroBatch:
    frame = received(micro_batch(3, index, *samples), samples[0].schema)
    return collate(frame, header, config or CollateConfig(LossConfig(2)))


TWO = (sample([5, 6, 7], [0, 1, 1], "a"), sample([8, 9], [1, 1], "b"))
