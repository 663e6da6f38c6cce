"""The trainer's and the rollout workers' side: push samples, receive micro-batches.

Names are loaded when first asked for, so that a rollout worker without torch can import
`RolloutProducer`; only what handles torch tensors by itself (`MicroBatchStream`) imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout_dispatcher.sample import Outcome
    from rollout_workers.client.connector import Credentials
    from rollout_workers.dataset import StreamDataset
    from rollout_workers.feedback import DroppedSample, Feedback
    from rollout_workers.local_packing import pack_local
    from rollout_workers.micro_batch.loss import Loss
    from rollout_workers.micro_batch.micro_batch import MicroBatch
    from rollout_workers.producer.encode import ReferencedSample, RolloutSample
    from rollout_workers.producer.producer import AsyncRolloutProducer, RolloutProducer
    from rollout_workers.rank.client import RankClient
    from rollout_workers.sampler import LengthBucketSampler
    from rollout_workers.step import Step
    from rollout_workers.stream import MicroBatchStream

_HOMES = {
    "AsyncRolloutProducer": "rollout_workers.producer.producer",
    "Credentials": "rollout_workers.client.connector",
    "DroppedSample": "rollout_workers.feedback",
    "Feedback": "rollout_workers.feedback",
    "LengthBucketSampler": "rollout_workers.sampler",
    "Loss": "rollout_workers.micro_batch.loss",
    "MicroBatch": "rollout_workers.micro_batch.micro_batch",
    "MicroBatchStream": "rollout_workers.stream",
    "Outcome": "rollout_dispatcher.sample",
    "RankClient": "rollout_workers.rank.client",
    "ReferencedSample": "rollout_workers.producer.encode",
    "RolloutProducer": "rollout_workers.producer.producer",
    "RolloutSample": "rollout_workers.producer.encode",
    "Step": "rollout_workers.step",
    "StreamDataset": "rollout_workers.dataset",
    "pack_local": "rollout_workers.local_packing",
}

__all__ = [
    "AsyncRolloutProducer",
    "Credentials",
    "DroppedSample",
    "Feedback",
    "LengthBucketSampler",
    "Loss",
    "MicroBatch",
    "MicroBatchStream",
    "Outcome",
    "RankClient",
    "ReferencedSample",
    "RolloutProducer",
    "RolloutSample",
    "Step",
    "StreamDataset",
    "pack_local",
]


if not TYPE_CHECKING:  # whose names are those above, and no others

    def __getattr__(name: str) -> object:
        """Import the module that a public name lives in; an ImportError says what to install."""
        if name not in _HOMES:
            raise AttributeError(f"module 'rollout_workers' has no attribute {name!r}")
        try:
            return getattr(import_module(_HOMES[name]), name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "torch":
                raise
            raise ImportError(
                f"{name} needs torch, which is not installed here; install it with "
                "pip install 'rollout-dispatcher[workers]'",
                name="torch",
            ) from error
