"""A journal that an earlier build of this format has written is recovered to the same."""

import json
from pathlib import Path

import pytest

from tests.journal.kept import EXPECTED, JOURNALS, recovers, unpack


@pytest.mark.parametrize("number", JOURNALS)
def test_a_kept_journal_recovers_to_what_it_did(number: int, tmp_path: Path) -> None:
    expected = json.loads(EXPECTED.read_text())[str(number)]
    folder = unpack(number, tmp_path)
    assert json.loads(json.dumps(recovers(folder))) == expected
    assert json.loads(json.dumps(recovers(folder))) == expected, "to recover has changed it"
