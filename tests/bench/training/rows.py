"""What the rows are, and what is measured of each."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

Record = dict[str, float]


@dataclass(frozen=True, slots=True)
class Measured:
    """One row of one repetition.

    wait_share: of the ranks' time, waiting for each other. data_wait_share: waiting for samples.
    """

    tokens_per_second: float
    wait_share: float
    data_wait_share: float

    @classmethod
    def of(cls, folder: Path, name: str) -> "Measured":
        """From what the ranks wrote down."""
        ranks = [
            [json.loads(line) for line in path.read_text().splitlines()]
            for path in sorted(folder.glob(f"{name}.rank*.jsonl"))
        ]
        spent = sum(_total(rank, "step_s") for rank in ranks)
        return cls(
            tokens_per_second=sum(_total(rank, "tokens") for rank in ranks)
            / max(_total(rank, "step_s") for rank in ranks),
            wait_share=sum(_total(rank, "wait_s") for rank in ranks) / spent,
            data_wait_share=sum(_total(rank, "data_s") for rank in ranks) / spent,
        )


def medians(repetitions: Sequence[Mapping[str, Measured]]) -> list[dict[str, Any]]:
    """A row for each name, as it is written down; `beside`: its rate over the dataloader's."""
    rows = []
    for name in repetitions[0]:
        found = [each[name] for each in repetitions]
        first = beside(name)
        ratios = [
            each[name].tokens_per_second / each[first].tokens_per_second for each in repetitions
        ]
        rates = [one.tokens_per_second for one in found]
        rows.append(
            {
                "name": name,
                "tokens_per_second": median(rates),
                "wait_share": median(one.wait_share for one in found),
                "data_wait_share": median(one.data_wait_share for one in found),
                "of_dataloader": median(ratios),
                "lowest": min(rates),
                "highest": max(rates),
                "repetitions": len(found),
            }
        )
    return rows


def beside(name: str) -> str:
    """The row with DataLoader's order that another is measured beside."""
    case, colon, _ = name.partition(":")
    return f"{case}:dataloader" if colon else "dataloader"


def line(row: Mapping[str, Any]) -> str:
    """A row as it is printed."""
    return (
        f"{row['name']:32} {row['tokens_per_second']:9,.0f} tokens/s  "
        f"{row['of_dataloader']:5.2f} of the dataloader's  "
        f"waiting {100 * row['wait_share']:5.1f} %  for data {100 * row['data_wait_share']:5.1f} %"
    )


def _total(records: Sequence[Record], name: str) -> float:
    return sum(record[name] for record in records)
