"""The code of docs/planner.md, and stand-ins for the parts of frameworks' types that it uses."""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.source import ROOT

DOC = ROOT / "docs" / "planner.md"


def seam(name: str, **framework: Any) -> dict[str, Any]:
    """What the block that defines `name` leaves behind, with what a framework has at hand."""
    blocks = re.findall(r"```python\n(.*?)```", DOC.read_text(), flags=re.DOTALL)
    (found,) = [text for text in blocks if f"def {name}(" in text]
    lines = [
        line for line in found.splitlines() if line and not line.startswith(("import", "from"))
    ]
    assert len(lines) <= 30
    exec(found, framework)
    return framework


def padded(lengths: list[int]) -> dict[str, Tensor]:
    """Rows of tokens that say their own number, padded on the right."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"input_ids": torch.arange(len(lengths))[:, None] * mask, "attention_mask": mask.long()}


@dataclass
class DataProto:
    """verl's: tensors of a batch, reordered in place."""

    batch: dict[str, Tensor]

    def reorder(self, indices: Tensor) -> None:
        self.batch = {name: value[indices] for name, value in self.batch.items()}


def select(batch: dict[str, Any], rows: list[int]) -> list[int]:
    """Verl's `index_select_tensor_dict`, as far as which rows it takes."""
    assert rows, "verl makes no jagged tensor of no rows"
    return rows
