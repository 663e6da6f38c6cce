"""How the lines of an integration are counted."""

from pathlib import Path

import pytest

from tests.support.integration import BEGIN, END, integration_lines

TEXT = f'''
"""What it is."""
import os
one = 1
{BEGIN}
from sys import (
    path,
)


def feed(stream):
    """What it does.

    More.
    """
    # why
    text = """a
    b"""
    return [
        stream,
        text,
    ]  # so
{END}
two = 2
{BEGIN}
three = 3
{END}
'''


def counted(tmp_path: Path, text: str) -> int:
    file = tmp_path / "example.py"
    file.write_text(text)
    return integration_lines(file)


def test_code_between_the_marks_counts_and_what_is_said_or_imported_does_not(
    tmp_path: Path,
) -> None:
    assert counted(tmp_path, TEXT) == 1 + 2 + 4 + 1


@pytest.mark.parametrize("text", ["one = 1", f"{BEGIN}\none = 1", f"{END}\n{BEGIN}\none = 1"])
def test_marks_that_do_not_pair_are_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(AssertionError, match="integration"):
        counted(tmp_path, text)
