"""Ranks without sockets."""

from collections.abc import AsyncIterator

import pytest

from tests.service.wires import TwoRanks


@pytest.fixture
async def scene() -> AsyncIterator[TwoRanks]:
    scene = TwoRanks()
    yield scene
    scene.router.close()
