"""What the dispatcher promised when the histories were recorded it promises now."""

from typing import Any

import pytest

from tests.histories import core, service
from tests.histories.golden import CORE, SERVICE, differences, kept

PARTS = 10


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(PARTS))
def test_the_core_does_what_it_did(part: int) -> None:
    histories = kept("core")
    assert len(histories) == len(CORE)
    assert not [*differences("core", histories[part::PARTS], core.replay)]


@pytest.mark.e2e
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
def test_the_service_does_what_it_did(part: int) -> None:
    histories = kept("service")
    assert len(histories) == len(SERVICE)
    assert not [*differences("service", histories[part::PARTS], service.replay)]


def test_a_difference_is_seen() -> None:
    history: dict[str, Any] = kept("core")[0]
    at, (event, then) = next(
        (at, each) for at, each in enumerate(history["events"]) if each[1].get("books")
    )
    history["events"][at] = [event, then | {"books": {"buffered": 10**6}}]
    (found,) = differences("core", [history], core.replay)
    assert f"event {at}" in found
    assert "books buffered was 1000000, is" in found
