"""The terminal: keys and answers in, frames out, and everything as it was at the end.

One thread asks, so that a dispatcher that hangs does not keep `q` from working; this one draws.
A pipe wakes it: for an answer, and for signals (a resize). Only what has changed is written.
"""

import os
import queue
import re
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rollout_dispatcher.cli.top.frame import Frame, Screen, frame, unanswered
from rollout_dispatcher.cli.top.history import History
from rollout_dispatcher.cli.top.line import Line
from rollout_dispatcher.cli.top.reading import Reading
from rollout_dispatcher.cli.top.source import NoAnswer, Source
from rollout_dispatcher.cli.top.view import Away, view
from rollout_dispatcher.cli.top.words import Glyphs
from rollout_dispatcher.errors import ConfigError

#: Keys that scroll, by so many rows; `page` is a screen of ranks.
_SCROLLS = {
    b"\x1b[A": -1, b"\x1bOA": -1, b"k": -1, b"\x1b[B": 1, b"\x1bOB": 1, b"j": 1,
    b"\x1b[5~": -20, b"\x1b[6~": 20, b" ": 20, b"\x1b[H": -(10**6), b"g": -(10**6),
    b"\x1b[F": 10**6, b"G": 10**6,
}  # fmt: skip
#: One key: an escape sequence, or a character.
_KEY = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
#: An answer that is late by so much is told; one look may take a moment.
_LATE_SECONDS = 3.0
#: Between two looks in any case, however long one takes.
MIN_PAUSE = 0.05


def show(source: Source, interval: float, glyphs: Glyphs) -> int:
    """Until `q`, which gives 0; what ends it otherwise goes on from here."""
    woken, wake = os.pipe()
    for end in woken, wake:
        os.set_blocking(end, False)
    asker = _Asker(source, interval, wake)
    picture = _Picture(source, glyphs)
    with _keys_unread(), _signals(wake), _screen() as live:
        asker.start()
        while True:
            picture.hear(asker.answers())
            picture.draw(live)
            ready, _, _ = select.select([sys.stdin, woken], [], [], max(1.0, interval))
            if woken in ready:
                os.read(woken, 4096)
            if sys.stdin in ready:
                keys = os.read(sys.stdin.fileno(), 64)
                if not keys or not picture.pressed(keys):
                    return 0


class _Asker(threading.Thread):
    """Asks every interval; daemonic, as an answer may never come."""

    def __init__(self, source: Source, interval: float, wake: int) -> None:
        super().__init__(name="asker", daemon=True)
        self._source, self._interval, self._wake = source, interval, wake
        self._answers: queue.SimpleQueue[Reading | NoAnswer] = queue.SimpleQueue()

    def run(self) -> None:
        """Ask for good."""
        while True:
            began = time.monotonic()
            self._answers.put(self._ask())
            with suppress(BlockingIOError):  # full: who draws will look in any case
                os.write(self._wake, b"a")
            time.sleep(max(MIN_PAUSE, self._interval - (time.monotonic() - began)))

    def answers(self) -> list[Reading | NoAnswer]:
        """What has come since."""
        return [self._answers.get() for _ in range(self._answers.qsize())]

    def _ask(self) -> Reading | NoAnswer:
        try:
            return self._source.read()
        except NoAnswer as error:
            return error
        except ConfigError as error:  # of a file that may be another one soon
            return NoAnswer(str(error))


class _Picture:
    """What is on the screen, and what it is made from."""

    def __init__(self, source: Source, glyphs: Glyphs) -> None:
        self._source, self._glyphs = source, glyphs
        self._history = History()
        self._answered, self._answered_at = time.monotonic(), time.localtime()
        self._why = ""
        self._offset = 0
        self._drawn: tuple[int, int, list[Line]] | None = None

    def hear(self, answers: list[Reading | NoAnswer]) -> None:
        """Take what came."""
        for answer in answers:
            if isinstance(answer, Reading):
                self._history.add(answer)
                self._answered, self._answered_at, self._why = answer.at, time.localtime(), ""
            else:
                self._why = str(answer)

    def pressed(self, keys: bytes) -> bool:
        """Do what the keys say; False for the end."""
        for key in _KEY.findall(keys):
            if key in (b"q", b"Q"):
                return False
            self._offset = max(0, self._offset + _SCROLLS.get(key, 0))
        return True

    def draw(self, live: Live) -> None:
        """Show how it is now, if that is another picture than the last."""
        width, height = live.console.size
        made = self._frame(width, height)
        self._offset = made.offset
        if (width, height, made.lines) != self._drawn:
            self._drawn = width, height, made.lines
            live.update(_as_text(made.lines), refresh=True)

    def _frame(self, width: int, height: int) -> Frame:
        screen = Screen(width, height, self._glyphs, self._offset)
        away = self._away()
        if not self._history.readings:
            return unanswered(self._source.address, screen, away)
        return frame(view(self._history), self._source.address, screen, away)

    def _away(self) -> Away | None:
        silent = time.monotonic() - self._answered
        if not self._why and silent < _LATE_SECONDS and self._history.readings:
            return None
        since = time.strftime("%H:%M:%S", self._answered_at)
        return Away(since, silent, self._why or "it takes its time")


def _as_text(lines: list[Line]) -> Text:
    text = Text(no_wrap=True, overflow="crop", end="")
    for number, line in enumerate(lines):
        if number:
            text.append("\n")
        for words, style in line.spans:
            text.append(words, style.value)
    return text


@contextmanager
def _screen() -> Iterator[Live]:
    """The terminal's other screen, without a cursor; the first comes back as it was."""
    with Live(console=Console(), screen=True, auto_refresh=False) as live:
        yield live


@contextmanager
def _keys_unread() -> Iterator[None]:
    """Keys come one by one and are not shown; Ctrl-C is what it was, and Ctrl-Z is nothing."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSAFLUSH, before)


@contextmanager
def _signals(wake: int) -> Iterator[None]:
    """A resize wakes; what ends a process ends it in order; it is not stopped with its screen."""
    handlers: dict[signal.Signals, Callable[[int, object], None] | signal.Handlers] = {
        signal.SIGWINCH: lambda *_: None,
        signal.SIGTERM: _leave,
        signal.SIGHUP: _leave,
        signal.SIGTSTP: signal.SIG_IGN,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    fd = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(fd)
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, _: object) -> None:
    sys.exit(128 + number)
