"""A dispatcher that is pushed far more than it may hold does not hold it."""

from pathlib import Path

import pytest

from tests.soak.soak import Load, soak

#: What its memory may grow by from its start; a sixth of what is pushed through it.
ROOM_BYTES = 96 << 20


@pytest.mark.e2e
@pytest.mark.parametrize("journal", [False, True], ids=["in memory", "journal"])
def test_memory_does_not_grow_with_what_went_through(journal: bool, tmp_path: Path) -> None:
    # Some 50 tokens a sample: 100 kB each, 600 MB in all, of which 20 MB may be buffered. What is
    # in open steps and what the heap keeps come on top.
    load = Load(
        6000, journal, producers=8, batch=128, ballast=2048, step_s=0.01, buffer_samples=192
    )
    looks = soak(tmp_path, load)
    growth = max(look.resident for look in looks) - looks[0].resident
    assert growth < ROOM_BYTES, [look.resident for look in looks]
    assert all(look.balanced for look in looks)
