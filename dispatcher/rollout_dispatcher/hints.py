"""Words for people: the nearest right one for a wrong one, and names that may hold anything."""

import difflib
from collections.abc import Iterable

#: Characters of a message; our own have a few hundred, names that peers give some 128 each.
MAX_CHARACTERS = 4096
#: Options that there are no more, and what to do instead.
REMOVED = {
    "shared-memory": "payloads are sent; on one host large ones had better go by reference, with "
    "--payload-stores file:///dev/shm/rollouts",
    "max-waiting-bodies": "64 request bodies wait at most, of whatever size",
    "max-pending-connections": "512 connections are pending at most, on each plane",
    "handshake-timeout": "clients introduce themselves within 10s",
    "write-timeout": "a peer that reads nothing for 1m is left",
    "progress-interval": "the line on how the run gets on comes every 10s; --log-level warning has "
    "none",
}


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` for the nearest of `known`, what became of a removed one, or nothing."""
    plain = name.casefold().removeprefix("--").removeprefix("dispatcher_").replace("_", "-")
    if plain in REMOVED:
        return f" (it was removed: {REMOVED[plain]})"
    found = nearest_of(name, known)
    return f" (did you mean {found}?)" if found else ""


def nearest_of(name: str, known: Iterable[str]) -> str | None:
    """The nearest of `known`, whatever its case; None if none is near."""
    folded = {word.casefold(): word for word in known}
    found = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.6)
    return folded[found[0]] if found else None


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
