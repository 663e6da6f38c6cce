"""Length traces: a CSV file (gzip or not) or a built-in profile, as columns of numbers.

A profile (`profiles.jsonl` beside this) is the distribution of prompt plus response tokens of one
public trace, as quantiles at `PROBABILITIES` (dense in the upper tail), with source and licence.
Samples invert it with linear interpolation: the Kolmogorov-Smirnov distance from the trace is about
0.01 or less, and lengths stay within the trace's.

A file has the columns `arrival_s,group,run,prompt_tokens,response_tokens,truncated`, in any order;
others are ignored. An empty cell is unknown and counts as no tokens. Invariants: a sample keeps the
number of its row in the file, whatever is filtered; every sample has at least one token (rows
without any are left out and counted); errors name file and line.
"""

import csv
import difflib
import gzip
import io
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rollout_dispatcher.core.buffer.entry import NO_LIMITS, MicroBatchLimits
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.sample import Sample, Schema
from rollout_planner.types import BoolArray, FloatArray, IntArray, round_up

COLUMNS = ("arrival_s", "group", "run", "prompt_tokens", "response_tokens", "truncated")
TOKEN_COLUMNS = ("prompt_tokens", "response_tokens")
#: Samples drawn from a profile: 30 steps of 1024 before lengths repeat.
PROFILE_ROWS = 32_768
#: A longer sample means a damaged file.
MAX_TOKENS = 2**31 - 1
_GZIP_MAGIC = b"\x1f\x8b"
#: In 64ths, the last of `PROBABILITIES`.
_TAIL = (60, 60.5, 61, 61.5, 62, 62.5, 62.75, 63, 63.25, 63.5, 63.68, 63.84, 63.92, 63.968, 64)
PROBABILITIES: FloatArray = np.array([*range(60), *_TAIL]) / 64


#: Samples that arrive together: one, or a whole group.
Unit = tuple[Sample, ...]
#: All rows of a table share the samples. Beyond this number they are made again for each row, as a
#: million take some 200 MB.
KEPT_SAMPLES = 1_000_000

_NO_FIELDS = Schema(())
_NO_PAYLOAD = memoryview(b"")


@dataclass(frozen=True, slots=True)
class Profile:
    """Quantiles of the tokens of a sample, ascending, one for each of `PROBABILITIES`."""

    name: str
    what: str
    source: str
    licence: str
    quantiles: tuple[int, ...]


_FILE = Path(__file__).with_name("profiles.jsonl")
PROFILES: dict[str, Profile] = {
    data["name"]: Profile(**data | {"quantiles": tuple(data["quantiles"])})
    for data in map(json.loads, _FILE.read_text(encoding="utf-8").splitlines())
}


def sample_lengths(profile: str, n: int, rng: np.random.Generator, scale: float = 1.0) -> IntArray:
    """Draw the tokens of n samples, int64[n], each times `scale` and at least 1.

    Raises ConfigError that lists the profiles if there is none of this name.
    """
    if profile not in PROFILES:
        raise ConfigError(f"no length profile {profile!r}; there are {', '.join(PROFILES)}")
    lengths = np.interp(rng.random(n), PROBABILITIES, PROFILES[profile].quantiles)
    return np.maximum(np.rint(lengths * scale), 1).astype(np.int64)


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
    """Line number and cells by column, of each row; cells of a missing column are empty."""
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


def grouped(trace: Trace, size: int | None, *, needed: bool) -> Trace:
    """The trace, with groups of `size` consecutive samples if it names no groups.

    Raises ConfigError if groups are `needed` and there are none.
    """
    if (trace.group >= 0).any():
        return trace
    if size is not None:
        return replace(trace, group=np.arange(len(trace)) // size)
    if needed:
        raise ConfigError(
            f"--global-batch-groups counts groups, and {trace.name} names none; add --group-size N "
            "for groups of N consecutive samples, or a column group"
        )
    return trace


# -- samples in their order of arrival --------------------------------------------------------


def bare_sample(sample_id: str, tokens: int, group: str | None = None, size: int = 1) -> Sample:
    """A sample without payload; all its tokens but the first count in the loss."""
    return Sample(sample_id, tokens, tokens - 1, _NO_FIELDS, _NO_PAYLOAD, group, size)


class Epochs:
    """The samples of a trace without end: epochs, each a seeded permutation.

    Invariant: the order depends on trace, seed and whether groups stay together alone, so all rows
    of a table get the same samples in the same order. A sample's id is "epoch-row": "0-17" is row
    17 of the file, in the first epoch.
    """

    def __init__(self, trace: Trace, seed: int, *, whole_groups: bool) -> None:
        self.trace = trace
        self._seed = seed
        self._units = _units(trace.group) if whole_groups else None
        self._kept: dict[int, list[Unit]] = {}

    def __iter__(self) -> Iterator[Unit]:
        epoch = 0
        while True:
            yield from self._epoch(epoch)
            epoch += 1

    def once_in_order_of_arrival(self) -> Iterator[tuple[float, Sample]]:
        """Time of arrival and sample, as epoch 0; all times must be known."""
        trace = self.trace
        sizes = np.bincount(trace.group[trace.group >= 0], minlength=1)
        for at in np.argsort(trace.arrival, kind="stable").tolist():
            group = int(trace.group[at])
            size = int(sizes[group]) if group >= 0 else 1
            yield float(trace.arrival[at]), self._sample(0, at, group, size)

    def _epoch(self, epoch: int) -> list[Unit]:
        if epoch in self._kept:
            return self._kept[epoch]
        rng = np.random.default_rng((self._seed, epoch))
        if self._units is None:
            order = rng.permutation(len(self.trace)).tolist()
            units: list[Unit] = [(self._sample(epoch, at, -1, 1),) for at in order]
        else:
            units = []
            for which in rng.permutation(len(self._units)).tolist():
                members = self._units[which].tolist()
                group = int(self.trace.group[members[0]])
                units.append(tuple(self._sample(epoch, at, group, len(members)) for at in members))
        if (len(self._kept) + 1) * len(self.trace) <= KEPT_SAMPLES:
            self._kept[epoch] = units
        return units

    def _sample(self, epoch: int, at: int, group: int, size: int) -> Sample:
        name = None if group < 0 else f"{epoch}-{group}"
        tokens = int(self.trace.tokens[at])
        return bare_sample(f"{epoch}-{self.trace.row[at]}", tokens, name, size)


def doomed(
    trace: Trace,
    longest: int | None,
    *,
    whole_groups: bool,
    micro_batch: MicroBatchLimits = NO_LIMITS,
) -> BoolArray:
    """Samples of more than `longest` tokens (None: none), with their groups if `whole_groups`.

    micro_batch: limits of a group; members of groups that are dropped for these are included.
    """
    gone: BoolArray = np.zeros(len(trace), np.bool_) if longest is None else trace.tokens > longest
    if micro_batch.drops and micro_batch.tokens is not None:
        tokens = round_up(trace.tokens, micro_batch.length_multiple)
        _, inverse = np.unique(trace.group, return_inverse=True)
        gone |= (trace.group >= 0) & (np.bincount(inverse, tokens)[inverse] > micro_batch.tokens)
    if whole_groups:
        gone |= (trace.group >= 0) & np.isin(trace.group, trace.group[gone])
    return gone


def _units(group: IntArray) -> list[IntArray]:
    """Positions of each group's samples, in order of its first; a sample without one is its own."""
    own = np.where(group < 0, group.max(initial=0) + 1 + np.arange(len(group)), group)
    _, first, inverse, counts = np.unique(
        own, return_index=True, return_inverse=True, return_counts=True
    )
    by_group = np.split(np.argsort(inverse, kind="stable"), np.cumsum(counts)[:-1])
    return [by_group[at] for at in np.argsort(first, kind="stable").tolist()]
