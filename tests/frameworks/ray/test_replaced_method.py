"""An actor runs the method that took its own's place, as docs/planner.md does with TorchSpec's."""

import re
import sys
from typing import Any

import pytest
import ray

from tests.support.ray_cluster import ray_cluster
from tests.support.seams import shown

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


class Controller:
    """One with a method of that name."""

    def try_dispatch_batch(self) -> str:
        """Its own."""
        return "theirs"


def ours(_: Any) -> str:
    """In its place."""
    return "ours"


def test_an_actor_has_the_method_that_replaced_its_own() -> None:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    made = ray.remote(Controller)
    lines = re.findall(r"^controller.*$", shown("TorchSpec's controller"), re.MULTILINE)
    train_entry = type("train_entry", (), {"AsyncTrainingController": made})
    exec("\n".join(lines), {"train_entry": train_entry, "try_dispatch_batch": ours})
    with ray_cluster(object_store_memory=256 << 20, namespace="rollouts"):
        assert ray.get(made.remote().try_dispatch_batch.remote()) == "ours"
