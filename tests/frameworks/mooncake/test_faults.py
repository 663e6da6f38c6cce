"""Payloads in a Mooncake Store under faults: its master and its memory are killed too."""

from pathlib import Path

import pytest

from tests.support.engine_faults import survives

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_nothing_is_lost_but_what_was_killed_had_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    survives("mooncake", tmp_path)
