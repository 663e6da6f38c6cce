"""Stragglers, with a real core: who is copied, when, and how much of it in one turn."""

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollout_dispatcher.core.dispatch import Dispatch
from rollout_dispatcher.core.producers.push import Push
from rollout_dispatcher.sample import DType, Field, Sample, Schema
from rollout_dispatcher.service.config.serve import ServeConfig, core_config
from rollout_dispatcher.service.connections.shared_memory import SharedMemory
from rollout_dispatcher.service.connections.stragglers import BYTES_A_TURN, Stragglers
from rollout_dispatcher.transport.shared_memory.segments import segment_of, write_segment
from tests.support.source import PYTHONPATH

SCHEMA = Schema((Field("input_ids", DType.INT64),))
TOKENS = 40_000
NBYTES = 8 * TOKENS


class Run:
    """A core that holds groups of samples, a segment a push; nobody trains."""

    def __init__(self) -> None:
        config = ServeConfig(dp_size=1, dispatch_batch_size=64, micro_batch_size=1)
        self.core = Dispatch(core_config(config))
        self.shared = SharedMemory(64)
        self.stragglers = Stragglers(self.shared, self.core)
        self._pushed = 0

    def push(self, *groups: str, nbytes: int = NBYTES) -> None:
        """A push of a sample for each of these groups, which lack others."""
        contents = [bytes([self._pushed + at]) * nbytes for at in range(len(groups))]
        spans = self.shared.spans(write_segment(contents), [nbytes] * len(groups))
        samples = tuple(
            Sample(f"{self._pushed + at}", TOKENS, TOKENS - 1, SCHEMA, span, group, 60)
            for at, (span, group) in enumerate(zip(spans, groups, strict=True))
        )
        self.core.push(Push("p", self._pushed, samples), 0.0)
        self._pushed += len(groups)

    def drop(self, group: str) -> None:
        self.core.close_group(group, 0.0, keep=False)

    def in_segments(self) -> dict[str, bool]:
        """Of each sample that is held, whether it is still where it came; contents are checked."""
        found = {}
        for entry in self.core.entries():
            sample = entry.sample
            assert isinstance(sample.payload, memoryview)
            assert sample.payload == bytes([int(sample.sample_id)]) * len(sample.payload)
            found[sample.sample_id] = segment_of(sample.payload) is not None
        return found


def test_what_is_needed_stays_where_it_is() -> None:
    run = Run()
    run.push(*"aaaaaaaaab")
    run.stragglers.look()
    run.drop("b")  # one of ten: 1.11 times what is needed
    run.stragglers.look()
    assert set(run.in_segments().values()) == {True}
    assert run.shared.copied_bytes == 0


@pytest.mark.asyncio
async def test_the_emptiest_is_copied_and_its_segment_ends() -> None:
    run = Run()
    run.push(*"abbbb")
    run.push(*"aaaaaaaaab")
    run.drop("b")  # leaves one of five, and nine of ten
    run.stragglers.look()
    assert [at for at, is_there in run.in_segments().items() if not is_there] == ["0"]
    assert (len(run.shared), run.shared.nbytes) == (1, 10 * NBYTES)
    assert run.shared.copied_bytes == NBYTES


@pytest.mark.asyncio
async def test_a_turn_copies_no_more_than_its_share() -> None:
    run = Run()
    run.push(*"abb" * 20)
    run.drop("b")
    run.stragglers.look()
    assert BYTES_A_TURN <= run.shared.copied_bytes < BYTES_A_TURN + NBYTES
    for _ in range(20):  # as many turns at the most
        await asyncio.sleep(0)
    assert run.shared.copied_bytes == 20 * NBYTES
    assert (len(run.shared), len(run.in_segments())) == (0, 20)


@contextmanager
def no_more_memory() -> Iterator[None]:
    """This process gets a few megabytes more and no others."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**23, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_what_there_was_no_memory_to_copy_is_copied_when_there_is() -> None:
    # In a process of its own: in this one others have left memory that would do.
    alone = f"import asyncio, runpy; asyncio.run(runpy.run_path({__file__!r})['copied_later']())"
    env = os.environ | {"PYTHONPATH": PYTHONPATH}
    subprocess.run([sys.executable, "-c", alone], env=env, check=True, timeout=60)


async def copied_later() -> None:
    run = Run()
    run.push(*"ab", nbytes=5 * 2**23)  # too large to find room in memory that was had before
    run.drop("b")
    with no_more_memory(), pytest.raises(MemoryError):
        run.stragglers.look()
    assert run.in_segments() == {"0": True}
    run.stragglers.look()
    assert run.in_segments() == {"0": False}
