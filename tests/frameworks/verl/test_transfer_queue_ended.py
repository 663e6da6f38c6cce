"""`transferqueue://` where a process of the queue is killed: what it had is said to be gone."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import transfer_queue as tq

from rollout_dispatcher.errors import StoreFailed
from rollout_dispatcher.payload import Reference
from rollout_workers import RolloutProducer
from rollout_workers.stores.interface import PayloadStore
from rollout_workers.stores.registry import open_store
from rollout_workers.stores.transfer_queue import CONTROLLER, NAMESPACE
from tests.support.payload_stores import read, whole
from tests.support.ray_cluster import ray_cluster
from tests.support.referenced_run import trained_on
from tests.support.server import ServeProcess

ADDRESS = "transferqueue://rollouts"
UNITS = "TransferQueueStorageUnit#0", "TransferQueueStorageUnit#1"
#: Seconds; by itself the queue's client gives up after 600, or never.
SAID_WITHIN_S = 30.0


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with ray_cluster(num_cpus=4):
        yield


@pytest.fixture(autouse=True)
def queue() -> Iterator[None]:
    """A queue of its own for each test, of two storage units."""
    tq.init()
    yield
    tq.close()


def kill(actor: Any) -> None:
    """As the kernel does where memory is short."""
    pid: int = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGKILL)


def put(count: int) -> list[Reference]:
    store = open_store(ADDRESS)
    return [whole(store.put(f"p.1/{at}", [bytes([at]) * 9])) for at in range(count)]


def samples_in(unit: str) -> int:
    """How many a storage unit has."""
    found: int = ray.get(
        ray.get_actor(unit).__ray_call__.remote(lambda self: self.storage_data.active_key_count)
    )
    return found


def values(at: int) -> torch.Tensor:
    """What sample `at` consists of: more than goes inline."""
    return torch.arange(20_000) + at


def failures(store: PayloadStore, count: int) -> list[int]:
    """Which of so many puts fail."""
    failed = []
    for at in range(count):
        try:
            store.put(f"p.2/{at}", [b"abc"])
        except StoreFailed:
            failed.append(at)
    return failed


def test_what_was_in_a_storage_unit_that_was_killed_is_missing_and_can_be_released() -> None:
    references = put(6)
    store, other = open_store(ADDRESS), open_store(ADDRESS)
    kill(ray.get_actor(UNITS[0]))
    began = time.monotonic()
    with pytest.raises(StoreFailed, match=f"{UNITS[0]} has ended"):
        store.get(references)
    found = read(store, *references)
    assert time.monotonic() < began + SAID_WITHIN_S
    assert found.count("missing") == 3
    for at, item in enumerate(found):
        assert item in ("missing", bytes([at]) * 9)
    assert read(open_store(ADDRESS), *references) == found

    # The queue deals to its units in turn, so one goes through before the first that fails.
    assert failures(store, 2) == [0, 1]
    assert failures(other, 4) in ([0, 1, 2, 3], [1, 2, 3])
    with pytest.raises(StoreFailed, match=f"takes nothing without {UNITS[0]}"):
        store.put("p.2/4", [b"abc"])

    assert len(store.list("p.1/")) == 6
    assert store.release([one.stored.key for one in references]) == []
    assert store.list("p.1/") == []
    assert other.release(other.list("p.2/")) == []
    assert store.list("") == []
    assert samples_in(UNITS[1]) == 0


def test_nobody_waits_for_what_another_thread_has_found_to_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    references = put(6)
    store, get = open_store(ADDRESS), tq.async_kv_batch_get

    def get_later(*given: Any) -> Any:
        """Once somebody else has waited, and been told."""
        monkeypatch.setattr(tq, "async_kv_batch_get", get)
        kill(ray.get_actor(UNITS[0]))
        with pytest.raises(StoreFailed, match=f"{UNITS[0]} has ended"):
            store.get(references)
        return get(*given)

    monkeypatch.setattr(tq, "async_kv_batch_get", get_later)
    began = time.monotonic()
    with pytest.raises(StoreFailed, match=f"{UNITS[0]} has ended"):
        store.get(references)
    assert time.monotonic() < began + SAID_WITHIN_S
    assert read(store, *references).count("missing") == 3


def test_without_its_controller_everything_is_missing_and_nothing_is_left() -> None:
    references = put(2)
    store = open_store(ADDRESS)
    kill(ray.get_actor(CONTROLLER, NAMESPACE))
    with pytest.raises(StoreFailed, match=f"{CONTROLLER} has ended"):
        store.get(references)
    assert read(store, *references) == ["missing", "missing"]
    assert store.release([one.stored.key for one in references]) == []
    assert store.list("") == []
    with pytest.raises(StoreFailed, match="takes nothing"):
        store.put("p.1/2", [b"abc"])


@pytest.mark.e2e
def test_a_run_drops_and_counts_what_was_in_a_unit_that_was_killed_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {
        "dp_size": 1,
        "global_batch_size": 4,
        "micro_batch_size": 2,
        "buffer_capacity": 64,
        "journal_dir": str(tmp_path / "journal"),
        "sample_retention": "commit",
        "payload_stores": [ADDRESS],
        "inline_limit": "64KiB",
    }
    with ServeProcess(tmp_path, **options) as server:
        with RolloutProducer(server.endpoint) as producer:
            push(producer, range(16))
            assert len(open_store(ADDRESS).list("")) == 16
            kill(ray.get_actor(UNITS[0]))
            push(producer, range(16, 20))
            producer.end_stream()
            seen = trained_on(server.endpoint)
        assert server.wait() == 0
        dropped = sum(map(int, re.findall(r"payload store: (\d+) are dropped", server.log())))
    assert dropped == 8
    assert len(seen) == 20 - dropped
    assert all(torch.equal(seen[name], values(int(name[1:]))) for name in seen)
    assert open_store(ADDRESS).list("") == []
    assert samples_in(UNITS[1]) == 0


def push(producer: RolloutProducer, numbers: range) -> None:
    """Each in an object of its own."""
    for at in numbers:
        producer.push({"input_ids": values(at)}, sample_id=f"s{at}")
