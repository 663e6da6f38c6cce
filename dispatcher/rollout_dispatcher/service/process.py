"""Resources of the process: memory, threads that may hang, the log.

Log lines are text on a terminal, and else one JSON object a line. Messages quote names that peers
choose. Invariant: a record is one line of bounded length without control characters; a traceback
follows in indented lines. The log grows at a bounded rate: each logging statement writes `BURST`
lines in `PERIOD_SECONDS`, and the next one has the number that was left out. Lines that strangers
can cause have a `kind`, of which a `FEW` each are written; metrics count them all.

glibc returns the free end of its heap to the kernel, and gets it back page by page, each zeroed:
with samples of 1 MB an eighth of the dispatcher's system time or more. Here it keeps `KEPT_BYTES`.
"""

import asyncio
import ctypes
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TypeVar

from rollout_dispatcher.hints import harmless
from rollout_dispatcher.service.config.values import LogFormat, LogLevel

log = logging.getLogger(__name__)

#: Files with a control group's limit: of version 2 (no controller is named), and of version 1.
_FILES = {"": ("", "memory.max"), "memory": ("memory", "memory.limit_in_bytes")}


def machine_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory without swap. root: the folder of /proc and /sys, for tests."""
    return min(_machine(root / "proc/meminfo"), *_groups(root))


def _machine(meminfo: Path) -> int:
    with suppress(OSError):
        if found := re.search(r"^MemTotal:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE):
            return int(found[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _groups(root: Path) -> Iterator[int]:
    """Yield the limits of this process's groups, from its own to the root."""
    lines: list[str] = []
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in {"", "memory"} & set(controllers.split(",")):
            folder, file = _FILES[controller]
            group = PurePosixPath(path.lstrip("/"))
            for above in (group, *group.parents):
                yield from _limit(root / "sys/fs/cgroup" / folder / above / file)
    yield 2**63  # no group, no limit


def _limit(file: Path) -> Iterator[int]:
    with suppress(OSError, ValueError):  # `max` is no number
        yield int(file.read_text())


T = TypeVar("T")


async def in_own_thread(work: Callable[[], T], undo: Callable[[T], object] = lambda _: None) -> T:
    """Return the result of `work`. Its thread does not delay the end of the process if it hangs.

    undo: called in a thread with the result if the call was cancelled meanwhile.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            with suppress(InvalidStateError):
                future.set_exception(error)
            return
        try:
            future.set_result(result)
        except InvalidStateError:  # cancelled, as the call was
            undo(result)

    threading.Thread(target=run, daemon=True).start()
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if not future.cancel() and future.exception() is None:  # the result came at the same time
            threading.Thread(target=undo, args=(future.result(),), daemon=True).start()
        raise


#: Free memory to keep at the end of the heap: about the bytes received while a step is committed.
KEPT_BYTES = 128 * 2**20
#: Memory to get from the kernel at a time; unused pages take up none.
GROWTH_BYTES = 16 * 2**20
#: Larger blocks are mapped one by one; glibc allows no more than this.
LARGEST_ON_HEAP = 32 * 2**20

#: Parameters of mallopt, from glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory() -> bool:
    """Set glibc's parameters for this process; returns whether it is glibc and did."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    options = {
        _M_TRIM_THRESHOLD: KEPT_BYTES,
        _M_TOP_PAD: GROWTH_BYTES,
        _M_MMAP_THRESHOLD: LARGEST_ON_HEAP,
    }
    return all(mallopt(option, nbytes) == 1 for option, nbytes in options.items())


#: More than a fleet of ranks or producers causes when it connects or leaves.
BURST = 1000
#: Anybody who reaches a port can cause thousands of refused connections a second.
FEW = 10
PERIOD_SECONDS = 60.0


class Repeats(logging.Filter):
    """Drops lines that are too frequent. clock: in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._periods: dict[tuple[str, int, str], _Period] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write this line; adds the number that was left out before it."""
        now, kind = self._clock(), getattr(record, "kind", "")
        where, most = (record.pathname, record.lineno, kind), FEW if kind else BURST
        period = self._periods.get(where)
        if period is None or now >= period.start + PERIOD_SECONDS:
            self._periods[where] = _Period(now)
            if period is not None and period.lines > most:
                left_out = period.lines - most
                record.msg = f"{record.getMessage()} ({left_out} more like this were left out)"
                record.args, record.left_out = None, left_out
            return True
        period.lines += 1
        return period.lines <= most


@dataclass(slots=True)
class _Period:
    """Lines of one statement since `start`, the first included."""

    start: float
    lines: int = 1


class TextFormatter(logging.Formatter):
    """Time, level and message; a traceback follows, indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's name
        """Write one line."""
        record.message = harmless(record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        """Write the record as text."""
        first, *others = super().format(record).split("\n")
        return "\n".join((first, *(f"    {harmless(line)}" for line in others)))


#: Fields of a line beside its message, given as `extra`; event: in a word.
FIELDS = ("event", "run_id", "dp_rank", "step", "producer", "peer", "left_out")


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, its FIELDS, and any traceback.

    run_id: of each line, once it is known.
    """

    run_id = ""

    def format(self, record: logging.LogRecord) -> str:
        """Write the record as JSON."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": harmless(record.getMessage()),
        }
        given = {"run_id": self.run_id} | vars(record)
        for name in FIELDS:
            if (value := given.get(name, "")) != "":
                line[name] = harmless(value) if isinstance(value, str) else value
        if record.exc_info:
            traceback = self.formatException(record.exc_info)
            line["traceback"] = "\n".join(map(harmless, traceback.split("\n")))
        return json.dumps(line)


def name_run(run_id: str) -> None:
    """Put the run's id into every JSON line."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            handler.formatter.run_id = run_id


def set_up(level: LogLevel, form: LogFormat) -> None:
    """Log to standard error from `level` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Repeats())
    as_text = form is LogFormat.TEXT or (form is LogFormat.AUTO and sys.stderr.isatty())
    handler.setFormatter(TextFormatter() if as_text else JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
