"""How a test says what an integration takes."""

from collections.abc import Callable
from dataclasses import asdict

import pytest

from tests.frameworks.report import Integration


@pytest.fixture
def integrated(record_property: Callable[[str, object], None]) -> Callable[[Integration], None]:
    """Puts the figures of an integration into the run's report."""

    def record(found: Integration) -> None:
        for name, value in asdict(found).items():
            record_property(name, value)

    return record
