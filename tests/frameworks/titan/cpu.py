"""Runs a program as torchtitan runs on a GPU, on a CPU: it asks torch for an accelerator's module.

    python tests/frameworks/titan/cpu.py MODULE_OR_FILE ARGUMENTS ...

torch.cpu stands in for it, and knows nothing of its memory. FlexAttention has no backward pass on
a CPU: attention with the mask that it was given stands in for it. Gloo divides no gradients before
it adds them up, so FSDP does. And on a CPU each rank draws its part of the weights by itself: here
they are the same however many ranks there are, so that gradients can be compared.
"""

import runpy
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import distribute_tensor
from torch.nn.attention.flex_attention import create_mask
from torch.nn.functional import scaled_dot_product_attention


def shim() -> None:
    """Before torchtitan is imported."""
    cpu: Any = torch.cpu
    utils: Any = torch._utils
    utils._get_available_device_type = lambda: "cpu"
    nothing = SimpleNamespace(total_memory=1)
    cpu.get_device_name = lambda _: "cpu"
    cpu.get_device_properties = lambda _: nothing
    cpu.memory_stats = lambda _: {}
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda *_: None
    distributed: Any = torch.distributed
    barrier = distributed.barrier
    distributed.barrier = lambda group=None, **_: barrier(group)  # gloo knows no device_ids
    distributed.set_timeout = lambda *_, **__: None  # of a torch that is newer than ours
    from torchtitan.models.common.attention import FlexAttention  # noqa: PLC0415  not before

    FlexAttention.compiled_flex_attn = staticmethod(_attention)
    from torchtitan.trainer import Trainer  # noqa: PLC0415

    train = Trainer.train

    def train_from_the_same_weights(trainer: Any) -> None:
        _draw_weights(trainer.model_parts)
        train(trainer)

    Trainer.train = train_from_the_same_weights
    fsdp: Any = FSDPModule
    divide = fsdp.set_gradient_divide_factor

    def divide_beforehand(module: FSDPModule, factor: float) -> None:
        divide(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    fsdp.set_gradient_divide_factor = divide_beforehand


def _draw_weights(parts: Any) -> None:
    torch.manual_seed(0)
    for parameter in [each for part in parts for each in part.parameters()]:
        whole = torch.randn(parameter.shape) * 0.05 + (parameter.ndim == 1)
        drawn = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        with torch.no_grad():
            parameter.copy_(drawn)


def _attention(query: Any, key: Any, value: Any, *, block_mask: Any, **options: Any) -> Any:
    """What flex attention computes, [n, heads, tokens, width], with the whole mask in memory."""
    tokens = query.shape[-2]
    mask = create_mask(block_mask.mask_mod, 1, 1, tokens, tokens, device="cpu")
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=options["scale"], enable_gqa=options["enable_gqa"]
    ), None


if __name__ == "__main__":
    shim()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
