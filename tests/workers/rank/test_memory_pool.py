"""Memory is used again, and never while anybody looks at it."""

import random
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from rollout_workers.rank.memory_pool import MemoryPool

MEGABYTE = 1_000_000

#: Everything that one can make of a payload in order to look at it.
VIEWS: dict[str, Callable[[memoryview], object]] = {
    "memoryview": lambda payload: payload,
    "part of an array": lambda payload: np.frombuffer(payload, np.uint8)[8:].reshape(-1, 8)[:, 1],
    "array of the owner": lambda payload: np.asarray(payload.obj)[8:],
    "part of a tensor": lambda payload: torch.frombuffer(payload, dtype=torch.uint8)[8:].view(
        2, -1
    ),
    "array of a tensor": lambda payload: torch.frombuffer(payload, dtype=torch.uint8).numpy()[1:],
    "tensor of an array": lambda payload: torch.from_numpy(np.frombuffer(payload, np.uint8))[1:],
    "storage": lambda payload: torch.frombuffer(payload, dtype=torch.uint8).untyped_storage(),
}


def address(payload: memoryview) -> int:
    return int(np.frombuffer(payload, np.uint8).ctypes.data)


@pytest.mark.parametrize("look", VIEWS.values(), ids=VIEWS)
def test_memory_comes_back_when_the_last_view_is_gone_and_no_sooner(
    look: Callable[[memoryview], object],
) -> None:
    pool = MemoryPool()
    payload = pool(MEGABYTE)
    first = address(payload)
    view = look(payload)
    del payload
    other = pool(MEGABYTE)
    assert pool.kept_bytes == 0
    assert address(other) != first
    del view
    assert pool.kept_bytes >= MEGABYTE
    assert address(pool(MEGABYTE)) == first


def test_what_is_kept_is_bounded_and_of_the_sizes_asked_for_last() -> None:
    pool = MemoryPool(keep_bytes=3 * MEGABYTE)
    small = [pool(200_000) for _ in range(10)]
    small.clear()
    assert 2 * MEGABYTE <= pool.kept_bytes <= 3 * MEGABYTE
    large = pool(2_500_000)
    first = address(large)
    del large
    assert 2_500_000 <= pool.kept_bytes <= 3 * MEGABYTE
    assert address(pool(2_500_000)) == first
    assert pool(4 * MEGABYTE).nbytes == 4 * MEGABYTE
    assert pool.kept_bytes <= 3 * MEGABYTE


def test_memory_may_come_back_while_other_memory_is_let_go() -> None:
    """As when the collector runs in between; here to free a block drops the view of another."""
    held: list[memoryview] = []

    def memory(nbytes: int) -> memoryview:
        block = np.empty(nbytes, np.uint8)
        weakref.finalize(block, held.clear)
        return block.data

    pool = MemoryPool(memory, keep_bytes=2 * MEGABYTE)
    kept, coming = [pool(MEGABYTE)], [pool(3 * MEGABYTE // 2)]
    kept.clear()
    held.append(pool(MEGABYTE // 2))
    letting_go = threading.Thread(target=coming.clear, daemon=True)
    letting_go.start()
    letting_go.join(10)
    assert not letting_go.is_alive()
    assert not held


def test_threads_never_share_memory() -> None:
    """Each writes its mark over what it gets, holds some, and finds its mark when it looks."""
    pool = MemoryPool(keep_bytes=4 * MEGABYTE)

    def use(mark: int) -> int:
        chance, held, seen = random.Random(mark), list[np.ndarray](), set[int]()
        for _ in range(500):
            got = np.frombuffer(pool(chance.randrange(130_000, 400_000)), np.uint8)
            got[:] = mark
            seen.add(got.ctypes.data)
            held.append(got)
            if len(held) > 4:
                assert np.all(held.pop(chance.randrange(5)) == mark)
        return 500 - len(seen)

    with ThreadPoolExecutor(4) as threads:
        used_again = list(threads.map(use, range(1, 5)))
    assert min(used_again) > 0
