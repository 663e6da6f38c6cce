"""TorchSpec's own controller, read from its clone; Ray and what needs GPUs are stand-ins."""

from queue import SimpleQueue
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.peers.loading import load
from tests.peers.roster import SOURCES
from tests.support.seams import module


def controller(*lacking: str, ray: ModuleType | None = None) -> Any:
    """The class; lacking: further modules that are not there. ray: in the place of Ray."""
    given = [
        module("torchspec.training.data_fetcher", TrainSample=SimpleNamespace),
        module("torchspec.utils.memory", estimate_tensor_bytes=lambda *_: 1),
        module("ray.util.queue", Queue=SimpleQueue),
        *([] if ray is None else [ray]),
    ]
    return load(
        SOURCES / "TorchSpec", "torchspec.controller.training_controller",
        (*lacking, "torchspec.utils.logging", "torchspec.utils.types"),
        {each.__name__: each for each in given},
    ).AsyncTrainingController  # fmt: skip
