"""Words for people: the nearest right one for a wrong one, what to install, names that may hold
anything.
"""

import difflib
import re
from collections.abc import Iterable

#: Characters of a message; our own have a few hundred, names that peers give some 128 each.
MAX_CHARACTERS = 4096
#: What the base installation lacks, and the extra that brings it.
EXTRAS = {"aiohttp": "server", "prometheus_client": "server", "torch": "workers"}
#: The planner's names of options that the service calls otherwise.
_OF_PLANNER = {
    "dispatch_batch_size": "global_batch_size",
    "max_skips": "max_delay",
    "outlier_max_skips": "outlier_max_delay",
    "window_multiple": "window",
}
_PLANNER_NAMES = re.compile(rf"\b({'|'.join(_OF_PLANNER)})\b")
#: Commands that there are no more, and what to do instead.
REMOVED = {
    "report": "dispatcher simulate DIR shows how a recorded run went, Grafana its ranks over time",
}


def renamed_in(text: str) -> str:
    """A text of the planner, which has names of its own, with the options that they are here."""
    return _PLANNER_NAMES.sub(lambda found: _OF_PLANNER[found[0]], text)


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` for the nearest of `known`, what became of a removed one, or nothing."""
    plain = name.casefold().removeprefix("--").removeprefix("dispatcher_").replace("_", "-")
    if plain in REMOVED:
        return f" (it was removed: {REMOVED[plain]})"
    if now := _OF_PLANNER.get(plain.replace("-", "_")):
        name = now
    found = nearest_of(name, known)
    return f" (did you mean {found}?)" if found else ""


def nearest_of(name: str, known: Iterable[str]) -> str | None:
    """The nearest of `known`, whatever its case; None if none is near."""
    folded = {word.casefold(): word for word in known}
    found = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.6)
    return folded[found[0]] if found else None


def to_install(error: ModuleNotFoundError) -> str | None:
    """Which extra of ours brings the module that is missing; None if none does."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    return (
        f"needs {package}, which is not installed here; install it with "
        f"pip install 'rollout-dispatcher[{EXTRAS[package]}]'"
    )


def harmless(text: str) -> str:
    r"""The same on one line, without what a terminal would obey, and not too long.

    "a\nb" is a line feed between two letters, in such a text: breaks of lines, control characters
    and those that turn the direction of writing are written as Python writes them.
    """
    beyond = len(text) - MAX_CHARACTERS
    if beyond > 0:
        text = f"{text[:MAX_CHARACTERS]}... ({beyond:,} characters more)"
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )
