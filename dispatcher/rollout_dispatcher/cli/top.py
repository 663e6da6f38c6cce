"""`dispatcher top`: a live table of one dispatcher, for an operator on a terminal.

It asks `/statusz` and `/metrics` every interval and draws what `top_view` makes of the answers of
the last half minute. While nobody answers the last picture stays, with why and since when.
"""

import gzip
import http.client
import json
import os
import re
import shutil
import sys
import time
import zlib
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime

from rollout_dispatcher.cli.ask import (
    Client,
    NoAnswer,
    add_address,
    add_credentials,
    reason,
    seconds_of,
)
from rollout_dispatcher.cli.options import Parser
from rollout_dispatcher.cli.top_view import FAMILIES, Line, Reading, lines
from rollout_dispatcher.errors import ConfigError

#: Shorter would cost the dispatcher more than it tells.
MIN_INTERVAL = 0.1
#: Rates are over so many seconds: long enough to be calm, short enough to follow.
RATE_SECONDS = 30.0
#: How long one answer may take.
ANSWER_SECONDS = 5.0
#: What comes of an answer that is none of ours, or of a release with other names.
_ODD = (
    ValueError, LookupError, TypeError, AttributeError, EOFError, RecursionError, zlib.error,
)  # fmt: skip
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

EPILOG = """\
examples:
  dispatcher top                                # the dispatcher of this machine
  dispatcher top --http unix:/run/dispatcher-http.sock
  dispatcher top --http tls://dispatcher.example:9471 --tls-ca ca.pem --token-file token
  dispatcher top --once | grep ^lost            # one frame, for scripts

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
        return _once(source, interval)
    watch = _watch_of()
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
        raise ConfigError("the live view needs a terminal; --once prints one frame")
    return watch(source, interval)


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
    return made


class Source:
    """One dispatcher, asked again and again."""

    def __init__(self, args: Namespace, environ: Mapping[str, str]) -> None:
        self.client = Client(args, environ, timeout=ANSWER_SECONDS)

    def read(self) -> Reading:
        """Look once. Raises NoAnswer, with why in a few words."""
        try:
            status, _ = self._get("/statusz", "application/json")
            text, said_at = self._get("/metrics", "text/plain")
            found = Reading(time.monotonic(), said_at, json.loads(status), parse(text))
            lines([found])  # all that is shown is looked up
        except (OSError, http.client.HTTPException) as error:
            self.client.close()
            raise NoAnswer(reason(error)) from None
        except _ODD:
            self.client.close()
            raise NoAnswer("what answers there is no dispatcher of this release") from None
        return found

    def _get(self, path: str, accept: str) -> tuple[str, float]:
        """An answer, and the dispatcher's time of day, whose clock may not be ours."""
        response, body = self.client.get(path, **{"Accept": accept, "Accept-Encoding": "gzip"})
        if response.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        text = body.decode(errors="replace")
        if response.status != 200:
            raise http.client.HTTPException(f"HTTP {response.status} {_message(text)}")
        said = response.headers.get("Date")
        return text, time.time() if said is None else parsedate_to_datetime(said).timestamp()


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(text[:80].split())


def parse(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """The FAMILIES of a Prometheus text, by name without `dispatcher_` and by the values of their
    labels, in the order of the labels' names. All else is passed over, which is fast.
    """
    found: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in FAMILIES}
    for line in text.splitlines():
        name, _, _ = line.partition(" ")
        name, _, _ = name.partition("{")
        series = found.get(name.removeprefix("dispatcher_"))
        if series is not None:
            labels, _, value = line.rpartition(" ")
            series[tuple(value for _, value in sorted(_LABEL.findall(labels)))] = float(value)
    return found


# -- showing ----------------------------------------------------------------------------------


def _once(source: Source, interval: float) -> int:
    """Two looks, as a rate needs them."""
    try:
        first = source.read()
        time.sleep(interval)
        shown = lines([first, source.read()], source.client.address)
    except NoAnswer as error:
        raise NoAnswer(f"{source.client.address} does not answer: {error}") from None
    finally:
        source.client.close()
    width = max(40, shutil.get_terminal_size().columns)
    print("\n".join(text[:width].rstrip() for text, _ in shown))
    return 0


def _watch_of() -> Callable[[Source, float], int]:
    """The live view. Raises ConfigError without the extra that it needs."""
    try:
        from rich.console import Console  # noqa: PLC0415  it needs the extra
        from rich.live import Live  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("rich"):
            raise
        raise ConfigError(
            "the live view needs rich: pip install 'rollout-dispatcher[top]'; "
            "--once does without it"
        ) from None

    def watch(source: Source, interval: float) -> int:
        console, readings = Console(), deque[Reading]()
        since = time.strftime("%H:%M:%S")
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                began = time.monotonic()
                why = _look(source, readings)
                if not why:
                    since = time.strftime("%H:%M:%S")
                away = f"no answer since {since}: {why}; asking again" if why else ""
                shown = lines(readings, source.client.address, away, console.height)
                live.update(_as_text(shown, console.width), refresh=True)
                time.sleep(max(MIN_INTERVAL, interval - (time.monotonic() - began)))

    def _as_text(shown: list[Line], width: int) -> Text:
        parts = [(f"{text[:width]:{width}}", style) for text, style in shown]
        return Text("\n", no_wrap=True).join(Text(text, style) for text, style in parts)

    return watch


def _look(source: Source, readings: deque[Reading]) -> str:
    """Add a reading; those of another process, and those too old for rates, go. Returns why there
    is none.
    """
    try:
        found = source.read()
    except (NoAnswer, ConfigError) as error:  # a ready file may be another one soon
        return str(error)
    if readings and readings[-1].process != found.process:
        readings.clear()
    readings.append(found)
    while len(readings) > 2 and readings[1].at <= found.at - RATE_SECONDS:
        readings.popleft()
    return ""
