"""The lengths that planners are put beside each other on: drawn ones, and real traces."""

import csv
import gzip
from itertools import groupby

import numpy as np

from rollout_planner.types import IntArray
from tests.bench.cells import TRACES, read_trace

#: Name of a row -> a trace's file.
FILES = {
    "lineage": "lineage_open_reasoning",
    "reasoning_gym": "reasoning_gym_rlvr_g3",
    "azure_conv": "azure2023_conv",
    "azure_code": "azure2023_code",
    "deepseek": "deepseek_r1_arc_g2",
    "tau": "tau_airline_agent_g4",
}
#: Name of a row -> median, deviation of the logarithm, cap.
LOGNORMAL = {"lognormal": (8192, 0.8, 65536), "lognormal wide": (2981, 1.0, 32768)}


def available(name: str) -> bool:
    """Whether these lengths are here: the real traces are not part of the project."""
    return name in LOGNORMAL or (TRACES / f"{FILES[name]}.csv.gz").exists()


def draw(name: str, n: int, seed: int) -> IntArray:
    """`n` independent draws."""
    rng = np.random.default_rng(seed)
    if name in LOGNORMAL:
        median, deviation, cap = LOGNORMAL[name]
        found = rng.lognormal(np.log(median), deviation, n)
        return np.clip(found, 16, cap).astype(np.int64)
    rows = read_trace(TRACES / f"{FILES[name]}.csv.gz")
    return rng.choice(rows[rows > 0], n)


def draw_groups(name: str, groups: int, seed: int) -> tuple[IntArray, IntArray]:
    """Lengths of whole groups, and the group of each; a drawn group has four members alike."""
    rng = np.random.default_rng(seed)
    if name in LOGNORMAL:
        middle = np.repeat(draw(name, groups, seed), 4)
        spread = rng.lognormal(0, 0.3, len(middle))
        lengths = np.clip(middle * spread, 16, LOGNORMAL[name][2]).astype(np.int64)
        return lengths, np.repeat(np.arange(groups), 4)
    pool = _groups(name)
    chosen = [pool[i] for i in rng.integers(len(pool), size=groups)]
    return np.concatenate(chosen), np.repeat(np.arange(groups), [len(one) for one in chosen])


def _groups(name: str) -> list[IntArray]:
    """Groups of a trace that have the commonest size, as trainers draw as many for each prompt."""
    path = TRACES / f"{FILES[name]}.csv.gz"
    with gzip.open(path, "rt", newline="") as file:
        rows = [
            (row["group"], int(row["prompt_tokens"]) + int(row["response_tokens"]))
            for row in csv.DictReader(file)
        ]
    found = [
        np.array([count for _, count in members], np.int64)
        for _, members in groupby(sorted(rows, key=lambda row: int(row[0])), key=lambda row: row[0])
    ]
    sizes = [len(one) for one in found]
    common = max(set(sizes), key=sizes.count)
    return [one for one in found if len(one) == common]
