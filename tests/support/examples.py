"""How many examples a property has: a fifth in `make test`, all of them in `make test-all`."""

import os

from hypothesis import settings

#: Set by `make test-all`.
FULL = os.environ.get("FULL_EXAMPLES") == "1"
FEWER, FEWEST = 5, 20


def examples(count: int) -> settings:
    """Try `count` examples where all are asked for, else a fifth of them, though at least 20."""
    return settings(max_examples=scaled(count))


def scaled(count: int) -> int:
    """`count` examples, or a fifth of them; fewer than 20 stay as they are."""
    return count if FULL else max(count // FEWER, min(count, FEWEST))
