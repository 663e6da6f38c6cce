"""`python -m tests.size` counts what it says."""

from tests.size import lines_of_code, literals, measured, table

TEXT = '''"""A docstring
of two lines."""

# a comment
SIZE = 512  # and another
TEXT = """one
two"""


class It:
    """Has one."""

    def less(self, at: int = -1) -> int:
        """Says so."""

        return (at -
                2.5) * -3 + 1
'''


def test_lines_without_code_are_none_and_plain_numbers_are_no_literals() -> None:
    assert lines_of_code(TEXT) == 7
    assert literals(TEXT) == 3


def test_the_table_has_a_samples_way_and_every_package() -> None:
    found = measured()
    assert sum(lines for lines, _ in found["packages"].values()) == found["lines_of_code"]
    whole, push = found["a_sample"].values()
    assert whole["calls"] > push["calls"] > 0
    assert whole["calls"] >= whole["functions"] >= whole["files"] > 1
    assert all("{" not in line for line in table(found))
