"""The trainer's and the rollout workers' side: push samples, receive micro-batches.

Names are loaded on first use, so that a rollout worker without torch can import `RolloutProducer`;
only classes that make torch tensors (`MicroBatchStream`) import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from rollout_dispatcher.hints import to_install

if TYPE_CHECKING:
    from rollout_dispatcher.sample import Outcome as Outcome
    from rollout_workers.client.connector import Credentials as Credentials
    from rollout_workers.dataset import StreamDataset as StreamDataset
    from rollout_workers.feedback import DroppedSample as DroppedSample
    from rollout_workers.feedback import Feedback as Feedback
    from rollout_workers.local_packing import pack_local as pack_local
    from rollout_workers.micro_batch.micro_batch import MicroBatch as MicroBatch
    from rollout_workers.producer.encode import ReferencedSample as ReferencedSample
    from rollout_workers.producer.encode import RolloutSample as RolloutSample
    from rollout_workers.producer.producer import AsyncRolloutProducer as AsyncRolloutProducer
    from rollout_workers.producer.producer import RolloutProducer as RolloutProducer
    from rollout_workers.rank.client import RankClient as RankClient
    from rollout_workers.sampler import LengthBucketSampler as LengthBucketSampler
    from rollout_workers.step import Step as Step
    from rollout_workers.stream import MicroBatchStream as MicroBatchStream
else:  # a checker knows the names above, and no others
    _HOMES = {
        "rollout_dispatcher.sample": "Outcome",
        "rollout_workers.client.connector": "Credentials",
        "rollout_workers.dataset": "StreamDataset",
        "rollout_workers.feedback": "DroppedSample Feedback",
        "rollout_workers.local_packing": "pack_local",
        "rollout_workers.micro_batch.micro_batch": "MicroBatch",
        "rollout_workers.producer.encode": "ReferencedSample RolloutSample",
        "rollout_workers.producer.producer": "AsyncRolloutProducer RolloutProducer",
        "rollout_workers.rank.client": "RankClient",
        "rollout_workers.sampler": "LengthBucketSampler",
        "rollout_workers.step": "Step",
        "rollout_workers.stream": "MicroBatchStream",
    }
    _HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
    __all__ = [*_HOME_OF]  # noqa: PLE0604  they are strings

    def __getattr__(name: str) -> object:
        """Import the module that a public name lives in; an ImportError says what to install."""
        if name not in _HOME_OF:
            raise AttributeError(f"module 'rollout_workers' has no attribute {name!r}")
        try:
            return getattr(import_module(_HOME_OF[name]), name)
        except ModuleNotFoundError as error:
            if (remedy := to_install(error)) is None:
                raise
            raise ImportError(f"{name} {remedy}", name=error.name) from error
