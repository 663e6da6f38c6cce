"""Probes in a trainer's model, where it waits for other ranks: DDP's, and FSDP2's.

DDP begins its all-reduces during the backward pass and waits for all of them at its end, in a
callback that it queues with the autograd engine; the engine runs callbacks in order, those queued
by callbacks too. So one that was queued before DDP's is called when this rank's own backward pass
is complete, and one that it queues itself, when DDP has all gradients:

    forward | backward, all-reduces behind it | DDP waits | optimizer
                                             first      second

A hook on a parameter queues the first: it runs before DDP counts this parameter as complete, so
before all are. Whatever communication hook there is, DDP waits for it there.

FSDP2 is Python, and waits in methods of its own, which are wrapped on this model's objects: for
parameters before they are used, and for gradients. On a GPU the stream waits there, not the host,
so events on it measure how long.

A process has one training loop, and several streams of it take turns. Backward passes call from
autograd's threads while the training thread waits for them, so no two threads are here at once.

A wait in a collective that no probe times counts as compute, on all ranks alike. So collectives are
counted: every process group numbers them. Where that number moves in a micro-batch, and not in a
part that is timed as blocked, the step's times carry the reason why waits are unknown.
"""

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rollout_workers.process_group import instances

if TYPE_CHECKING:
    from rollout_workers.timing.timing import StepTimer


#: The timer of the step that is computed; None while nothing is measured.
listener: "StepTimer | None" = None


def listen(to: "StepTimer | None") -> None:
    """Probes report to this timer from now on."""
    global listener  # noqa: PLW0603  one training loop a process
    listener = to


class Probe:
    """A method that reports its beginning and its end to the listener.

    begins, ends: methods of `StepTimer`. No closure, so that the object that has it can be copied
    and pickled as before.
    """

    def __init__(self, method: Callable[..., Any], begins: str, *ends: str) -> None:
        self._method, self._begins, self._ends = method, begins, ends

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, and report."""
        timer = listener
        if timer is None:
            return self._method(*args, **kwargs)
        getattr(timer, self._begins)()
        try:
            return self._method(*args, **kwargs)
        finally:
            for end in self._ends:
                getattr(timer, end)()


#: Of a method in which the rank waits for others, of one that begins collectives and does not wait
#: for them, and of one that ends a backward pass by waiting for others.
BLOCKS, BEGINS = ("block", "unblock"), ("will_begin", "has_begun")
ENDS_BACKWARD = (*BLOCKS, "saw_backward")

#: Of no group.
NONE: frozenset[str] = frozenset()


class Collectives:
    """Counts collectives in the process groups that several DP ranks are in.

    dp_ranks: global ranks of the DP ranks; None where every process is one. groups: those of the
        groups that count their collectives; while there are none, `mark` does nothing.
    """

    def __init__(self, dp_ranks: frozenset[int] | None) -> None:
        self._dp_ranks = dp_ranks
        self.groups: list[dist.ProcessGroup] = []
        self._joined = self._known = 0
        self._numbers: list[int] = []
        self._common: tuple[dist.ProcessGroup, ...] = ()

    def cannot_be_seen(self, *, probed: bool) -> str:
        """Why collectives cannot be counted; "" if they can.

        probed: whether some models have probes.
        """
        if not self._joined:
            return "no process group joins this rank with other DP ranks, so no collective is seen"
        if len(self.groups) < self._joined and not probed:
            return "a process group does not count its collectives"
        return ""

    def find_groups(self) -> None:
        """Refresh the groups, if their number has changed."""
        if not (dist.is_available() and dist.is_initialized()):
            self.groups, self._joined, self._known = [], 0, 0
            self._common = ()
            return
        groups = list(dist.distributed_c10d._world.pg_map)  # noqa: SLF001  there is no other list
        if len(groups) != self._known:
            self._known = len(groups)
            joined = [group for group in groups if self._joins_dp_ranks(group)]
            self._joined, self.groups = len(joined), [*filter(_counts, joined)]
            self._common = tuple(filter(self._joins_all, self.groups))

    def mark(self) -> None:
        """`since` counts from here."""
        self._numbers = [_number(group) for group in self.groups]

    def since(self, forgiven: dist.ProcessGroup | None = None) -> frozenset[str]:
        """Names of the groups that had collectives since `mark`, but for one."""
        if not self.groups:
            return NONE
        return frozenset(
            group.group_desc or group.group_name
            for group, before in zip(self.groups, self._numbers, strict=False)
            if group is not forgiven and _number(group) != before
        )

    def begun(self) -> int:
        """How many there were so far in groups that every DP rank is in; from any thread.

        A rank that hangs before a collective has begun fewer than those that wait for it there.
        """
        return sum(map(_number, self._common))

    def _joins_all(self, group: dist.ProcessGroup) -> bool:
        ranks = set(dist.get_process_group_ranks(group))
        every = range(dist.get_world_size()) if self._dp_ranks is None else self._dp_ranks
        return ranks.issuperset(every)

    def _joins_dp_ranks(self, group: dist.ProcessGroup) -> bool:
        ranks = set(dist.get_process_group_ranks(group))
        return len(ranks if self._dp_ranks is None else ranks & self._dp_ranks) > 1


def _number(group: Any) -> int:
    """Of its last collective."""
    return int(group._get_sequence_number_for_group())  # noqa: SLF001


def _counts(group: dist.ProcessGroup) -> bool:
    try:
        _number(group)
    except RuntimeError:  # its backend does not
        return False
    return True


#: Parameters of a DDP model with a hook: one would do, if each were in every backward pass.
PARAMETERS = 4
#: Methods of FSDP2's parameter groups in which it waits, and in which it begins what it waits for.
WAITING, BEGINNING = ("wait_for_unshard", "post_backward", "finalize_backward"), ("unshard",)
#: The method of its states that ends a backward pass.
ENDING = "_root_post_backward_final_callback"
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
        # In place of the method, in this object: ranks wait for rank 0's buffers there.
        _Eager.call = torch.compiler.disable(Probe.__call__)  # type: ignore[no-untyped-call]
        vars(model)["_pre_forward"] = _Eager(model._pre_forward, *BLOCKS)  # noqa: SLF001


class _Eager(Probe):
    """Left out by compilers, as the collective in it is: no clock can be part of a graph."""

    call: ClassVar[Callable[..., Any]] = Probe.__call__

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
        if listener is None or here == self._pass:
            return
        self._pass = here
        _queue(self._computed)

    def _computed(self) -> None:
        _queue(self._reduced)
        model = self._model()
        if listener is not None:
            # Without `no_sync` its collectives are under way, and this is where it waits for them.
            begun = model.process_group if model and model.require_backward_grad_sync else None
            listener.block(forgiven=begun)

    def _reduced(self) -> None:
        if listener is not None:
            listener.unblock()
            listener.saw_backward()


def _queue(callback: Any) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # noqa: SLF001


# -- FSDP2


def _probe_fsdp2(module: Any) -> bool:
    """Whether this release's FSDP2 has what it is to have.

    Every sharded module has a state, and several may share one.
    """
    state = module._get_fsdp_state()  # noqa: SLF001
    if isinstance(vars(state).get(ENDING), Probe):
        return True
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11
    if groups is None:
        groups = [group for group in [getattr(state, "_fsdp_param_group", None)] if group]
    names = WAITING + BEGINNING
    if not hasattr(state, ENDING) or not all(hasattr(g, name) for g in groups for name in names):
        return False
    vars(state)[ENDING] = Probe(getattr(state, ENDING), *ENDS_BACKWARD)
    for group in groups:
        for name in names:
            # What communicates on the CPU has ended when the call returns, which is a wait as well.
            blocks = name in WAITING or group.device.type == "cpu"
            vars(group)[name] = Probe(getattr(group, name), *(BLOCKS if blocks else BEGINS))
    return True
