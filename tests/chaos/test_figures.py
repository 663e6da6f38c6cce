"""The figures in docs/faults.md are those of the campaign that is kept."""

import pytest

from tests.chaos.figures import DOCUMENT, TABLES
from tests.support.generated import between


@pytest.mark.parametrize("name", TABLES)
def test_a_table_says_what_the_result_file_says(name: str) -> None:
    text = DOCUMENT.read_text()
    start, stop = between(text, name)
    assert text[start:stop] == TABLES[name]() + "\n", "run: python -m tests.chaos.figures"
