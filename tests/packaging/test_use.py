"""What `make smoke` does with an installation works with this checkout."""

from pathlib import Path

import pytest

from tests.packaging import use


@pytest.mark.e2e
@pytest.mark.parametrize("journal", [False, True])
def test_samples_go_all_the_way(journal: bool, tmp_path: Path) -> None:
    use.run(tmp_path, journal)
