"""Freed memory stays with the process, where the C library can be told so."""

import platform
import subprocess
import sys

import pytest

from rollout_dispatcher.service.process import KEPT_BYTES
from rollout_dispatcher.transport.memory import uninitialised

#: Fills and frees as much as is kept, twice; prints the pages that the second time faulted in.
AGAIN = """
import resource
from rollout_dispatcher.transport.memory import uninitialised
from rollout_dispatcher.service.process import KEPT_BYTES, keep_freed_memory

assert keep_freed_memory()

def fill():
    blocks = [uninitialised(1 << 20) for _ in range(KEPT_BYTES // 2 >> 20)]
    for block in blocks:
        block[::4096] = bytes(256)

fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
fill()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_what_was_freed_is_used_again_without_a_fault_a_page() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AGAIN], check=True, capture_output=True, text=True, timeout=60
    )
    assert int(done.stdout) < KEPT_BYTES // 2 // 4096 // 10


def test_blocks_do_not_share_memory() -> None:
    blocks = [uninitialised(1 << 16) for _ in range(8)]
    for at, block in enumerate(blocks):
        block[:] = bytes([at]) * len(block)
    assert all(set(block) == {at} for at, block in enumerate(blocks))
