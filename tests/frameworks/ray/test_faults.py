"""Payloads in Ray's object store under faults: its holder is killed too, and stopped."""

from pathlib import Path

import pytest

from tests.support.engine_faults import survives

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_nothing_is_lost_but_what_the_killed_holder_had_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    survives("ray", tmp_path)
