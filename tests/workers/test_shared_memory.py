"""Micro-batches over a Unix socket: descriptors come instead of bytes, and all else is the same.

Real dispatchers, and ranks that are processes of their own where they are killed.
"""

import gc
import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout_dispatcher.protocol import messages as m
from rollout_workers import MicroBatchStream, RolloutProducer
from rollout_workers.rank.client import RankClient, RankStep
from rollout_workers.rank.shared_memory.gatherer import MAPPED_BYTES
from tests.support import shared_memory
from tests.support.server import eventually
from tests.support.shared_memory import SEGMENT
from tests.support.source import PYTHONPATH

Fields = dict[str, Any]
#: Samples of a step.
BATCH = 24
#: Tokens of a sample that is mapped.
LARGE = MAPPED_BYTES // 8
TYPES = ["int64", "int32", "uint8", "bool", "float32", "float16"]

serving = partial(
    shared_memory.serving,
    dispatch_batch_size=BATCH,
    micro_batch_size=8,
    buffer_capacity=4 * BATCH,
    max_sample_tokens=1 << 24,
)


def random_samples(seed: int, count: int = BATCH, least: int = 12000) -> list[Fields]:
    """Samples of a schema with fields of every kind, drawn too."""
    chance = np.random.default_rng(seed)

    def values(dtype: str, *shape: int) -> np.ndarray[Any, Any]:
        return chance.integers(0, 100, shape).astype(dtype)

    per_token = {f"t{n}": str(chance.choice(TYPES)) for n in range(chance.integers(0, 4))}
    widths = {name: tuple(chance.integers(1, 4, chance.integers(0, 2))) for name in per_token}
    found = []
    for _ in range(count):
        tokens, rows = int(chance.integers(least, 3 * least)), int(chance.integers(0, 9))
        fields: Fields = {"input_ids": values("int64", tokens), "reward": values("float32")}
        fields |= {k: values(dtype, tokens, *widths[k]) for k, dtype in per_token.items()}
        fields |= {"image": values("uint8", rows, 5), "env": "größe" * rows}
        found.append(fields)
    return found


def push(endpoint: str, samples: Sequence[Fields], **options: Any) -> None:
    with RolloutProducer(endpoint, ragged=("image",), **options) as producer:
        producer.push_many(samples)


Content = list[tuple[m.MicroBatch, bytes]]


def content_of(step: RankStep | None) -> Content:
    """The headers and the payloads of a step."""
    assert step is not None
    return [(received.header, bytes(received.payload)) for received in step]


def joined(endpoint: str, **options: Any) -> RankClient:
    return RankClient(endpoint, dp_rank=0, dp_size=1, **options)


@pytest.mark.parametrize(("seed", "size"), [(1, 1), (2, 3), (3, 8), (4, 24)])
def test_what_is_shared_is_what_is_sent(tmp_path: Path, seed: int, size: int) -> None:
    samples = random_samples(seed)
    with serving(tmp_path, micro_batch_size=size) as server:
        unix, tcp = server.endpoints
        push(unix, samples[:-5])
        push(tcp, samples[-5:])  # which are no segment
        with joined(unix) as rank:
            shared = content_of(rank.next_step(20))
            few = rank.statistics().bytes_received
        with joined(tcp) as rank:  # a new generation gets the same step
            sent = content_of(rank.next_step(20))
            many = rank.statistics().bytes_received
        assert shared == sent
        assert sum(len(header.tokens) for header, _ in sent) == BATCH
        assert few < many / 2


def cut_connections(endpoint: str) -> None:
    """Shut down every connection that this process has to a Unix socket."""
    for descriptor, link in open_files("self"):
        if link.startswith("socket:"):
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as sock:
                if sock.getpeername() == endpoint.removeprefix("unix:"):
                    sock.shutdown(socket.SHUT_RDWR)


def open_files(pid: int | str) -> Iterator[tuple[int, str]]:
    """Descriptors of a process, and what each is of."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # one is that of the listing
            yield int(entry.name), str(entry.readlink())


def test_a_rank_that_reconnects_goes_on(tmp_path: Path) -> None:
    with (
        serving(tmp_path, micro_batch_size=1) as server,
        joined(server.endpoint, prefetch_steps=3) as rank,
    ):
        push(server.endpoint, random_samples(5, 4 * BATCH))
        found = []
        for _ in range(4):
            step = rank.next_step(20)
            cut_connections(server.endpoint)
            found += content_of(step)
            assert step is not None
            step.commit()
        eventually(lambda: rank.statistics().reconnects >= 1, "it has connected again")
    ids = [name for header, _ in found for name in header.sample_ids]
    assert len(ids) == len(set(ids)) == 4 * BATCH


def test_a_step_may_be_written_to_and_iterated_again(tmp_path: Path) -> None:
    samples = random_samples(6, least=LARGE)
    with serving(tmp_path, micro_batch_size=1) as server:
        push(server.endpoint, samples)
        with (
            warnings.catch_warnings(),
            MicroBatchStream(server.endpoint, dp_rank=0, dp_size=1) as stream,
        ):
            warnings.simplefilter("error")
            step = next(stream)
            seen = []
            for _ in range(2):
                sums = []
                for micro_batch in step:
                    sums.append(int(micro_batch.input_ids.sum()))
                    micro_batch.input_ids.zero_()
                seen.append(sums)
            step.commit()
    assert seen[0] == seen[1]
    assert sorted(seen[0]) == sorted(int(fields["input_ids"].sum()) for fields in samples)


def test_the_last_pass_may_be_written_to_where_it_lies(tmp_path: Path) -> None:
    with serving(tmp_path, micro_batch_size=1) as server:
        push(server.endpoint, random_samples(7, least=LARGE))
        with MicroBatchStream(server.endpoint, dp_rank=0, dp_size=1, epochs=1) as stream:
            step = next(stream)
            for micro_batch in step:
                assert not torch.all(micro_batch.input_ids == 0)
                micro_batch.input_ids.zero_()
                assert torch.all(micro_batch.input_ids == 0)
            step.commit()


def segments_in(pid: int | str) -> int:
    """Mappings and descriptors of segments that a process has."""
    mapped = Path(f"/proc/{pid}/maps").read_text().count(SEGMENT)
    return mapped + sum(SEGMENT in link for _, link in open_files(pid))


RANK = """
import sys
from rollout_workers.rank.client import RankClient
from rollout_workers.rank.shared_memory.gatherer import MAPPED_BYTES
rank = RankClient(sys.argv[1], dp_rank=0, dp_size=1, prefetch_steps=2)
step = rank.next_step(20)
held = list(step)
print(len(held), flush=True)
sys.stdin.read()
"""


@contextmanager
def process(script: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A Python process with pipes; killed at the end."""
    child = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )  # fmt: skip
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("size", [1, 8])
def test_nothing_stays_of_a_rank_that_is_killed(tmp_path: Path, size: int) -> None:
    with serving(tmp_path, micro_batch_size=size) as server:
        push(server.endpoint, random_samples(8, least=LARGE // size))
        with process(RANK, server.endpoint) as rank:
            assert rank.stdout is not None
            assert int(rank.stdout.readline()) == BATCH // size
            rank.send_signal(signal.SIGKILL)
            rank.wait()
        with joined(server.endpoint) as again:
            step = again.next_step(20)
            assert step is not None
            content_of(step)
            step.commit()
            server.await_scrape(lambda now: now["samples_in_flight"] == 0, "it is committed")
        eventually(lambda: segments_in(server.pid) == 0, "no segment is left")


def test_nothing_stays_of_a_dispatcher_that_is_killed(tmp_path: Path) -> None:
    with serving(tmp_path, micro_batch_size=1) as server:
        push(server.endpoint, random_samples(9, least=LARGE))
        with joined(server.endpoint) as rank:
            step = rank.next_step(20)
            assert step is not None
            held = [received.payload for received in step]
            server.send_signal(signal.SIGKILL)
            server.wait()
            assert segments_in("self") > 0
            assert len({bytes(payload) for payload in held}) == BATCH  # still to be read
    del held, step, rank
    gc.collect()
    assert segments_in("self") == 0


SHORT_OF_FILES = """
import contextlib, os, resource, sys
from rollout_workers.rank.client import RankClient
from rollout_workers.rank.shared_memory.gatherer import MAPPED_BYTES
rank = RankClient(sys.argv[1], dp_rank=0, dp_size=1)
used = max(map(int, os.listdir("/proc/self/fd")))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, 4096))
with contextlib.suppress(OSError):
    while True:  # until none is left
        os.dup(0)
print("none", flush=True)
sys.stdin.readline()
step = rank.next_step(20)
print(sum(received.payload.nbytes for received in step), rank.statistics().reconnects, flush=True)
step.commit()
rank.close()
"""


def test_a_rank_that_has_no_descriptor_left_is_sent_bytes(tmp_path: Path) -> None:
    samples = random_samples(10)
    with (
        serving(tmp_path) as server,
        process(SHORT_OF_FILES, server.endpoint) as rank,
    ):
        server.await_status(absent_ranks=[])
        assert rank.stdout is not None
        assert rank.stdout.readline() == "none\n"
        push(server.endpoint, samples)
        out, _ = rank.communicate("go\n", timeout=30)
        nbytes, reconnects = map(int, out.split())
        assert nbytes >= sum(fields["input_ids"].nbytes for fields in samples)
        assert reconnects == 1
