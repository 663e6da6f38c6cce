"""Payloads by reference between real processes: trained as ever, once each, and nothing is left."""

import signal
import subprocess
import sys
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_dispatcher.payload import Reference
from rollout_dispatcher.sample import DType, Field, Schema
from rollout_dispatcher.spans import join
from rollout_workers import RankClient, ReferencedSample, RolloutProducer, RolloutSample
from rollout_workers.producer.encode import Encoder
from rollout_workers.rank.held_steps import Received
from rollout_workers.rank.payload import arrays
from rollout_workers.stores.file import FileStore
from tests.support.addresses import free_address
from tests.support.server import ServeProcess, eventually

pytestmark = pytest.mark.e2e

RANKS, SAMPLES, INLINE_LIMIT = 2, 64, 2048
#: Bytes a token: what is 100 tokens long, and longer, goes into the store.
WIDTH = 3
PATIENCE_S = 60


@pytest.fixture
def root(tmp_path: Path) -> Path:
    found = tmp_path / "payloads"
    found.mkdir()
    return found


def serve(folder: Path, root: Path | None, **options: Any) -> ServeProcess:
    """With payload stores if there is a root."""
    folder.mkdir(exist_ok=True)
    common: dict[str, Any] = {
        "dp_size": RANKS, "global_batch_size": 8, "micro_batch_tokens": 512,
        "journal_dir": folder / "journal",
        "sample_retention": "commit",
    }  # fmt: skip
    if root is not None:
        common |= {"payload_stores": f"file://{root}", "inline_limit": f"{INLINE_LIMIT}B"}
    return ServeProcess(folder, warm=True, **common | options)


def make_sample(number: int) -> RolloutSample:
    """One of its own length and values."""
    rng = np.random.default_rng(number)
    tokens = int(rng.integers(1, 200))
    fields = {
        "input_ids": np.arange(tokens) + number,
        "logprobs": rng.random((tokens, WIDTH), np.float32),
        "reward": float(number),
        "env": "a text" * number,
    }
    return RolloutSample(fields, sample_id=f"s{number}")


def is_large(number: int) -> bool:
    return Encoder().encode([make_sample(number)])[0].nbytes >= INLINE_LIMIT


def push(address: str, first: int = 0, count: int = SAMPLES) -> None:
    with RolloutProducer(address) as producer:
        for number in range(first, first + count, 4):
            producer.push_many([make_sample(number + at) for at in range(4)])
        producer.end_stream()


def join_ranks(address: str) -> list[RankClient]:
    first = RankClient(address, dp_rank=0, dp_size=RANKS)
    return [first, RankClient(address, dp_rank=1, dp_size=RANKS, generation=first.generation)]


def train(client: RankClient) -> list[Received]:
    """Everything that a rank was given."""
    found: list[Received] = []
    with client:
        while (step := client.next_step(PATIENCE_S)) is not None:
            found += step
            step.commit()
    return found


def check_content(found: list[Received], expected: Collection[int] = range(SAMPLES)) -> None:
    """Each sample came once, as it was pushed, and no other did."""
    seen = list[int]()
    for batch in found:
        if batch.header.is_filler:
            continue
        values, at = arrays(batch.payload, batch.blocks), 0
        for index, (name, tokens) in enumerate(
            zip(batch.header.sample_ids, batch.header.tokens, strict=True)
        ):
            number = int(name.removeprefix("s"))
            pushed = make_sample(number).fields
            for field in ("input_ids", "logprobs"):
                assert np.array_equal(values[field][at : at + tokens], pushed[field])
            assert values["reward"][index] == pushed["reward"]
            at += tokens
            seen.append(number)
    assert sorted(seen) == sorted(expected)


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def test_ranks_get_what_producers_put_and_nothing_is_left(tmp_path: Path, root: Path) -> None:
    address = free_address()
    with serve(tmp_path, root, listen=address) as server, ThreadPoolExecutor() as threads:
        training = [threads.submit(train, client) for client in join_ranks(address)]
        push(address)
        check_content([batch for rank in training for batch in rank.result(PATIENCE_S)])
        assert server.wait() == 0
    assert files(root) == []


def test_a_killed_dispatcher_goes_on_with_what_lies_in_the_store(
    tmp_path: Path, root: Path
) -> None:
    address = free_address()
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        server = stack.enter_context(serve(tmp_path, root, listen=address))
        training = [threads.submit(train, client) for client in join_ranks(address)]
        pushing = threads.submit(push, address)
        eventually(lambda: server.status()["steps_committed"] >= 3, "3 steps are committed")
        server.send_signal(signal.SIGKILL)
        server.wait()
        server = stack.enter_context(serve(tmp_path, root, listen=address))
        pushing.result(PATIENCE_S)
        check_content([batch for rank in training for batch in rank.result(PATIENCE_S)])
        assert server.wait() == 0
    assert files(root) == []


#: A producer that dies when its object is there, and before anybody has heard of it.
KILLED_BEHIND_PUT = """
import os, signal, sys
import numpy as np
from rollout_workers import RolloutProducer
from rollout_workers.stores.file import FileStore

def put(self, key, spans, whole=FileStore.put):
    whole(self, key, spans)
    os.kill(os.getpid(), signal.SIGKILL)

FileStore.put = put
RolloutProducer(sys.argv[1]).push({"input_ids": np.arange(10_000)})
"""
#: A trainer that dies while it trains on a step.
KILLED_IN_A_STEP = """
import os, signal, sys
from rollout_workers import RankClient

step = RankClient(sys.argv[1], dp_rank=0, dp_size=1).next_step(60)
print(len(list(step)), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def run_to_its_death(script: str, address: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, address], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stdout


def test_what_a_killed_producer_had_put_and_not_pushed_goes_when_it_is_over(
    tmp_path: Path, root: Path
) -> None:
    address = free_address()
    with serve(tmp_path, root, listen=address) as server, ThreadPoolExecutor() as threads:
        run_to_its_death(KILLED_BEHIND_PUT, address)
        assert len(files(root)) == 1
        training = [threads.submit(train, client) for client in join_ranks(address)]
        push(address)
        check_content([batch for rank in training for batch in rank.result(PATIENCE_S)])
        assert server.wait() == 0
    assert files(root) == []


def test_a_killed_trainers_step_is_fetched_again(tmp_path: Path, root: Path) -> None:
    address = free_address()
    options = {"listen": address, "dp_size": 1, "global_batch_size": 16}
    with serve(tmp_path, root, **options) as server:
        push(address, count=16)
        assert int(run_to_its_death(KILLED_IN_A_STEP, address)) > 0
        check_content(train(RankClient(address, dp_rank=0, dp_size=1)), range(16))
        assert server.wait() == 0
    assert files(root) == []


def test_what_is_gone_from_the_store_is_dropped_and_all_else_is_trained(
    tmp_path: Path, root: Path
) -> None:
    address = free_address()
    options = {"listen": address, "dp_size": 1, "global_batch_size": 16}
    with serve(tmp_path, root, **options) as server:
        push(address, count=16)
        pushes = [int(path.name) for path in files(root)[:2]]
        for path in files(root)[:2]:
            path.unlink()
        gone = {at for first in pushes for at in range(first, first + 4) if is_large(at)}
        check_content(train(RankClient(address, dp_rank=0, dp_size=1)), {*range(16)} - gone)
        assert server.wait() == 0
        assert f": {len(gone)} are dropped" in server.log()
    assert files(root) == []


def test_what_somebody_has_put_himself_is_trained_and_released(tmp_path: Path, root: Path) -> None:
    address = free_address()
    schema = Schema((Field("input_ids", DType.INT64), Field("loss_mask", DType.BOOL)))
    spans = [join([np.arange(n).tobytes(), bytes([1] * n)]) for n in (5, 9)]
    stored = FileStore.open(f"file://{root}").put("theirs/1", spans)
    samples = [
        ReferencedSample(Reference(stored, 0, len(spans[0])), schema, 5, 4),
        ReferencedSample(Reference(stored, len(spans[0]), len(spans[1])), schema, 9, 8),
    ]
    with serve(tmp_path, root, listen=address, dp_size=1) as server:
        with RolloutProducer(address) as producer:
            assert list(map(str, producer.push_references(samples))) == ["accepted"] * 2
            producer.end_stream()
        found = train(RankClient(address, dp_rank=0, dp_size=1))
        assert server.wait() == 0
    values = [arrays(batch.payload, batch.blocks)["input_ids"] for batch in found]
    assert sorted(np.concatenate(values).tolist()) == sorted([*range(5), *range(9)])
    assert files(root) == []
