"""Runs an example as it stands, and writes down the gradients of its first step.

    torchrun ... tests/examples/recorded.py DTYPE GRADIENTS.pt examples/NAME ARGUMENTS ...

What the optimizer finds when it makes its first step is what the integration has to get right:
weights, scales, fillers and the reduction over ranks. Sharded gradients are written whole. DTYPE is
what the example computes in unless it says otherwise.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook


def main() -> None:
    """Become the example."""
    dtype, out, script, *arguments = sys.argv[1:]
    torch.set_default_dtype(getattr(torch, dtype))
    register_optimizer_step_pre_hook(Recorder(Path(out)))
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


class Recorder:
    """Called before each step of each optimizer; every rank takes part, rank 0 writes."""

    def __init__(self, out: Path) -> None:
        self._out, self._done = out, False

    def __call__(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Write the gradients of the first step, in the order of the parameters."""
        if self._done:
            return
        self._done = True
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        found = [_whole(each.grad) for each in parameters if each.grad is not None]
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.save(found, self._out)


def _whole(gradient: Any) -> torch.Tensor:
    whole: torch.Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return whole.detach().cpu().clone()


if __name__ == "__main__":
    main()
