"""The trainer's and the rollout workers' side: push samples, receive micro-batches.

Names are loaded when first asked for, so that a rollout worker without torch can import
`RolloutProducer`; only what handles torch tensors by itself (`MicroBatchStream`) imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.collate import MicroBatch
    from workers.credentials import Credentials
    from workers.encode import RolloutSample
    from workers.producer import RolloutProducer
    from workers.producer_async import AsyncRolloutProducer
    from workers.producer_core import Outcome
    from workers.rank_client import RankClient
    from workers.sampler import LengthBucketSampler
    from workers.step import Step
    from workers.stream import MicroBatchStream

_HOMES = {
    "AsyncRolloutProducer": "workers.producer_async",
    "Credentials": "workers.credentials",
    "LengthBucketSampler": "workers.sampler",
    "MicroBatch": "workers.collate",
    "MicroBatchStream": "workers.stream",
    "Outcome": "workers.producer_core",
    "RankClient": "workers.rank_client",
    "RolloutProducer": "workers.producer",
    "RolloutSample": "workers.encode",
    "Step": "workers.step",
}

__all__ = [
    "AsyncRolloutProducer",
    "Credentials",
    "LengthBucketSampler",
    "MicroBatch",
    "MicroBatchStream",
    "Outcome",
    "RankClient",
    "RolloutProducer",
    "RolloutSample",
    "Step",
]


def __getattr__(name: str) -> object:
    """Import the module that a public name lives in."""
    if name not in _HOMES:
        raise AttributeError(f"module 'workers' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
