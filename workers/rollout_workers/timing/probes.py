"""Probes in a trainer's model, where it waits for other ranks: DDP's, and FSDP2's.

DDP begins its all-reduces during the backward pass and waits for all of them at its end, in a
callback that it queues with the autograd engine; the engine runs callbacks in order, those queued
by callbacks too. So one that was queued before DDP's is called when this rank's own backward pass
is complete, and one that it queues itself, when DDP has all gradients:

    forward | backward, all-reduces behind it | DDP waits | optimizer
                                             first      second

A hook on a parameter queues the first: it runs before DDP hears that this parameter is complete,
so before it can know that all are. Whatever communication hook there is, it is waited for there.

FSDP2 is Python, and waits in methods of its own, which are wrapped on this model's objects: for
parameters before they are used, and for gradients. On a GPU it is the stream that waits there, not
the host, so events on it say how long.
"""

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rollout_workers.live_objects import instances
from rollout_workers.timing import running
from rollout_workers.timing.running import Begins, Blocked, EndsBackward

#: Parameters of a DDP model that tell of its backward passes: one would do, were each always used.
PARAMETERS = 4
#: Methods of FSDP2's parameter groups in which it waits, and where it begins what it waits for.
WAITS, BEGINS = ("wait_for_unshard", "post_backward", "finalize_backward"), ("unshard",)
#: That of its states which ends a backward pass.
ENDS = "_root_post_backward_final_callback"
#: Where FSDP2 has been, from torch 2.4 on.
HOMES = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")

_probed: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def probe_all() -> bool:
    """Put probes into every model of this process that has none; whether there is any."""
    return probe(instances(_kinds()))


def probe(modules: Iterable[nn.Module]) -> bool:
    """Put probes into those of these modules that wait for other ranks; whether there is any."""
    found = [module for module in modules if _is_probed(module)]
    return bool(found)


def _is_probed(module: nn.Module) -> bool:
    if module in _probed:
        return True
    if isinstance(module, DistributedDataParallel):
        _probe_ddp(module)
    elif not (isinstance(module, _kinds()) and _probe_fsdp2(module)):
        return False
    _probed.add(module)
    return True


def _kinds() -> tuple[type, ...]:
    """Classes of modules that wait for other ranks, as far as this process has imported them."""
    found = (getattr(sys.modules.get(home), "FSDPModule", None) for home in HOMES)
    return (DistributedDataParallel, *{kind for kind in found if isinstance(kind, type)})


# -- DDP


def _probe_ddp(model: DistributedDataParallel) -> None:
    trained = [p for p in model.module.parameters() if p.requires_grad]
    probe = _Backward(model)
    for parameter in trained[:: max(1, len(trained) // PARAMETERS)][:PARAMETERS]:
        parameter.register_post_accumulate_grad_hook(probe)
    if model.broadcast_buffers and any(True for _ in model.module.buffers()):
        # In place of the method, in this object: rank 0's buffers are waited for there.
        _Eager.call = torch.compiler.disable(Blocked.__call__)  # type: ignore[no-untyped-call]
        vars(model)["_pre_forward"] = _Eager(model._pre_forward)  # noqa: SLF001


class _Eager(Blocked):
    """Left out by compilers, as the collective in it is: no clock can be part of a graph."""

    call: ClassVar[Callable[..., Any]] = Blocked.__call__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _Eager.call(self, *args, **kwargs)


class _Backward:
    """One DDP model's backward passes."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = weakref.ref(model)
        self._pass = -1

    def __call__(self, parameter: Tensor) -> None:  # noqa: ARG002
        """One of its parameters has its gradient."""
        here = torch._C._current_graph_task_id()  # noqa: SLF001
        if running.listener is None or here == self._pass:
            return
        self._pass = here
        _queue(self._computed)

    def _computed(self) -> None:
        _queue(self._reduced)
        model = self._model()
        if running.listener is not None:
            # Without `no_sync` its collectives are under way, and this is where it waits for them.
            begun = model.process_group if model and model.require_backward_grad_sync else None
            running.listener.block(forgiven=begun)

    def _reduced(self) -> None:
        if running.listener is not None:
            running.listener.unblock()
            running.listener.saw_backward()


def _queue(callback: Any) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # noqa: SLF001


# -- FSDP2


def _probe_fsdp2(module: Any) -> bool:
    """Whether this release's FSDP2 has what it is to have.

    Every sharded module has a state, and several may share one.
    """
    state = module._get_fsdp_state()  # noqa: SLF001
    if isinstance(vars(state).get(ENDS), EndsBackward):
        return True
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11
    if groups is None:
        groups = [group for group in [getattr(state, "_fsdp_param_group", None)] if group]
    if not hasattr(state, ENDS) or not all(hasattr(g, n) for g in groups for n in WAITS + BEGINS):
        return False
    vars(state)[ENDS] = EndsBackward(getattr(state, ENDS))
    for group in groups:
        # What communicates on the CPU has ended when the call returns, which is a wait as well.
        begin = Blocked if group.device.type == "cpu" else Begins
        for name, kind in {**dict.fromkeys(WAITS, Blocked), **dict.fromkeys(BEGINS, begin)}.items():
            vars(group)[name] = kind(getattr(group, name))
    return True
