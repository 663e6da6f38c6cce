"""Length traces: a CSV file (gzip or not) or a built-in profile, as columns of numbers.

Columns `arrival_s,group,run,prompt_tokens,response_tokens,truncated`, in any order, others are
ignored; an empty cell is unknown and counts as no tokens. Invariants: a sample keeps the number
of its row in the file, whatever is filtered; every sample has at least one token (rows without
any are left out and counted); what cannot be read names the file and the line.
"""

import csv
import difflib
import gzip
import io
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.simulate.profiles import PROFILES, sample_lengths
from rollout_planner.types import FloatArray, IntArray

COLUMNS = ("arrival_s", "group", "run", "prompt_tokens", "response_tokens", "truncated")
TOKEN_COLUMNS = ("prompt_tokens", "response_tokens")
#: Samples drawn from a profile: enough for 30 steps of 1024 before lengths come again.
PROFILE_ROWS = 32_768
#: Longer samples are a damaged file; planning squares tokens in float64, exact far beyond this.
MAX_TOKENS = 2**31 - 1
_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Trace:
    """Samples of a trace, in the file's order.

    row: int64[n], zero-based row in the file. tokens: int64[n], prompt plus response, at least 1.
    group: int64[n], equal for samples of one prompt, -1 for none. arrival: float64[n], seconds,
    NaN where the file does not say. empty_rows: rows left out as they hold no tokens.
    """

    name: str
    row: IntArray
    tokens: IntArray
    group: IntArray
    arrival: FloatArray
    empty_rows: int = 0

    def __len__(self) -> int:
        return len(self.tokens)


def load_trace(source: str, run: str | None = None, seed: int = 0) -> Trace:
    """Read a file, or draw from the built-in profile of that name.

    run: keep only the rows whose `run` cell is this. Raises ConfigError.
    """
    path = Path(source)
    if path.exists():
        return _from_file(path, run)
    if source in PROFILES:
        if run is not None:
            raise ConfigError(f"--run {run}: a built-in profile has no runs; leave the flag out")
        return _from_profile(source, seed)
    found = difflib.get_close_matches(source, PROFILES, n=1)
    hint = f" (did you mean {found[0]}?)" if found else f"; there are {', '.join(PROFILES)}"
    raise ConfigError(f"no trace file {source}, nor a built-in profile of that name{hint}")


def _from_profile(name: str, seed: int) -> Trace:
    tokens = sample_lengths(name, PROFILE_ROWS, np.random.default_rng(seed))
    none = np.full(PROFILE_ROWS, -1, dtype=np.int64)
    unknown = np.full(PROFILE_ROWS, np.nan)
    return Trace(name, np.arange(PROFILE_ROWS), tokens, none, unknown)


def _from_file(path: Path, run: str | None) -> Trace:
    rows: list[int] = []
    tokens: list[int] = []
    groups: list[int] = []
    arrivals: list[float] = []
    numbers: dict[str, int] = {}
    runs: set[str] = set()
    empty = 0
    for number, (line, cells) in enumerate(_records(path)):
        if run is not None:
            runs.add(cells["run"])
            if cells["run"] != run:
                continue
        where = f"{path}, line {line}"
        total = sum(_tokens(where, name, cells[name]) for name in TOKEN_COLUMNS)
        if total < 1:
            empty += 1
            continue
        group = cells["group"]
        rows.append(number)
        tokens.append(total)
        groups.append(numbers.setdefault(group, len(numbers)) if group else -1)
        arrivals.append(_seconds(where, cells["arrival_s"]))
    if not rows:
        raise ConfigError(_nothing(path, run, runs))
    return Trace(
        path.name,
        np.array(rows, dtype=np.int64),
        np.array(tokens, dtype=np.int64),
        np.array(groups, dtype=np.int64),
        np.array(arrivals, dtype=np.float64),
        empty,
    )


def _records(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and cells by column, row by row; a column that the file lacks is empty."""
    line = 1
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == _GZIP_MAGIC
        with (gzip.open if zipped else open)(path, "rb") as binary:
            reader = csv.reader(io.TextIOWrapper(binary, encoding="utf-8-sig", newline=""))
            header = [name.strip() for name in next(reader, [])]
            _check_header(path, header)
            unknown = dict.fromkeys(COLUMNS, "")
            for values in reader:
                line = reader.line_num
                if not values:
                    continue
                if len(values) != len(header):
                    raise ConfigError(
                        f"{path}, line {line}: {len(values)} cells under {len(header)} columns"
                    )
                yield line, unknown | dict(zip(header, map(str.strip, values), strict=True))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path} cannot be read after line {line}: {reason}") from None


def _check_header(path: Path, header: list[str]) -> None:
    if not set(TOKEN_COLUMNS) & set(header):
        raise ConfigError(
            f"{path}, line 1: no column {' or '.join(TOKEN_COLUMNS)}; the first line names the "
            f"columns, {','.join(COLUMNS)}"
        )
    if len(set(header)) < len(header):
        raise ConfigError(f"{path}, line 1: a column is named twice")


def _tokens(where: str, column: str, cell: str) -> int:
    if not cell:
        return 0
    if not (cell.isascii() and cell.isdigit() and len(cell) < 20 and int(cell) <= MAX_TOKENS):
        raise ConfigError(f"{where}: {column} is {cell!r}; write a whole number up to {MAX_TOKENS}")
    return int(cell)


def _seconds(where: str, cell: str) -> float:
    if not cell:
        return math.nan
    try:
        seconds = float(cell)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise ConfigError(f"{where}: arrival_s is {cell!r}; write seconds, or nothing if unknown")
    return seconds


def _nothing(path: Path, run: str | None, runs: set[str]) -> str:
    if run is None or run in runs:
        return f"{path} holds no sample with any tokens"
    shown = sorted(runs, key=lambda name: (len(name), name))
    more = ", ..." if len(shown) > 20 else ""
    return f"--run {run}: no such run in {path}; it has {', '.join(shown[:20])}{more}"
