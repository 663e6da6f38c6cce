"""A disk that can be filled."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.disks import small_disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    with small_disk(tmp_path / "disk", megabytes=2) as disk:
        yield disk
