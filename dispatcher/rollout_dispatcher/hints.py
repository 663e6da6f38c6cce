"""The nearest right word for a wrong one."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` for the nearest of `known`, or nothing."""
    found = nearest_of(name, known)
    return f" (did you mean {found}?)" if found else ""


def nearest_of(name: str, known: Iterable[str]) -> str | None:
    """The nearest of `known`, whatever its case; None if none is near."""
    folded = {word.casefold(): word for word in known}
    found = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.6)
    return folded[found[0]] if found else None
