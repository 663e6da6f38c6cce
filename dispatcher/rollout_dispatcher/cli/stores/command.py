"""`dispatcher gc`: release what lies in a payload store and the run does not need.

    keys in the store --> the dispatcher: which of these are needed? --> release the others

Invariant: nothing is released before the dispatcher has answered for all of it, in one run. What is
put while it runs is not on the list; what was put before belongs to a producer that is known.
"""

import json
import os
import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

from rollout_dispatcher.cli.asking.credentials import add_credentials, tls_of, token_of
from rollout_dispatcher.cli.asking.needs import Needs
from rollout_dispatcher.cli.asking.wait_ready import Expected, add_address, address_of
from rollout_dispatcher.cli.options import Parser
from rollout_dispatcher.cli.stores.worker import list_keys, release

#: What our producers' keys look like: an incarnation, which ends in a random word, the number of a
#: push, and in Ray a node. Under others somebody has put what he may mean to push; only he knows.
OF_PRODUCERS = re.compile(r".*\.[0-9a-f]{8}/[0-9]+(@[0-9a-f]+)?", re.DOTALL)
#: Keys that are named for people.
NAMED = 5

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


@dataclass(frozen=True, slots=True)
class Found:
    """What lies in a store: `objects` in all.

    needed: of those, by the run. others: not needed, and under keys of somebody's own; they stay,
    unless all were asked for. left_over: keys of those that nobody needs. released: how many of
    these; still_there: those that were asked to go, and have not.
    """

    store: str
    run_id: str | None
    objects: int
    needed: int
    others: int
    left_over: list[str]
    released: int
    still_there: list[str]


def run(argv: Sequence[str]) -> int:
    """Look, ask and release. Raises Unasked and StoreFailed, before or while it releases."""
    args = _parser().parse_strictly(argv)
    found = _collect(args)
    print(json.dumps(asdict(found), indent=2) if args.json else _told(found))
    return 1 if found.still_there else 0


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


def _collect(args: Namespace) -> Found:
    expected = Expected(address_of(args, os.environ), args.run_id, args.ready_file)
    needs = Needs(expected, partial(tls_of, args), token_of(args, os.environ))
    needs.needed(args.store, [])  # a store that it does not know is not even opened
    keys = list_keys(args.store, args.prefix)
    needed = needs.needed(args.store, keys)
    unneeded = [key for key in keys if key not in needed]
    left_over = [key for key in unneeded if args.all or OF_PRODUCERS.fullmatch(key)]
    still_there = [] if args.dry_run else release(args.store, left_over)
    return Found(
        store=args.store,
        run_id=needs.run_id,
        objects=len(keys),
        needed=len(needed),
        others=len(unneeded) - len(left_over),
        left_over=left_over,
        released=0 if args.dry_run else len(left_over) - len(still_there),
        still_there=still_there,
    )


def _told(found: Found) -> str:
    lines = [
        f"{found.store}: {found.objects} objects, {found.needed} needed by run {found.run_id}",
        f"left over: {len(found.left_over)}{_named(found.left_over)}",
    ]
    if found.others:
        lines.append(f"under keys of somebody's own, not touched without --all: {found.others}")
    lines.append(f"released: {found.released}")
    if found.still_there:
        lines.append(f"still there: {len(found.still_there)}{_named(found.still_there)}")
    return "\n".join(lines)


def _named(keys: Sequence[str]) -> str:
    """The first of them, as JSON, since keys may contain anything."""
    more = ", ..." if len(keys) > NAMED else ""
    return f" ({', '.join(map(json.dumps, keys[:NAMED]))}{more})" if keys else ""
