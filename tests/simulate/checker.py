"""Checks the file that `--plans` writes, from nothing but their lines and the samples' lengths.

Independent of the simulator: it reads JSON, counts for itself and raises AssertionError.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rollout_planner.cost import Quadratic

Key = tuple[float, str]


@dataclass(slots=True)
class Account:
    """What one strategy at one window has done so far."""

    arrived: dict[str, int] = field(default_factory=dict)
    gone: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    delays: Counter[int] = field(default_factory=Counter)
    held: list[int] = field(default_factory=list)
    time: float = 0.0
    work: float = 0.0
    last_step: int | None = None

    @property
    def excess(self) -> float:
        """Ratio of sums over the steps that count."""
        return self.time / self.work - 1


def check_books(path: Path, tokens: Mapping[int, int], *, max_skips: int) -> dict[Key, Account]:
    """Read every line; each key arrives once, goes once and not before it came, in time.

    tokens: of each row of the trace. Packed layout and micro-step sync, default cost.
    """
    accounts: dict[Key, Account] = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        account = accounts.setdefault((line["window"], line["strategy"]), Account())
        _check_line(account, line, tokens, max_skips)
    return accounts


def _check_line(
    account: Account, line: Mapping[str, Any], tokens: Mapping[int, int], max_skips: int
) -> None:
    step = line["step"]
    assert account.last_step is None or step == account.last_step + 1
    account.last_step = step
    for key in line["arrived"]:
        assert key not in account.arrived, f"{key} arrived twice"
        assert int(key.partition("-")[2]) in tokens
        account.arrived[key] = step
    for key, reason in line["dropped"].items():
        assert key not in account.arrived
        account.dropped[key] = reason
    account.held.append(len(account.arrived) - len(account.gone))
    chosen = [key for rank in line["ranks"] for part in rank for key in part]
    assert len({len(rank) for rank in line["ranks"]}) == 1, "ranks differ in micro-batches"
    for key in chosen:
        assert key in account.arrived, f"{key} was dispatched before it arrived"
        assert key not in account.gone, f"{key} was dispatched twice"
        account.gone[key] = step
        delay = step - account.arrived[key]
        assert delay == line["skips"].get(key, 0), "skips are not the dispatches that passed it"
        assert delay <= max_skips, f"{key} was passed over {delay} times"
        if step >= 0:
            account.delays[delay] += 1
    for key in account.arrived.keys() - account.gone.keys():
        assert step - account.arrived[key] < max_skips, f"{key} is overdue"
    account.sizes.append(len(chosen))
    if step >= 0:
        _add_cost(account, line["ranks"], tokens)


def _add_cost(
    account: Account, ranks: Sequence[Sequence[Sequence[str]]], tokens: Mapping[int, int]
) -> None:
    cost = Quadratic()
    matrix = np.array(
        [
            [
                sum(float(cost(np.array([tokens[int(key.partition("-")[2])]]))[0]) for key in part)
                for part in rank
            ]
            for rank in ranks
        ]
    )
    account.time += float(matrix.max(axis=0).sum())
    account.work += float(matrix.sum()) / len(ranks)
