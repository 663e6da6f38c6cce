"""What every payload store has to do, done by files; other engines in tests/frameworks."""

from pathlib import Path

import pytest

from tests.support.payload_stores import PayloadStoreTests


class TestFiles(PayloadStoreTests):
    @pytest.fixture
    def address(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}"
