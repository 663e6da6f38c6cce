"""Runs a program on verl's engines without a GPU: a platform for verl that is the CPU.

python tests/frameworks/verl/cpu.py FILE ARGUMENTS ...
"""

import contextlib
import os
import runpy
import sys
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform


class PlatformCPU(PlatformCUDA):
    """What an engine asks of a device, answered by the CPU."""

    device_name = "cpu"
    vendor_name = "cpu"

    @property
    def device_module(self) -> Any:
        """torch.cpu, which knows nothing of memory."""
        nothing = dict.fromkeys(("empty_cache", "reset_peak_memory_stats"), lambda *_: None)
        return SimpleNamespace(
            **{**vars(torch.cpu), **nothing},
            memory_allocated=lambda *_: 0,
            memory_reserved=lambda *_: 0,
            mem_get_info=lambda *_: (0, 0),
        )

    def is_available(self) -> bool:
        """It always is."""
        return True

    def current_device(self) -> Any:
        """What tensors are moved to."""
        return "cpu"

    def set_device(self, device_index: int) -> None:
        """There is one."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing runs beside the caller."""

    def empty_cache(self) -> None:
        """There is none."""

    def communication_backend_name(self) -> str:
        """Of process groups."""
        return "gloo"

    def nvtx_range(self, msg: str) -> Any:
        """No profiler."""
        return contextlib.nullcontext()


def main() -> None:
    """Become the program."""
    set_platform(PlatformCPU())
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # the engine for CUDA is the one to run
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
