"""Claims about pack_local, by three ranks of torchrun, the first two a group of their own."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import finish, running
from tests.workers.support.pack_locally import LENGTHS

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank wrote down."""
    directory = tmp_path_factory.mktemp("packing")
    script = str(Path(__file__).parent / "support" / "pack_locally.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--log-dir", str(directory / "torchrun"), f"--nproc-per-node={len(LENGTHS)}"]
    with running(*command, script, str(directory)) as process:
        finish(process)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(len(LENGTHS))]


def test_every_rank_has_as_many_micro_batches_as_the_one_that_needs_most(
    results: list[dict[str, Any]],
) -> None:
    assert [rank["all"] for rank in results] == [
        [[0], [1], [2], [3]],
        [[0], [1], [], []],
        [[0], [], [], []],
    ]


def test_only_the_ranks_of_the_group_agree(results: list[dict[str, Any]]) -> None:
    assert [len(rank["pair"]) for rank in results] == [4, 4, 1]
    assert [len(rank["multiple"]) for rank in results] == [6, 6, 3]


def test_a_sample_that_is_too_long_is_an_error_on_every_rank_of_the_group(
    results: list[dict[str, Any]],
) -> None:
    assert results[0]["too long"][0] == "SampleTooLong"
    assert results[1]["too long"][0] == "PeerFailed"
    assert results[2]["too long"] == [[0]]
    assert [rank["wrong"][0] for rank in results[:2]] == ["UnequalPartitions", "PeerFailed"]


def test_where_a_rank_cannot_feed_fillers_all_of_them_raise(
    results: list[dict[str, Any]],
) -> None:
    kinds = ["PeerFailed", "UnequalPartitions", "UnequalPartitions"]
    assert [rank["full"][0] for rank in results] == kinds
    assert "1 samples or groups cannot fill 4 bins" in results[2]["full"][1]
    assert [rank["full pair"] for rank in results] == [[[0], [1]], [[0], [1]], [[0]]]


def test_after_an_error_the_ranks_are_still_in_step(results: list[dict[str, Any]]) -> None:
    assert [rank["after"] for rank in results] == [rank["all"] for rank in results]
