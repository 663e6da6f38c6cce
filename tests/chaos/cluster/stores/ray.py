"""A Ray cluster of this machine: objects that a holder owns, which may be killed or stopped."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import ray

from rollout_workers.stores.ray import RayStore
from tests.chaos.cluster.stores.store import Store

NAMESPACE, NAME = "rollouts", "payloads"
MEMORY = 512 << 20
#: Seconds within which Ray has seen that a process ended, or that an object is needed no more.
SEEN_WITHIN_S = 30.0


class RayEngine(Store):
    """folder: it keeps nothing there."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        context = ray.init(
            num_cpus=2, include_dashboard=False, object_store_memory=MEMORY, log_to_driver=False
        )
        gcs = context.address_info["gcs_address"]
        super().__init__(f"ray://{NAMESPACE}/{NAME}", {"RAY_ADDRESS": gcs})
        self._store = RayStore.open(self.address)
        self._node = ray.get_runtime_context().get_node_id()

    def keys(self) -> list[str]:
        """As the holder has them, which keeps their order."""
        return self._store.list("")

    def read(self, key: str) -> bytes | None:
        """The whole of an object."""
        holder = self._holder()
        (held,) = [None] if holder is None else ray.get(holder.find.remote([key]))
        return None if held is None else bytes(memoryview(ray.get(held)))

    def release(self, keys: Sequence[str]) -> None:
        """Tell the holder."""
        self._store.release(keys)

    @contextmanager
    def away(self, random: Random) -> Iterator[None]:
        """The holder answers nobody."""
        del random
        with _stopped(self._pid()):
            yield

    def restart(self, random: Random) -> None:
        """The next who puts makes another holder."""
        del random
        if (pid := self._pid()) is not None:
            os.kill(pid, signal.SIGKILL)
        _wait_until(lambda: self._pid() != pid, "the holder is gone")

    def left(self) -> dict[str, list[str]]:
        """And what is in the object store beside the holder's objects."""
        everything = self.everything()
        if not everything and not _wait_until(lambda: not _bytes_used(), None):
            return {f"{_bytes_used()} bytes in Ray's object store": []}
        return everything

    def close(self) -> None:
        """Stop the cluster."""
        self._store.close()
        ray.shutdown()

    def _holder(self) -> Any | None:
        try:
            return ray.get_actor(f"{NAME}@{self._node}", NAMESPACE)
        except ValueError:
            return None

    def _pid(self) -> int | None:
        """Of the holder's process, None if there is none."""
        if (holder := self._holder()) is None:
            return None
        try:
            found: int = ray.get(holder.__ray_call__.remote(lambda _: os.getpid()))
        except ray.exceptions.RayActorError:
            return None
        return found


def _bytes_used() -> float:
    used: float = MEMORY - ray.available_resources()["object_store_memory"]
    return used


@contextmanager
def _stopped(pid: int | None) -> Iterator[None]:
    if pid is None:
        yield
        return
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _wait_until(holds: Any, what: str | None) -> bool:
    """Whether it does in time; an error instead of False if it is said what is waited for."""
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not (found := bool(holds())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found or what is None, f"{what}: not in time"
    return found
