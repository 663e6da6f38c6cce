"""`python -m rollout_workers.stores`: look into a payload store, and release objects of it.

    python -m rollout_workers.stores list file:///data/rollouts [PREFIX]
    python -m rollout_workers.stores release file:///data/rollouts < keys

Keys are JSON strings, one a line, as they may contain anything: `list` prints them so, `release`
reads them so and prints those of objects that are still there. Exit code 1, and the reason on
stderr, if the store cannot be used, or objects are still there.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence

from rollout_dispatcher.errors import StoreFailed
from rollout_workers.stores.registry import open_store

#: Keys that are released at a time, so that what is done is done if it is interrupted.
AT_ONCE = 1024


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    asked = _parser().parse_args(arguments)
    try:
        store = open_store(asked.address)
        if asked.command == "list":
            _print(store.list(asked.prefix))
            return 0
        keys, left = _keys(sys.stdin), list[str]()
        for start in range(0, len(keys), AT_ONCE):
            left += store.release(keys[start : start + AT_ONCE])
    except (StoreFailed, ValueError) as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    _print(left)
    return 1 if left else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m rollout_workers.stores", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="print the keys of its objects")
    listing.add_argument("address")
    listing.add_argument("prefix", nargs="?", default="", help="that they begin with")
    releasing = commands.add_parser("release", help="release the objects whose keys come on stdin")
    releasing.add_argument("address")
    return parser


def _keys(lines: Iterable[str]) -> list[str]:
    """Raises ValueError for a line that is no key."""
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            key = json.loads(line)
        except ValueError:
            key = None
        if not isinstance(key, str):
            raise ValueError(f"line {number} is no JSON string: {line.strip()[:100]}")
        found.append(key)
    return found


def _print(keys: Iterable[str]) -> None:
    for key in keys:
        print(json.dumps(key))  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
