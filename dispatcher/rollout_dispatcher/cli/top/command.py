"""`dispatcher top`: whom to ask and how to show it."""

import os
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rollout_dispatcher.cli.asking.credentials import add_credentials, tls_of, token_of
from rollout_dispatcher.cli.asking.wait_ready import Expected, add_address, address_of
from rollout_dispatcher.cli.options import Parser
from rollout_dispatcher.cli.top.frame import Screen, frame
from rollout_dispatcher.cli.top.history import History
from rollout_dispatcher.cli.top.source import NoAnswer, Source
from rollout_dispatcher.cli.top.view import view
from rollout_dispatcher.cli.top.words import ASCII, UNICODE, Glyphs
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.service.config.values import DURATION

#: Shorter would cost the dispatcher more than it tells.
MIN_INTERVAL = 0.1

EPILOG = """\
examples:
  dispatcher top                                # the dispatcher of this machine
  dispatcher top --http unix:/run/dispatcher-http.sock
  dispatcher top --http tls://dispatcher.example:9471 --tls-ca ca.pem --token-file token
  dispatcher top --once | grep ^lost            # one frame, for scripts

keys: q quits; arrows and page keys scroll through the ranks

Shares of time by rank are of the last 30 seconds. With --once they are of one --interval.

exit codes: 0 done, 1 no answer (with --once), 2 usage, 130 Ctrl-C
"""


def run(argv: Sequence[str]) -> int:
    """Show until the user has seen enough. Raises ConfigError, and with --once NoAnswer."""
    args = _parser().parse_strictly(argv)
    interval = _interval(args.interval)
    source = source_of(args, os.environ)
    if args.once:
        return _once(source, interval)
    show = _live()
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
        raise ConfigError("the live view needs a terminal; --once prints one frame")
    return show(source, interval, _glyphs())


def _live() -> Callable[[Source, float, Glyphs], int]:
    try:
        from rollout_dispatcher.cli.top.live import show  # noqa: PLC0415  it needs the extra
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("rich"):
            raise
        raise ConfigError(
            "the live view needs rich: pip install 'rollout-dispatcher[top]'; "
            "--once does without it"
        ) from None
    return show


def _interval(text: str) -> float:
    try:
        interval = DURATION.parse(text)
    except ValueError as error:
        raise ConfigError(f"--interval {text}: {error}") from None
    assert isinstance(interval, int | float)
    if interval < MIN_INTERVAL:
        raise ConfigError(f"--interval {text} is less than {MIN_INTERVAL:g} s")
    return float(interval)


def _once(source: Source, interval: float) -> int:
    """Two looks, as a rate needs them."""
    history = History()
    try:
        history.add(source.read())
        time.sleep(interval)
        history.add(source.read())
    except NoAnswer as error:
        raise NoAnswer(f"{source.address} does not answer: {error}") from None
    finally:
        source.close()
    width = shutil.get_terminal_size().columns
    screen = Screen(max(40, width), None, _glyphs())
    for line in frame(view(history), source.address, screen).lines:
        print(line.text.rstrip())
    return 0


def _glyphs() -> Glyphs:
    """What the terminal's encoding has."""
    try:
        "".join((UNICODE.full, UNICODE.empty, UNICODE.levels)).encode(sys.stdout.encoding)
    except UnicodeEncodeError:
        return ASCII
    return UNICODE


def source_of(args: Namespace, environ: Mapping[str, str]) -> Source:
    """Whom to ask, by the flags. Raises ConfigError."""
    token = token_of(args, environ)
    expected = Expected(address_of(args, environ), None, args.ready_file)
    if expected.http is not None and expected.http.tls:
        tls_of(args)  # what is wrong with its files is told at once
    return Source(expected, partial(tls_of, args), token)


def _parser() -> Parser:
    parser = Parser(
        prog="dispatcher top",
        description="A live view of one dispatcher: what is lost, which rank is slow, what it "
        "waits for.",
        epilog=EPILOG,
    )
    add_address(
        parser,
        ready_file="the dispatcher that writes this file (serve --ready-file), also once it is "
        "another",
    )
    add_credentials(parser)
    parser.add_argument("--interval", default="1s", help="how often to look [%(default)s]")
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    return parser
