"""Gradients as ranks had them, step by step, beside those of one process with the whole batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollout_workers import Step


@dataclass(slots=True)
class Diary:
    """What one rank had at each step: its samples, its parameters before, and its gradient."""

    steps: list[dict[str, Any]] = field(default_factory=list)

    def note(self, step: Step, model: nn.Module) -> None:
        """Call it once the gradients are reduced, and before the optimizer's step."""
        real = [each for each in step if not each.is_filler]
        self.steps.append(
            {
                "number": step.number,
                "micro_batches": len(step),
                "samples": [name for each in real for name in each.sample_ids],
                "parameters": _flat([item.detach() for item in model.parameters()]),
                "gradient": _flat([item.grad for item in model.parameters()]),
            }
        )

    def save(self, folder: Path, rank: int) -> None:
        """Write it where `largest_difference` looks."""
        torch.save(self.steps, folder / f"diary-{rank}.pt")


def diaries(folder: Path) -> list[list[dict[str, Any]]]:
    """By rank, what each noted of every step."""
    return [torch.load(path) for path in sorted(folder.glob("diary-*.pt"))]


def largest_difference(
    ranks: Sequence[Sequence[dict[str, Any]]],
    model: nn.Module,
    loss: Callable[[nn.Module, list[str]], Tensor],
) -> float:
    """The largest of any element on any rank, relative to its step's largest gradient.

    loss: of a model and the ids of all samples of a step, as one process computes it.
    """
    worst = 0.0
    for views in zip(*ranks, strict=True):
        _fill(model, views[0]["parameters"].to(next(model.parameters()).dtype))
        model.zero_grad()
        total = loss(model, [name for view in views for name in view["samples"]])
        total.backward()  # type: ignore[no-untyped-call]
        expected = _flat([item.grad for item in model.parameters()])
        for view in views:
            assert torch.equal(view["parameters"], views[0]["parameters"])
            apart = (view["gradient"] - expected).abs().max() / expected.abs().max()
            worst = max(worst, float(apart))
    return worst


def _flat(tensors: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([item.reshape(-1).clone() for item in tensors if item is not None])


def _fill(model: nn.Module, values: Tensor) -> None:
    with torch.no_grad():
        nn.utils.vector_to_parameters(values, model.parameters())
