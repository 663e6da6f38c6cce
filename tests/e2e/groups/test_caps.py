"""Groups at the tightest caps: steps go on, the run ends, and every sample is accounted for."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout_dispatcher.errors import BufferFull
from tests.chaos.planted.dispatcher import SEGMENT_BYTES
from tests.e2e.groups.found import Found
from tests.e2e.groups.rollouts import (
    GROUP,
    Prompt,
    joined,
    prompts,
    shares,
    together,
    tokens_of,
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


def test_room_for_one_sample_makes_steps_of_one_sample(tmp_path: Path) -> None:
    mine = shares(4, 10, lambda _: 1)
    with in_use(tmp_path, ballast=BALLAST, buffer_bytes=f"{ONE}B", max_wait="20ms") as run:
        run.produce(together(run.books, run.endpoint, mine))
        found = run.finish()
    assert found.dropped == {}
    assert found.committed == run.books.accepted
    assert len(found.committed) == 40
    found.assert_accounted(run.books)
    assert {len(names) for names in found.steps.values()} == {1}
    assert found.metrics["partial_steps_total"] == 40
    assert max(look["buffer_bytes"] for look in run.looks) <= ONE


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


def test_room_for_one_batch_and_a_journal_give_nothing_up(tmp_path: Path) -> None:
    mine = shares(4, 16)
    with in_use(
        tmp_path,
        ballast=BALLAST,
        buffer_bytes=f"{ONE_BATCH}B",
        max_wait="20ms",
        module="tests.e2e.groups.small_journal",
        journal_dir=tmp_path / "journal",
    ) as run:
        run.produce(together(run.books, run.endpoint, mine))
        found = run.finish()
    assert run.books.refused == {}
    assert found.dropped == {}
    assert found.committed == run.books.accepted
    found.assert_accounted(run.books)
    assert run.books.most_begun > BATCH, "beginnings alone were more than there is room for"
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


@pytest.mark.parametrize("samples", [1, BATCH], ids=["a-sample", "a-batch"])
def test_a_cap_on_tokens_neither_stops_nor_shrinks_steps(tmp_path: Path, samples: int) -> None:
    mine = shares(4, 16)
    lengths = sorted(len(tokens_of(name)) for share in mine for p in share for name in p.samples)
    with in_use(tmp_path, buffer_tokens=sum(lengths[-samples:])) as run:
        run.produce(together(run.books, run.endpoint, mine))
        found = run.finish()
    found.assert_all_committed(run.books, mine)
    assert run.books.most_begun > BATCH


# -- pushes that time out ---------------------------------------------------------------------


def test_a_push_that_timed_out_is_safe_to_push_again(tmp_path: Path) -> None:
    mine, told = prompts("w", 12), list[BufferFull]()

    async def push() -> None:
        async with joined(run.endpoint) as producer:
            for prompt in mine:
                for member in range(GROUP):
                    await patiently(producer, prompt, member)
            await producer.end_stream()

    async def patiently(producer: Any, prompt: Prompt, member: int) -> None:
        while True:
            try:
                await run.books.push(producer, prompt, member, timeout=0.5)
                return
            except BufferFull as error:
                told.append(error)
                if len(told) == 2:
                    await asyncio.to_thread(run.join)

    with in_use(tmp_path, ranks=False) as run:
        run.produce(push())
        found = run.finish()
    assert len(told) >= 2
    assert told[0].cap == "samples"
    words = " ".join([str(told[0]), *getattr(told[0], "__notes__", ())])
    assert "rank" in words, f"says for whom it waits: {words}"
    found.assert_all_committed(run.books, [mine])


def test_groups_whose_pushes_timed_out_for_good_leave_nothing_behind(tmp_path: Path) -> None:
    """The first members of each are held when time is up, the others withdrawn."""
    mine, given_up = shares(2, 8), prompts("late", 4)
    outcomes, over = list[object](), asyncio.Event()

    async def late() -> None:
        async with joined(run.endpoint) as producer:
            await run.until(lambda now: now["pushes_held"] > 0, "the others wait for room")
            members = [(prompt, member) for member in range(GROUP) for prompt in given_up]
            outcomes.extend(
                await asyncio.gather(
                    *(run.books.push(producer, *member, timeout=0.5) for member in members),
                    return_exceptions=True,
                )
            )
            await asyncio.to_thread(run.join)
            wanted = {name for share in mine for prompt in share for name in prompt.samples}
            await run.until(lambda _: wanted <= run.books.accepted, "the others have pushed all")
            await run.until(settled, "nothing waits for room or for members")
            over.set()

    def settled(now: dict[str, float]) -> bool:
        return now["pushes_held"] == now["open_groups"] == 0

    with in_use(tmp_path, ranks=False) as run:
        run.produce(late(), together(run.books, run.endpoint, mine, stay=over))
        found = run.finish()
    assert len(outcomes) == 4 * GROUP
    assert all(isinstance(one, BufferFull | TimeoutError) for one in outcomes), outcomes
    assert any(isinstance(one, BufferFull) for one in outcomes), "held, with a cap that is named"
    doubtful = {name for prompt in given_up for name in prompt.samples}
    found.assert_accounted(run.books, unheard=doubtful)
    assert found.dropped.keys() <= {"incomplete-group"}
    for prompt in given_up:
        assert len(found.committed & set(prompt.samples)) in (0, GROUP), prompt
    assert run.books.accepted <= found.committed


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
