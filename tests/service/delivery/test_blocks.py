"""A micro-batch of several ranks: each of them gets it, and its samples count once."""

import os
from pathlib import Path
from signal import SIGKILL
from typing import Any

import numpy as np
import pytest

from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.slices import Slicing
from tests.service.conftest import Serve
from tests.support.client import HeldStep, Producer, Rank

SPLIT: dict[str, Any] = {
    "dp_size": 4, "global_batch_size": 6, "micro_batch_tokens": 64, "max_split": 4, "window": 1,
    "cost": "tokens",
}  # fmt: skip
#: 200 tokens have room on four ranks alone.
TOKENS = [200, 100, 20, 20, 20, 20]


def joined(endpoint: str, slicing: Slicing | None = None) -> list[Rank]:
    """Four ranks that wait for their first step."""
    hello: dict[str, Any] = {"max_split": 4, "slicing": slicing}
    first = Rank(endpoint, 0, 4, **hello)
    others = [Rank(endpoint, at, 4, **hello, generation=first.generation) for at in (1, 2, 3)]
    for rank in (first, *others):
        rank.demand(taken=-1)
    return [first, *others]


def heads(step: HeldStep) -> list[m.MicroBatch]:
    return [head for head, _ in step.micro_batches]


def test_every_rank_of_a_block_gets_its_samples_which_count_once(
    serve: Serve, tmp_path: Path
) -> None:
    settings = {**SPLIT, "journal_dir": tmp_path / "journal"}
    server = serve(**settings)
    Producer(server.endpoint, "p").push(TOKENS)
    ranks = joined(server.endpoint)
    steps = [rank.hold(0) for rank in ranks]
    header = steps[0].header
    assert all(step.header == header for step in steps)
    assert (header.num_samples, header.tokens) == (6, 380)
    owned = list[str]()
    sizes = set[int]()
    for index in range(header.num_micro_batches):
        for dp_rank, step in enumerate(steps):
            head, payload = step.micro_batches[index]
            size = head.cp_size or 1
            sizes.add(size)
            assert head.cp_rank == dp_rank % size
            if head.cp_rank == 0:
                owned += [] if head.is_filler else head.sample_ids
            else:
                first, same = steps[dp_rank - head.cp_rank].micro_batches[index]
                assert (head.sample_ids, payload) == (first.sample_ids, same)
                assert not head.is_filler
    assert {1, 4} <= sizes
    assert len(owned) == len(set(owned)) == 6
    server.await_scrape(lambda seen: seen["samples_in_flight"] == 6, "six samples in flight")
    os.kill(server.pid, SIGKILL)
    server = serve(**settings)
    repeated = [rank.hold(0) for rank in joined(server.endpoint)]
    assert [step.header for step in repeated] == [header] * 4
    assert [step.micro_batches for step in repeated] == [step.micro_batches for step in steps]


def test_a_rank_that_says_how_it_slices_gets_its_slices_alone_and_the_same_again(
    serve: Serve, tmp_path: Path
) -> None:
    settings = {**SPLIT, "journal_dir": tmp_path / "journal", "sample_length_multiple": 4}
    server = serve(**settings)
    Producer(server.endpoint, "p").push(TOKENS)
    steps = [rank.hold(0) for rank in joined(server.endpoint, Slicing.ZIGZAG)]
    sliced = [
        (head, payload)
        for step in steps
        for head, payload in step.micro_batches
        if head.cp_size == 4 and head.tokens[:1] == [200]
    ]
    assert [head.ranges and head.ranges[0] for head, _ in sliced] == [
        [(0, 29), (196, 200)], [(28, 57), (168, 197)], [(56, 85), (140, 169)], [(84, 141)],
    ]  # fmt: skip
    for head, payload in sliced:
        assert len(head.tokens) == 1
        ids = np.frombuffer(payload, np.int64, head.tokens_held[0])
        assert head.ranges is not None
        whole = np.concatenate([np.arange(start, stop) for start, stop in head.ranges[0]])
        assert (ids - ids[0] == whole - whole[0]).all()
    os.kill(server.pid, SIGKILL)
    server = serve(**settings)
    repeated = [rank.hold(0) for rank in joined(server.endpoint, Slicing.ZIGZAG)]
    assert [step.header for step in repeated] == [step.header for step in steps]
    assert [step.micro_batches for step in repeated] == [step.micro_batches for step in steps]


def test_a_rank_that_takes_part_in_no_block_is_refused(serve: Serve) -> None:
    server = serve(**SPLIT)
    with pytest.raises(AssertionError, match="max_split=4"):
        Rank(server.endpoint, 0, 4, max_split=2)
