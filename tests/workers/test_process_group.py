"""Where rank and size come from, and how one generation reaches all ranks."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from rollout_dispatcher.errors import ConfigError, RankRefused
from rollout_workers.process_group import Place, find_place, share_failure, share_generation


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_what_is_given_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert find_place(None, None, None) == Place(3, 4)
    assert find_place(0, 2, None) == Place(0, 2)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_an_impossible_place_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ConfigError, match="at least 0 and below the size"):
        find_place(rank, size, None)


def test_a_broken_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE='two'"):
        find_place(None, None, None)


@pytest.fixture
def lonely_group(tmp_path: Path) -> Iterator[None]:
    """A process group of one: what rank 0 broadcasts it also keeps."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_sharing_is_a_collective_of_the_group(lonely_group: None) -> None:
    share_generation(17, None)
    share_failure(RankRefused("x" * 10_000), None)  # cut, and so of the size the others expect


TWO_RANKS = """
import sys
import torch.distributed as dist
from rollout_dispatcher.errors import RankRefused
from rollout_workers.process_group import hear_generation, share_failure, share_generation

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
if rank == 0:
    share_generation(17, None)
    share_failure(RankRefused("of the wrong size"), None)
else:
    assert hear_generation(None) == 17
    try:
        hear_generation(None)
    except RankRefused as error:
        assert str(error) == "DP rank 0 could not join: of the wrong size", error
    else:
        raise AssertionError("the failure of rank 0 was not heard")
dist.destroy_process_group()
"""


def test_a_generation_and_a_failure_reach_the_other_rank(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", TWO_RANKS, str(rank), str(tmp_path / "store")])
        for rank in range(2)
    ]
    try:
        assert [rank.wait(60) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
