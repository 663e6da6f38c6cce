"""`dispatcher top`: what `/statusz` says of one dispatcher, again and again, on a terminal.

Its words come first, then rates of the last half minute, a row a rank, and producers. While nobody
answers the last picture stays, with why and since when. Nothing is told by a colour.
"""

import http.client
import json
import os
import shutil
import sys
import textwrap
import time
from argparse import Namespace
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollout_dispatcher.cli.ask import (
    Client,
    NoAnswer,
    add_address,
    add_credentials,
    reason,
    seconds_of,
)
from rollout_dispatcher.cli.options import Parser
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.service.http.status_page import rank_state

#: Shorter would cost the dispatcher more than it tells.
MIN_INTERVAL = 0.1
#: Rates are over so many seconds: long enough to be calm, short enough to follow.
RATE_SECONDS = 30.0
#: How long one answer may take.
ANSWER_SECONDS = 5.0
#: Producers that are shown.
PRODUCERS = 3
#: A rank that needs a tenth more than the median is named, as in docs/operate.md.
SLOW = 1.1
#: What comes of an answer that is none of ours, or of a release with other names.
_ODD = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
#: How states of ranks are sorted, the worst first.
_WORST = ("missing", "absent", "left", "hangs", "")
_TABLE = f"{'rank':>5}  {'':9}{'step':>7}{'computes':>11}{'for others':>12}{'slowness':>11}"
#: The other screen without a cursor, and back.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"

EPILOG = """\
examples:
  dispatcher top                                # the dispatcher of this machine
  dispatcher top --http unix:/run/dispatcher-http.sock
  dispatcher top --http tls://dispatcher.example:9471 --tls-ca ca.pem --token-file token
  dispatcher top --once --json                  # one frame, for scripts

Ctrl-C ends it. Rates are of the last 30 seconds, with --once of one --interval; what ranks compute
is of the last measured step.

exit codes: 0 done, 1 no answer (with --once), 2 usage, 130 Ctrl-C
"""


def run(argv: Sequence[str]) -> int:
    """Show until Ctrl-C. Raises ConfigError, and with --once NoAnswer."""
    args = parser().parse_strictly(argv)
    interval = seconds_of("--interval", args.interval)
    if interval < MIN_INTERVAL:
        raise ConfigError(f"--interval {args.interval} is less than {MIN_INTERVAL:g} s")
    source = Source(args, os.environ)
    if args.once:
        return _once(source, interval, as_json=args.json)
    if args.json:
        raise ConfigError("--json prints one frame; write --once --json")
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
        raise ConfigError("the live view needs a terminal; --once prints one frame")
    try:
        print(_ENTER, end="")
        _watch(source, interval)
    finally:
        print(_LEAVE, end="", flush=True)
    return 0


def parser() -> Parser:
    """Its flags."""
    made = Parser(
        prog="dispatcher top",
        description="A live view of one dispatcher: what is lost, which rank is slow, what it "
        "waits for.",
        epilog=EPILOG,
    )
    follows = "the dispatcher that writes this file (serve --ready-file), also once it is another"
    add_address(made, ready_file=follows)
    add_credentials(made)
    made.add_argument("--interval", default="1s", help="how often to look [%(default)s]")
    made.add_argument("--once", action="store_true", help="print one frame and end")
    made.add_argument("--json", action="store_true", help="with --once: as a JSON object")
    return made


class Look(NamedTuple):
    """What `/statusz` said of a run, in words and as data. at: when, on our monotonic clock."""

    at: float
    run_id: str
    words: str
    said: Mapping[str, Any]
    clients: Sequence[Mapping[str, Any]] = ()


class Source:
    """One dispatcher, asked again and again."""

    def __init__(self, args: Namespace, environ: Mapping[str, str]) -> None:
        self.client = Client(args, environ, timeout=ANSWER_SECONDS)

    def read(self) -> Look:
        """Look once. Raises NoAnswer, with why in a few words."""
        try:
            words, said = self._get("text/plain"), json.loads(self._get("application/json"))
            clients = json.loads(self._get("application/json", "/v1/clients"))["clients"]
            found = Look(time.monotonic(), said["run_id"], words, said, clients)
            picture([found])  # all that is shown is looked up
        except (OSError, http.client.HTTPException) as error:
            self.client.close()
            raise NoAnswer(reason(error)) from None
        except _ODD:
            self.client.close()
            raise NoAnswer("what answers there is no dispatcher of this release") from None
        return found

    def _get(self, accept: str, path: str = "/statusz") -> str:
        response, body = self.client.get(path, Accept=accept)
        text = body.decode(errors="replace")
        if response.status != 200:
            raise http.client.HTTPException(f"HTTP {response.status} {_message(text)}")
        return text


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(text[:80].split())


# -- the picture ------------------------------------------------------------------------------


def picture(
    looks: Sequence[Look],
    address: str = "",
    away: str = "",
    *,
    width: int = 80,
    height: int | None = None,
) -> list[str]:
    """Lines of at most `width`; no more than `height` of them, if that is given.

    looks: at one run, the oldest first. away: why there was no answer of late.
    """
    told = [f"dispatcher top  {address}", *([away] if away else [])]
    if looks:
        first, last = looks[0], looks[-1]
        told[0] += f"  {last.said['version']}"
        told += [*last.words.splitlines(), _rates_in_words(_rates(first, last))]
    shown = [part for line in told for part in textwrap.wrap(line, width, subsequent_indent="    ")]
    if looks:
        shown += _ranks(last.said, None if height is None else height - len(shown))
        shown += _producers(last.clients)
    return [line[:width] for line in shown[:height]]


def _producers(clients: Sequence[Mapping[str, Any]]) -> list[str]:
    """Those that are gone first, then the slowest."""
    found = sorted(
        (one for one in clients if one["role"] == "producer"),
        key=lambda one: (one["connected"], one["samples_per_second"]),
    )
    told = []
    for one in found[:PRODUCERS]:
        at = f" at {one['host']}" if one["host"] else ""
        error = f", {one['last_error']}" if one["last_error"] else ""
        rate = f"{one['samples_per_second']:,.1f} samples/s"
        told.append(f"producer {one['client_id']}{at}: {rate}{error}")
    more = len(found) - PRODUCERS
    return [*told, f"and {more} more producers: GET /v1/clients"] if more > 0 else told


def _rates(first: Look, last: Look) -> dict[str, float]:
    """Steps, samples and tokens a second; nothing while there is one look only."""
    names = {
        "steps": "steps_committed",
        "samples": "samples_committed",
        "tokens": "dispatched_tokens",
    }
    gained = {short: last.said[name] - first.said[name] for short, name in names.items()}
    seconds = last.at - first.at
    return {short: count / seconds for short, count in gained.items()} if seconds > 0 else {}


def _rates_in_words(rates: Mapping[str, float]) -> str:
    if not rates:
        return "rate: not known yet"
    return (
        f"rate: {rates['steps']:.2f} steps/s, {rates['samples']:,.1f} samples/s, "
        f"{rates['tokens']:,.0f} tokens/s"
    )


def _ranks(said: Mapping[str, Any], room: int | None) -> list[str]:
    """A header and a row a rank; the worst first where not all fit."""
    states = {rank: rank_state(said, rank) for rank in range(said["dp_size"])}
    step = said["measured"]["last_step"] or {"ranks": []}
    took = {each["dp_rank"]: each for each in step["ranks"]}
    order, title = list(states), _TABLE
    if room is not None and len(order) + 1 > room:
        slowness = {rank: each["slowness"] or 0.0 for rank, each in took.items()}
        order.sort(key=lambda rank: (_WORST.index(states[rank]), -slowness.get(rank, 0.0), rank))
        order = order[: max(0, room - 1)]
        title += f"   the worst {len(order)} of {len(states)}"
    shown = [title]
    for rank in order:
        own = took.get(rank, {"compute_s": None, "wait_s": None, "slowness": None})
        ratio, at = own["slowness"], said["ranks"].get(str(rank), {"taken": -1})["taken"]
        slow = f"{'-' if ratio is None else f'{ratio:.2f}'}{' <' if (ratio or 0) >= SLOW else '  '}"
        shown.append(
            f"{rank:>5}  {states[rank]:9}{'-' if at < 0 else at:>7}"
            f"{_seconds(own['compute_s']):>11}{_seconds(own['wait_s']):>12}{slow:>11}"
        )
    return shown


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} s"


# -- showing ----------------------------------------------------------------------------------


def _once(source: Source, interval: float, *, as_json: bool) -> int:
    """Two looks, as a rate needs them."""
    try:
        first = source.read()
        time.sleep(interval)
        looks = [first, source.read()]
    except NoAnswer as error:
        raise NoAnswer(f"{source.client.address} does not answer: {error}") from None
    finally:
        source.client.close()
    if as_json:
        rates = _rates(*looks)
        found = {"address": source.client.address, "rates": rates, "status": looks[-1].said}
        print(json.dumps(found, indent=1))
        return 0
    width = max(40, shutil.get_terminal_size().columns)
    print("\n".join(picture(looks, source.client.address, width=width)))
    return 0


def _watch(source: Source, interval: float) -> None:
    looks, since = deque[Look](), time.strftime("%H:%M:%S")
    while True:
        began = time.monotonic()
        why = _look(source, looks)
        if not why:
            since = time.strftime("%H:%M:%S")
        away = f"no answer since {since}: {why}; asking again" if why else ""
        width, height = shutil.get_terminal_size()
        shown = picture(looks, source.client.address, away, width=width, height=height)
        print("\x1b[H" + "\x1b[K\n".join(shown), end="\x1b[K\x1b[J", flush=True)
        time.sleep(max(MIN_INTERVAL, interval - (time.monotonic() - began)))


def _look(source: Source, looks: deque[Look]) -> str:
    """Add a look; those at another run, or too old for rates, go. Returns why there is none."""
    try:
        found = source.read()
    except (NoAnswer, ConfigError) as error:  # a ready file may be another one soon
        return str(error)
    if looks and looks[-1].run_id != found.run_id:
        looks.clear()
    looks.append(found)
    while len(looks) > 2 and looks[1].at <= found.at - RATE_SECONDS:
        looks.popleft()
    return ""
