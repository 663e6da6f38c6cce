"""Where rank and size come from, and how one generation reaches all ranks."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rollout_dispatcher.errors import ConfigError
from rollout_workers.process_group import Place, find_place, instances


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


TWO_RANKS = """
import sys
import torch.distributed as dist
from rollout_dispatcher.errors import RankRefused
from rollout_workers.process_group import receive_generation, share_failure, share_generation

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
if rank == 0:
    share_generation(17, None)
    share_failure(RankRefused("of the wrong size" + "x" * 10_000), None)
else:
    assert receive_generation(None) == 17
    try:
        receive_generation(None)
    except RankRefused as error:
        assert str(error).startswith("DP rank 0 could not join: of the wrong sizexxx"), error
    else:
        raise AssertionError("the failure of rank 0 was not raised")
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


# -- objects of a class are found, and finding them harms no other thread


class Kind:
    """What is looked for."""


class Below(Kind):
    """And what is one of them."""


class Proxy:
    """Says that it is one, and does not like to be asked."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Never to be read."""
        raise AssertionError("asked")


def test_objects_of_a_class_and_of_those_below_are_found() -> None:
    mine = [Kind(), Below(), Proxy()]
    found = instances([Kind])
    assert sorted(map(id, found)) == sorted(map(id, mine[:2]))


def test_another_thread_may_fill_tuples_meanwhile() -> None:
    many = [[number] for number in range(100_000)]  # so that it takes longer than a thread's turn
    done, filled = threading.Event(), list[BaseException | int]()

    def fill() -> None:
        while not done.is_set():
            try:
                filled.append(len(tuple(number for number in range(50))))
            except SystemError as error:
                filled.append(error)

    filler = threading.Thread(target=fill)
    filler.start()
    try:
        for _ in range(50):
            instances([Kind])
    finally:
        done.set()
        filler.join()
    assert set(filled) == {50}
    assert len(many) == 100_000
