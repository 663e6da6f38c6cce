"""Training on meshes: every rank of a model replica sees the same, and gradients are one process's.

Real torchrun ranks over gloo, four and eight of them, against one process on the same samples; with
some shapes the samples lie in a payload store, from which every rank of a replica fetches them.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.harness import finish, running
from tests.support.server import serve
from tests.support.torchrun import torchrun_command
from tests.workers.support.train_replicas import SHAPES
from tests.workers.test_gradient import (
    SERVE,
    TOLERANCE,
    push_all,
    reference,
    rollouts,
    samples_of,
)

RUN = "token-mean"
#: Ranks, and the shapes of meshes that they train on one after the other.
STARTS = {4: ("tp", "hsdp"), 8: ("cp", "pp")}
#: Ranks of each model replica, by shape and DP rank; its DP leader first.
REPLICAS = {
    "tp": ((0, 1), (2, 3)),
    "hsdp": ((0,), (1,), (2,), (3,)),
    "cp": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "pp": ((0, 1, 4, 5), (2, 3, 6, 7)),
}
#: Shapes whose samples come by reference: each rank fetches some, and gets the others.
REFERENCED, INLINE_LIMIT = {"tp", "pp"}, 256
Found = dict[str, list[dict[str, Any]]]


def trained_by(ranks: int, directory: Path) -> Found:
    """What every rank saw and ended with, by shape."""
    trainer = str(Path(__file__).parent.parent / "support" / "train_replicas.py")
    command = [*torchrun_command(ranks, directory), trainer]
    with ExitStack() as stack:
        endpoints = {
            shape: stack.enter_context(
                serve(
                    directory / shape,
                    dp_size=len(REPLICAS[shape]),
                    **SERVE,
                    **(references(directory / f"{shape}-store") if shape in REFERENCED else {}),
                )
            )
            for shape in STARTS[ranks]
        }
        pool = stack.enter_context(ThreadPoolExecutor())
        pushing = [pool.submit(push_all, RUN, endpoint) for endpoint in endpoints.values()]
        runs = [f"{shape}={endpoint}" for shape, endpoint in endpoints.items()]
        with running(*command, str(directory), *runs) as process:
            finish(process)
        for push in pushing:
            push.result(30)
    return {
        shape: [
            json.loads((directory / f"{shape}-{rank}.json").read_text()) for rank in range(ranks)
        ]
        for shape in STARTS[ranks]
    }


def references(folder: Path) -> dict[str, object]:
    """Options with which samples of the limit and more lie in a store of the test's own."""
    (folder / "payloads").mkdir(parents=True)
    return {
        "payload_stores": f"file://{folder / 'payloads'}",
        "inline_limit": f"{INLINE_LIMIT}B",
        "journal_dir": folder / "journal",
        "sample_retention": "commit",
    }


def is_inline(tokens: int) -> bool:
    """Whether a sample of so many tokens, an id and a mask's value each, is below the limit."""
    return 8 * tokens + -(-tokens // 8) * 8 < INLINE_LIMIT


class Trained:
    """By shape, what every rank saw and ended with; a start is made when first asked for."""

    def __init__(self, directories: pytest.TempPathFactory) -> None:
        self._directories = directories
        self._found: Found = {}

    def __getitem__(self, shape: str) -> list[dict[str, Any]]:
        if shape not in self._found:
            (ranks,) = (ranks for ranks, shapes in STARTS.items() if shape in shapes)
            self._found |= trained_by(ranks, self._directories.mktemp(f"ranks{ranks}"))
        return self._found[shape]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory)


@pytest.mark.e2e
@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_equal_those_of_one_process(trained: Trained, shape: str) -> None:
    leaders = [trained[shape][members[0]] for members in REPLICAS[shape]]
    expected = reference(leaders, RUN)
    for rank in trained[shape]:
        for name, parameters in rank["parameters"].items():
            worst = np.abs(np.subtract(parameters, expected[name])).max()
            assert worst <= TOLERANCE, f"{name} is off by {worst}"


@pytest.mark.e2e
@pytest.mark.parametrize("shape", SHAPES)
def test_a_replica_sees_the_same_and_each_sample_is_trained_once(
    trained: Trained, shape: str
) -> None:
    ranks = trained[shape]
    for members in REPLICAS[shape]:
        views = [ranks[member]["steps"] for member in members]
        assert all(view == views[0] for view in views)
    plans = [[(step["number"], step["digest"]) for step in rank["steps"]] for rank in ranks]
    assert all(plan == plans[0] for plan in plans)
    leaders = [ranks[members[0]] for members in REPLICAS[shape]]
    seen = [name for step in range(len(plans[0])) for name in samples_of(leaders, step)]
    assert sorted(seen) == sorted(rollouts(RUN))


@pytest.mark.e2e
@pytest.mark.parametrize("shape", SHAPES)
def test_every_rank_stands_at_the_same_step(trained: Trained, shape: str) -> None:
    assert len({json.dumps(rank["state"]) for rank in trained[shape]}) == 1
    assert {rank["committed"] for rank in trained[shape]} == {len(trained[shape][0]["steps"])}


@pytest.mark.e2e
@pytest.mark.parametrize("shape", ["tp", "cp", "pp"])
def test_a_step_that_is_iterated_again_is_not_sent_again(trained: Trained, shape: str) -> None:
    """All that a peer receives are the payloads of the samples, once: 9 bytes a token."""
    tokens = {name: len(sample.fields["input_ids"]) for name, sample in rollouts(RUN).items()}
    for members in REPLICAS[shape]:
        for peer in members[1:]:
            batches = [b for step in trained[shape][peer]["steps"] for b in step["batches"]]
            sizes = [[1] if b["filler"] else [tokens[name] for name in b["ids"]] for b in batches]
            if shape in REFERENCED:  # the others each peer has fetched for itself
                sizes = [[count for count in size if is_inline(count)] for size in sizes]
            # 8 bytes an id, 1 a mask's, of all samples end to end and then aligned.
            expected = sum(8 * sum(size) + -(-sum(size) // 8) * 8 for size in sizes)
            assert trained[shape][peer]["bytes"][-1] == expected
