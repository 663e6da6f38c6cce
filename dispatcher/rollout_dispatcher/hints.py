"""Texts for users: the nearest known name, what to install, names from peers made harmless."""

import difflib
import re
from collections.abc import Collection, Iterable
from itertools import islice

#: Characters of a message; our own have a few hundred, names that peers give some 128 each.
MAX_CHARACTERS = 4096
#: Names of options in the planner, or before 0.2.0, and their names here.
RENAMED = {
    "window_multiple": "window",
    "dispatch_batch_size": "global_batch_size",
    "dispatch_batch_groups": "global_batch_groups",
    "held_bytes": "blocked_push_bytes",
    "retain": "sample_retention",
    "last_batch": "final_batch",
    "target_excess": "max_imbalance",
    "elastic": "allow_dp_resize",
    "oversize": "on_oversize",
    "staleness_policy": "on_stale",
    "record": "record_dir",
    "max_skips": "max_delay",
    "outlier_max_skips": "outlier_max_delay",
}
#: Packages that the base installation lacks, and the extra that has them.
EXTRAS = {"aiohttp": "server", "prometheus_client": "server", "torch": "workers"}
_OLD_NAMES = re.compile(rf"\b({'|'.join(name for name in RENAMED if '_' in name)})\b")
#: Options and commands that were removed, and what to do instead.
REMOVED = {
    "shared-memory": "payloads are sent; on one host large ones had better go by reference, with "
    "--payload-stores file:///dev/shm/rollouts",
    "max-waiting-bodies": "request bodies wait as far as --set receive-bytes has room",
    "max-pending-connections": "512 connections are pending at most, on each plane",
    "handshake-timeout": "clients introduce themselves within 10s",
    "write-timeout": "a peer that reads nothing for 1m is left",
    "progress-interval": "the line on how the run gets on comes every 10s; --log-level warning has "
    "none",
    "wait": "a push that is answered 429 is pushed again after Retry-After seconds",
    "gc": "what killed producers leave is released without it; what an earlier run has left is "
    "deleted with the store's own tools",
    "html": "the table and --json have what the page had",
    "trace": "dispatcher report sums a record up",
}


def renamed_in(text: str) -> str:
    """Return a text of the planner with the names that options have here."""
    return _OLD_NAMES.sub(lambda found: RENAMED[found[0]], text)


def option_of(name: str) -> str:
    """Return the present name of the option of a flag, a variable or a key."""
    plain = name.casefold().removeprefix("--").removeprefix("dispatcher_").replace("-", "_")
    return RENAMED.get(plain, plain)


def name_some(names: Collection[object], kind: str, most: int = 8) -> str:
    """The first names: `DP ranks 0, 1 and 5 more`; empty for none. kind: of one of them."""
    if not names:
        return ""
    shown, more = ", ".join(map(str, islice(names, most))), len(names) - most
    return f"{kind}{'s' * (len(names) > 1)} {shown}" + (f" and {more} more" if more > 0 else "")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean X?)` for the nearest of `known`, or why it was removed, or nothing."""
    option = option_of(name)
    if (removed := option.replace("_", "-")) in REMOVED:
        return f" (it was removed: {REMOVED[removed]})"
    names = list(known)
    found = next((one for one in names if option_of(one) == option), None)
    found = found or nearest_of(name, names)
    return f" (did you mean {found}?)" if found else ""


def nearest_of(name: str, known: Iterable[str]) -> str | None:
    """Return the nearest of `known`, ignoring case; None if none is near."""
    folded = {word.casefold(): word for word in known}
    found = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.6)
    return folded[found[0]] if found else None


def to_install(error: ModuleNotFoundError) -> str | None:
    """Return which extra has the missing module, in words; None if none has."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    return (
        f"needs {package}, which is not installed here; install it with "
        f"pip install 'rollout-dispatcher[{EXTRAS[package]}]'"
    )


def harmless(text: str) -> str:
    r"""Return a text as one line of bounded length, without control characters.

    Line breaks, control characters and those that change the direction of writing are escaped as in
    Python: "a\nb" has a line feed between two letters.
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
