"""`dispatcher top`: a live view of one dispatcher's `/statusz` on a terminal.

It shows the text of `/statusz`, rates of the last half minute, a row for each rank, and producers.
While the dispatcher does not answer, the last view stays, with the reason and the time. Colours
carry no information.
"""

import json
import os
import shutil
import sys
import textwrap
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollout_dispatcher.cli.ask import Client, NoAnswer, add_address, add_credentials, seconds_of
from rollout_dispatcher.cli.options import Parser
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.service.http.status_page import rank_state

#: Of `--interval`, in seconds, so that the view does not load the dispatcher.
MIN_INTERVAL = 0.1
#: Span of the rates.
RATE_SECONDS = 30.0
#: Producers that are shown.
PRODUCERS = 3
#: Slowness, over the median rank's, from which on a rank is marked; as in docs/operate.md.
SLOW = 1.1
#: What an answer raises that is not a dispatcher's, or of a release with other names.
_ODD = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
#: States of ranks, the worst first.
_WORST = ("missing", "absent", "left", "hangs", "")
_TABLE = f"{'rank':>5}  {'':9}{'step':>7}{'computes':>10}{'waits for others':>17}{'slowness':>10}"
#: To the alternate screen without a cursor, and back.
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
    client = Client(args, os.environ)
    if args.once:
        return _once(client, interval, as_json=args.json)
    if args.json:
        raise ConfigError("--json prints one frame; write --once --json")
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
        raise ConfigError("the live view needs a terminal; --once prints one frame")
    try:
        print(_ENTER, end="")
        _watch(client, interval)
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
    made.add_argument("--interval", default="1s", help="how often to refresh [%(default)s]")
    made.add_argument("--once", action="store_true", help="print one frame and end")
    made.add_argument("--json", action="store_true", help="with --once: as a JSON object")
    return made


class Reading(NamedTuple):
    """One reading of `/statusz`: text and data. at: seconds of our monotonic clock."""

    at: float
    run_id: str
    text: str
    status: Mapping[str, Any]
    clients: Sequence[Mapping[str, Any]] = ()


def read(client: Client) -> Reading:
    """Read status and clients. Raises NoAnswer, with the reason in a few words."""
    try:
        text, status = client.read(accept="text/plain"), json.loads(client.read())
        clients = json.loads(client.read("/v1/clients"))["clients"]
        found = Reading(time.monotonic(), status["run_id"], text, status, clients)
        picture([found])  # raises where something to show is missing
    except _ODD:
        client.close()
        raise NoAnswer("what answers there is no dispatcher of this release") from None
    return found


# -- the picture ------------------------------------------------------------------------------


def picture(
    readings: Sequence[Reading],
    address: str = "",
    away: str = "",
    *,
    width: int = 80,
    height: int | None = None,
) -> list[str]:
    """Lines of at most `width` characters, and at most `height` of them, if that is given.

    readings: of one run, the oldest first. away: why there was no answer of late.
    """
    text = [f"dispatcher top  {address}", *([away] if away else [])]
    if readings:
        first, last = readings[0], readings[-1]
        text[0] += f"  {last.status['version']}"
        text += [*last.text.splitlines(), _rates_in_words(_rates(first, last))]
    shown = [part for line in text for part in textwrap.wrap(line, width, subsequent_indent="    ")]
    if readings:
        shown += _ranks(last.status, None if height is None else height - len(shown))
        shown += _producers(last.clients)
    return [line[:width] for line in shown[:height]]


def _producers(clients: Sequence[Mapping[str, Any]]) -> list[str]:
    """Disconnected producers first, then the slowest."""
    found = sorted(
        (one for one in clients if one["role"] == "producer"),
        key=lambda one: (one["connected"], one["samples_per_second"]),
    )
    lines = []
    for one in found[:PRODUCERS]:
        at = f" at {one['host']}" if one["host"] else ""
        error = f", {one['last_error']}" if one["last_error"] else ""
        rate = f"{one['samples_per_second']:,.1f} samples/s"
        lines.append(f"producer {one['client_id']}{at}: {rate}{error}")
    more = len(found) - PRODUCERS
    return [*lines, f"and {more} more producers: GET /v1/clients"] if more > 0 else lines


def _rates(first: Reading, last: Reading) -> dict[str, float]:
    """Steps, samples and tokens per second; empty after a single reading."""
    names = {
        "steps": "steps_committed",
        "samples": "samples_committed",
        "tokens": "dispatched_tokens",
    }
    gained = {short: last.status[name] - first.status[name] for short, name in names.items()}
    seconds = last.at - first.at
    return {short: count / seconds for short, count in gained.items()} if seconds > 0 else {}


def _rates_in_words(rates: Mapping[str, float]) -> str:
    if not rates:
        return "rate: not known yet"
    return (
        f"rate: {rates['steps']:.2f} steps/s, {rates['samples']:,.1f} samples/s, "
        f"{rates['tokens']:,.0f} tokens/s"
    )


def _ranks(status: Mapping[str, Any], room: int | None) -> list[str]:
    """A header and a row for each rank; the worst first where not all fit."""
    states = {rank: rank_state(status, rank) for rank in range(status["dp_size"])}
    step = status["measured"]["last_step"] or {"ranks": []}
    took = {each["dp_rank"]: each for each in step["ranks"]}
    order, title = list(states), _TABLE
    if room is not None and len(order) + 1 > room:
        slowness = {rank: each["slowness"] or 0.0 for rank, each in took.items()}
        order.sort(key=lambda rank: (_WORST.index(states[rank]), -slowness.get(rank, 0.0), rank))
        order = order[: max(0, room - 1)]
        title += f"  worst {len(order)} of {len(states)}"
    shown = [title]
    for rank in order:
        own = took.get(rank, {"compute_s": None, "wait_s": None, "slowness": None})
        ratio, at = own["slowness"], status["ranks"].get(str(rank), {"taken": -1})["taken"]
        slow = f"{'-' if ratio is None else f'{ratio:.2f}'}{' <' if (ratio or 0) >= SLOW else '  '}"
        shown.append(
            f"{rank:>5}  {states[rank]:9}{'-' if at < 0 else at:>7}"
            f"{_seconds(own['compute_s']):>10}{_seconds(own['wait_s']):>17}{slow:>10}"
        )
    return shown


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} s"


# -- showing ----------------------------------------------------------------------------------


def _once(client: Client, interval: float, *, as_json: bool) -> int:
    """Print one frame of two readings, as a rate needs two."""
    try:
        first = read(client)
        time.sleep(interval)
        readings = [first, read(client)]
    except NoAnswer as error:
        raise NoAnswer(f"{client.address} does not answer: {error}") from None
    finally:
        client.close()
    if as_json:
        rates = _rates(*readings)
        found = {"address": client.address, "rates": rates, "status": readings[-1].status}
        print(json.dumps(found, indent=1))
        return 0
    width = max(40, shutil.get_terminal_size().columns)
    print("\n".join(picture(readings, client.address, width=width)))
    return 0


def _watch(client: Client, interval: float) -> None:
    readings, since = deque[Reading](), time.strftime("%H:%M:%S")
    while True:
        began = time.monotonic()
        why = _refresh(client, readings)
        if not why:
            since = time.strftime("%H:%M:%S")
        away = f"no answer since {since}: {why}; asking again" if why else ""
        width, height = shutil.get_terminal_size()
        shown = picture(readings, client.address, away, width=width, height=height)
        print("\x1b[H" + "\x1b[K\n".join(shown), end="\x1b[K\x1b[J", flush=True)
        time.sleep(max(MIN_INTERVAL, interval - (time.monotonic() - began)))


def _refresh(client: Client, readings: deque[Reading]) -> str:
    """Add a reading; remove those of another run, or too old for rates. Returns why it failed."""
    try:
        found = read(client)
    except (NoAnswer, ConfigError) as error:  # the ready file may be complete soon
        return str(error)
    if readings and readings[-1].run_id != found.run_id:
        readings.clear()
    readings.append(found)
    while len(readings) > 2 and readings[1].at <= found.at - RATE_SECONDS:
        readings.popleft()
    return ""
