"""Groups at the tightest caps: steps go on, the run ends, and every sample is accounted for."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.planted.dispatcher import SEGMENT_BYTES
from tests.e2e.groups.found import Found
from tests.e2e.groups.rollouts import (
    Prompt,
    shares,
    together,
)
from tests.e2e.groups.run import BATCH, Run, in_use
from tests.support.disks import small_disk

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(100)]

#: What a sample is larger by, so that all are about as large: a cap of one is a cap of few tokens.
BALLAST = 16 * 1024
#: Room for the largest sample, and not for two.
ONE = BALLAST + 5 * 1024
#: Room for any batch, and for hardly more.
ONE_BATCH = BATCH * ONE


def assert_accounted_in_whole_groups(found: Found, run: Run, mine: list[list[Prompt]]) -> None:
    """Samples are committed, or dropped for want of room with all of their group, or refused."""
    found.assert_accounted(run.books)
    assert found.dropped.keys() <= {"no-room"}
    wanted = {name for share in mine for prompt in share for name in prompt.samples}
    assert run.books.accepted | run.books.refused.keys() == wanted
    for prompt in (prompt for share in mine for prompt in share):
        committed = found.committed & set(prompt.samples)
        assert len(committed) in (0, prompt.size), prompt


# -- bytes ------------------------------------------------------------------------------------


def test_room_for_one_batch_and_no_journal_gives_up_whole_groups_and_goes_on(
    tmp_path: Path,
) -> None:
    mine = shares(4, 16)
    with in_use(tmp_path, ballast=BALLAST, buffer_bytes=f"{ONE_BATCH}B", max_wait="20ms") as run:
        run.produce(together(run.books, run.endpoint, mine))
        found = run.finish()
    assert_accounted_in_whole_groups(found, run, mine)
    assert found.dropped["no-room"] > 0, "beginnings alone were more than there is room for"
    assert run.books.refused, "whose group was given up is told so when it goes on"
    assert len(found.committed) >= 2 * BATCH
    assert max(look["buffer_bytes"] for look in run.looks) <= ONE_BATCH


@pytest.mark.parametrize("journal", [True, False], ids=["journal", "memory"])
def test_room_for_one_sample_and_groups_of_four(tmp_path: Path, journal: bool) -> None:
    """A group is refused with a sentence, or dropped, or trained on: never waited for."""
    mine = shares(2, 6, lambda _: 4)
    place: dict[str, Any] = {
        "module": "tests.e2e.groups.small_journal",
        "journal_dir": tmp_path / "journal",
    }
    with in_use(
        tmp_path,
        ballast=BALLAST,
        buffer_bytes=f"{ONE}B",
        max_wait="20ms",
        **(place if journal else {}),
    ) as run:
        run.produce(together(run.books, run.endpoint, mine))
        found = run.finish()
    assert_accounted_in_whole_groups(found, run, mine)
    if journal:
        assert found.dropped == {}
    assert all("--buffer-bytes" in why for why in run.books.refused.values())


# -- tokens -----------------------------------------------------------------------------------


# -- pushes that time out ---------------------------------------------------------------------


# -- the journal's disk -----------------------------------------------------------------------

DISK_MB = 40  # of which the index takes 32


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", megabytes=DISK_MB) as disk:
        yield disk


def test_a_journal_whose_disk_is_full_of_beginnings_goes_on(tmp_path: Path, disk: Path) -> None:
    mine = shares(4, 8)

    async def join_once_it_is_full() -> None:
        await run.until(lambda _: shutil.disk_usage(disk).free < SEGMENT_BYTES, "the disk is full")
        await asyncio.to_thread(run.join)

    with in_use(
        tmp_path,
        ranks=False,
        ballast=24 * BALLAST,  # the disk is full before the buffer
        module="tests.e2e.groups.small_journal",
        journal_dir=disk / "journal",
    ) as run:
        run.produce(join_once_it_is_full(), together(run.books, run.endpoint, mine))
        found = run.finish()
    assert_accounted_in_whole_groups(found, run, mine)
    assert len(found.committed) >= 2 * BATCH
