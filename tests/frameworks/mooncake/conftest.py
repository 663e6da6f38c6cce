"""One Mooncake Store for all tests."""

from collections.abc import Iterator

import pytest

from tests.support.mooncake import mooncake_store


@pytest.fixture(scope="session")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address."""
    with mooncake_store(tmp_path_factory.mktemp("mooncake")) as address:
        yield address
