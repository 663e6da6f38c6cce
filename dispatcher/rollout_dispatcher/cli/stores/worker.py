"""Lists a payload store, and releases objects of it, in a process of the workers' package.

Stores are the workers', with engines that nothing here may load.
"""

import json
import subprocess
import sys
from collections.abc import Sequence

from rollout_dispatcher.errors import StoreFailed

#: What is run; `python -m rollout_workers.stores --help` says what it reads and prints.
MODULE = "rollout_workers.stores"


def list_keys(address: str, prefix: str) -> list[str]:
    """The keys of all objects that begin so. Raises StoreFailed."""
    return _keys(address, _run(address, "list", prefix))


def release(address: str, keys: Sequence[str]) -> list[str]:
    """Release these objects; returns the keys of those that are still there. Raises StoreFailed."""
    given = "".join(f"{json.dumps(key)}\n" for key in keys)
    return _keys(address, _run(address, "release", given=given))


def _run(address: str, command: str, *arguments: str, given: str = "") -> str:
    words = [sys.executable, "-m", MODULE, command, "--", address, *arguments]
    ended = subprocess.run(  # noqa: S603  the operator's words, to a module of ours
        words, input=given, capture_output=True, text=True, errors="replace", check=False
    )
    if ended.returncode != 0 and not (command == "release" and ended.stdout):
        lines = ended.stderr.strip().splitlines() or [f"it ended with {ended.returncode}"]
        raise StoreFailed(address, f"`python -m {MODULE} {command}`: {lines[-1]}")
    return ended.stdout


def _keys(address: str, lines: str) -> list[str]:
    try:
        return [str(json.loads(line)) for line in lines.splitlines()]
    except ValueError:
        raise StoreFailed(address, f"`python -m {MODULE}` has said no keys: {lines[:80]}") from None
