"""`dispatcher gc`: release what lies in a payload store and the run does not need.

    keys in the store --> the dispatcher: which of these are needed? --> release the others

Invariant: nothing is released before the dispatcher has answered for all of it, in one run. What is
put while it runs is not on the list; what was put before belongs to a producer that is known.
Stores are the workers', with engines that nothing here may load: a process of theirs opens them.
"""

import http.client
import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from rollout_dispatcher.cli.ask import Client, add_address, add_credentials
from rollout_dispatcher.cli.options import Parser
from rollout_dispatcher.errors import DispatcherError, StoreFailed
from rollout_dispatcher.protocol.messages import MAX_KEYS

#: What our producers' keys look like: an incarnation, which ends in a random word, the number of a
#: push, and in Ray a node. Under others somebody has put what he may mean to push; only he knows.
OF_PRODUCERS = re.compile(r".*\.[0-9a-f]{8}/[0-9]+(@[0-9a-f]+)?", re.DOTALL)
#: Keys that are named for people.
NAMED = 5
#: How long one answer may take: the journal's disk has to have all that it rests on.
ANSWER_SECONDS = 60.0
#: Of a request's keys, in JSON: half of what the dispatcher takes, as there is more around them.
_MAX_KEY_BYTES = 2**19
PATH = "/v1/references/known"
#: What is run; `python -m rollout_workers.stores --help` says what it reads and prints.
MODULE = "rollout_workers.stores"

EPILOG = """\
examples:
  dispatcher gc file:///mnt/shared/rollouts --dry-run
  dispatcher gc file:///mnt/shared/rollouts --http 127.0.0.1:9471
  dispatcher gc file:///mnt/shared/rollouts --prefix p7. --json    # of one producer

Run it while the dispatcher serves, as only that knows what is needed, and where producers or DP
ranks could run, as it opens the store. A store belongs to one run: what producers of another run
have put there is not needed by this one.

exit codes: 0 done, 1 nobody could be asked, or objects are still there, 2 usage
"""


class Unasked(DispatcherError):
    """Nobody has said which objects are needed."""

    code = "unasked"


def run(argv: Sequence[str]) -> int:
    """Look, ask and release. Raises Unasked and StoreFailed, before or while it releases."""
    args = _parser().parse_strictly(argv)
    found = _collect(args)
    print(json.dumps(found, indent=2) if args.json else _told(found))
    return 1 if found["still_there"] else 0


def _parser() -> Parser:
    parser = Parser(
        prog="dispatcher gc",
        description="Release what lies in a payload store and nobody needs: what producers had put "
        "and not pushed when they were killed, and what an earlier run has left.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "store", metavar="STORE_ADDRESS", help="as --payload-stores of the dispatcher has it"
    )
    add_address(parser, ready_file="ask the dispatcher that writes this file, and no other run")
    parser.add_argument("--run-id", metavar="ID", help="ask this run, and no other")
    add_credentials(parser)
    parser.add_argument(
        "--prefix", default="", help="only objects whose keys begin so, a producer's name and a dot"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="also objects under keys that no producer has chosen; what somebody means to push by "
        "reference, and has not, goes too",
    )
    parser.add_argument("--dry-run", action="store_true", help="release nothing, say what would be")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser


def _collect(args: Namespace) -> dict[str, Any]:
    """What lies in the store and what became of it, as `--json` has it.

    needed: of the objects, by the run. others: not needed, and under keys of somebody's own; they
    stay, unless all were asked for. left_over: keys of those that nobody needs. still_there: those
    that were asked to go, and have not.
    """
    needs = _Needs(args)
    needs.needed([])  # a store that the dispatcher does not know is not even opened
    keys = _store(args.store, "list", args.prefix)
    needed = needs.needed(keys)
    unneeded = [key for key in keys if key not in needed]
    left_over = [key for key in unneeded if args.all or OF_PRODUCERS.fullmatch(key)]
    lines = "".join(f"{json.dumps(key)}\n" for key in left_over)
    still_there = [] if args.dry_run else _store(args.store, "release", given=lines)
    return {
        "store": args.store,
        "run_id": needs.run_id,
        "objects": len(keys),
        "needed": len(needed),
        "others": len(unneeded) - len(left_over),
        "left_over": left_over,
        "released": 0 if args.dry_run else len(left_over) - len(still_there),
        "still_there": still_there,
    }


def _store(address: str, command: str, *arguments: str, given: str = "") -> list[str]:
    """Keys that the workers' process prints: of all objects, or of what it could not release."""
    words = [sys.executable, "-m", MODULE, command, "--", address, *arguments]
    ended = subprocess.run(  # noqa: S603  the operator's words, to a module of ours
        words, input=given, capture_output=True, text=True, errors="replace", check=False
    )
    if ended.returncode != 0 and not (command == "release" and ended.stdout):
        lines = ended.stderr.strip().splitlines() or [f"it ended with {ended.returncode}"]
        raise StoreFailed(address, f"`python -m {MODULE} {command}`: {lines[-1]}")
    try:
        return [str(json.loads(line)) for line in ended.stdout.splitlines()]
    except ValueError:
        said = f"`python -m {MODULE}` has said no keys: {ended.stdout[:80]}"
        raise StoreFailed(address, said) from None


class _Needs:
    """Which objects a dispatcher needs. Invariant: all answers are of one run, and of the one that
    is expected if one is.
    """

    def __init__(self, args: Namespace) -> None:
        self._store, self._ready_file = args.store, args.ready_file
        self._client = Client(args, os.environ, timeout=ANSWER_SECONDS)
        self.run_id: str | None = None

    def needed(self, keys: Sequence[str]) -> set[str]:
        """Which of these are needed, or may be soon. Raises Unasked, with what to do."""
        found = set[str]()
        try:
            for some in _batches(keys):
                found.update(self._ask(some))
        except (OSError, http.client.HTTPException) as error:
            why = str(error) or type(error).__name__
            raise Unasked(
                f"nothing is released, as the dispatcher at {self._client.address} does not say "
                f"what it needs: {why}"
            ) from None
        finally:
            self._client.close()
        return found

    def _ask(self, keys: list[str]) -> list[str]:
        body = json.dumps({"store": self._store, "keys": keys})
        response, answer = self._client.ask(
            "POST", PATH, body, **{"Content-Type": "application/json"}
        )
        try:
            said = json.loads(answer)
        except ValueError:
            said = {}
        said = said if isinstance(said, dict) else {}
        if response.status != 200:
            raise http.client.HTTPException(
                said.get("message") or f"HTTP {response.status}; is it of this release?"
            )
        needed, run_id = said.get("needed"), said.get("run_id")
        if not isinstance(needed, list) or not isinstance(run_id, str):
            raise http.client.HTTPException("what answers there is no dispatcher of this release")
        expected = self.run_id or self._client.run_id or run_id
        if run_id != expected:
            raise http.client.HTTPException(f"it serves run {run_id} instead of {expected}")
        self.run_id = run_id
        return [str(key) for key in needed]


def _batches(keys: Sequence[str]) -> Iterator[list[str]]:
    """As many as a request may have; at least one, as the run is asked for too."""
    batch, nbytes = list[str](), 0
    for key in keys:
        size = len(json.dumps(key))
        if batch and (len(batch) == MAX_KEYS or nbytes + size > _MAX_KEY_BYTES):
            yield batch
            batch, nbytes = [], 0
        batch.append(key)
        nbytes += size
    yield batch


def _told(found: dict[str, Any]) -> str:
    left_over, still_there = found["left_over"], found["still_there"]
    whose = f"{found['needed']} needed by run {found['run_id']}"
    lines = [
        f"{found['store']}: {found['objects']} objects, {whose}",
        f"left over: {len(left_over)}{_named(left_over)}",
    ]
    if found["others"]:
        lines.append(f"under keys of somebody's own, not touched without --all: {found['others']}")
    lines.append(f"released: {found['released']}")
    if still_there:
        lines.append(f"still there: {len(still_there)}{_named(still_there)}")
    return "\n".join(lines)


def _named(keys: Sequence[str]) -> str:
    """The first of them, as JSON, since keys may contain anything."""
    more = ", ..." if len(keys) > NAMED else ""
    return f" ({', '.join(map(json.dumps, keys[:NAMED]))}{more})" if keys else ""
