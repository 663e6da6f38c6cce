"""The functions in examples/seams, and stand-ins for the parts of frameworks' types they use."""

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.support.source import ROOT

SEAMS = ROOT / "examples" / "seams"


def seam(name: str, **framework: Any) -> dict[str, Any]:
    """What the file that defines `name` leaves behind, with what a framework has at hand."""
    texts = [path.read_text() for path in sorted(SEAMS.glob("*.py"))]
    (found,) = [text for text in texts if re.search(rf"^(def|class) {name}\(", text, re.MULTILINE)]
    exec(found, framework)
    return framework


@contextmanager
def at_hand(modules: Mapping[str, Any]) -> Iterator[None]:
    """Modules of frameworks, where `import` finds them."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def module(name: str, **names: Any) -> ModuleType:
    """One that has these names."""
    found = ModuleType(name)
    vars(found).update(names)
    return found


def padded(lengths: list[int]) -> dict[str, Tensor]:
    """Rows of tokens that say their own number, padded on the right."""
    numbers, mask = row_numbers(lengths).values()
    return {"input_ids": numbers * mask, "attention_mask": mask.long()}


def row_numbers(lengths: list[int]) -> dict[str, Tensor]:
    """The same where there are many long rows: their number, and a mask of bytes."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"input_ids": torch.arange(len(lengths))[:, None], "attention_mask": mask}


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


@dataclass
class KVBatchMeta:
    """NeMo-RL's: who is in a batch, without tensors."""

    sample_ids: list[Any]
    sequence_lengths: list[int]
    extra_info: dict[str, Any] = field(default_factory=dict)
    tags: list[dict[str, Any]] | None = None

    def concat(self, *others: "KVBatchMeta") -> "KVBatchMeta":
        """All of them, in order."""
        names, lengths = list(self.sample_ids), list(self.sequence_lengths)
        for other in others:
            names += other.sample_ids
            lengths += other.sequence_lengths
        return KVBatchMeta(names, lengths)


@dataclass
class ReplayBuffer:
    """NeMo-RL's: a slot of each prompt group."""

    meta_list: list[KVBatchMeta] = field(default_factory=list)
    start_weight_list: list[int] = field(default_factory=list)
    ready_list: list[bool] = field(default_factory=list)

    def add(self, meta: KVBatchMeta, weight: int) -> None:
        self.meta_list.append(meta)
        self.start_weight_list.append(weight)
        self.ready_list.append(True)

    async def remove(self, rows: list[int], *, remove_in_dp: bool) -> int:
        assert not remove_in_dp, "what is selected stays where it is"
        for row in sorted(rows, reverse=True):
            del self.meta_list[row], self.start_weight_list[row], self.ready_list[row]
        return len(rows)


def shown(heading: str, language: str = "python") -> str:
    """The first block of a section of docs/planner.md, in this language."""
    _, found, section = (ROOT / "docs" / "planner.md").read_text().partition(f"### {heading}\n")
    block = re.search(rf"```{language}\n(.*?)```", section.partition("\n##")[0], re.DOTALL)
    assert found
    assert block is not None
    return block[1]
