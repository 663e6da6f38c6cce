"""Which DP rank this process is, and how the ranks of one process group share a generation.

DP rank 0 broadcasts the generation in the process group. The group's key-value store would not do:
torchrun may give a restarted group the store of its predecessor, with the old generation in it. It
goes as text: nothing is unpickled.

Where a mesh has tensor- or pipeline-parallel ranks, each rank of the default group would take a
place among the DP ranks and train on samples of its own, where those of one model replica need the
same. That trains wrongly without an error, so it is refused unless the caller names the ranks that
are data parallel.

torch keeps no list of the meshes that exist, so they are searched for among the objects of the
garbage collector.
"""

import gc
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rollout_dispatcher.errors import ConfigError, RankRefused

T = TypeVar("T")


def instances(kinds: Iterable[type[T]]) -> list[T]:
    """All objects of these classes and their subclasses that the garbage collector knows.

    It compares classes, as `isinstance` calls the object, and a proxy may do anything then.

    It gets the referrers of the classes, as an object refers to its class, and not all objects: to
    hold a tuple that another thread is filling makes CPython raise SystemError there.
    """
    wanted = _with_subclasses(kinds)
    return [item for item in gc.get_referrers(*wanted) if type(item) in wanted]


def _with_subclasses(kinds: Iterable[type[T]]) -> set[type[T]]:
    found, pending = set[type[T]](), list(kinds)
    while pending:
        kind = pending.pop()
        if kind not in found:
            found.add(kind)
            pending += type.__subclasses__(kind)
    return found


#: Dimensions whose ranks need the same samples, by the names that torch and its users give them.
_MODEL_PARALLEL = frozenset({"tp", "cp", "pp", "sp"})
#: How the names of data-parallel dimensions begin.
DATA_PARALLEL = ("dp", "data", "ddp", "fsdp", "hsdp", "replicate", "shard")


@dataclass(frozen=True, slots=True)
class Mesh:
    """A device mesh, by its dimensions. Dimensions without a name have their number for one."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        pairs = zip(self.names, self.sizes, strict=True)
        return f"({', '.join(f'{name}={size}' for name, size in pairs)})"

    @property
    def parallel(self) -> list[str]:
        """The dimensions of more than one rank."""
        return [name for name, size in zip(self.names, self.sizes, strict=True) if size > 1]

    def is_plain(self, world: int) -> bool:
        """Whether it is compatible with each of `world` ranks being a DP rank."""
        if _MODEL_PARALLEL.intersection(self.parallel):
            return False
        return len(self.sizes) == 1 or prod(self.sizes) == 1 or max(self.sizes) == world


def ambiguous_mesh(world: int) -> Mesh | None:
    """A mesh of this process by which not all `world` ranks are DP ranks; the largest one."""
    found = [mesh for mesh in _meshes() if not mesh.is_plain(world)]
    return max(found, key=lambda mesh: prod(mesh.sizes), default=None)


def advice(mesh: Mesh) -> str:
    """What to pass to a stream or sampler in a process that has this mesh."""
    return f"pass mesh= with the whole mesh and {dp_dims_of(mesh.parallel)}, on every rank"


def dp_dims_of(names: Sequence[str]) -> str:
    """The argument `dp_dims=`, for the dimensions that are data parallel by their names."""
    dims = [name for name in names if name.startswith(DATA_PARALLEL)] or ["dp"]
    return f"dp_dims={dims[0] if len(dims) == 1 else tuple(dims)!r}"


def _meshes() -> Iterable[Mesh]:
    kind = getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", None)
    if not isinstance(kind, type):  # it was never imported: there is no mesh
        return
    of_torch: type[Any] = kind
    for item in instances([of_torch]):
        try:
            sizes = tuple(map(int, item.shape))
            names = item.mesh_dim_names or map(str, range(len(sizes)))
            yield Mesh(tuple(map(str, names)), sizes)
        except Exception:  # noqa: S112  half made, or other inside than we know
            continue


#: Of DP rank 0's text; a longer error message is cut.
MESSAGE_BYTES = 512


@dataclass(frozen=True, slots=True)
class Place:
    """A position among the data-parallel ranks."""

    dp_rank: int
    dp_size: int


def find_place(
    dp_rank: int | None,
    dp_size: int | None,
    group: dist.ProcessGroup | None,
) -> Place:
    """Rank and size as given, else of `group` or the default group, else of the environment.

    A process that is neither in a process group nor started by a launcher is rank 0 of 1.
    Raises ConfigError when only one of the two is given or they contradict each other, or when
    nothing is given and a device mesh says that not every rank is a DP rank.
    """
    if (dp_rank is None) != (dp_size is None):
        raise ConfigError("give both dp_rank and dp_size, or neither")
    if dp_rank is not None and dp_size is not None:
        place = Place(dp_rank, dp_size)
    elif initialised():
        if group is None:
            _refuse_ambiguity()
        place = Place(dist.get_rank(group), dist.get_world_size(group))
    else:
        place = Place(_integer("RANK", 0), _integer("WORLD_SIZE", 1))
    if not 0 <= place.dp_rank < place.dp_size:
        raise ConfigError(
            f"DP rank {place.dp_rank} of {place.dp_size}: a rank is at least 0 and below the size"
            + ("; is this process in the process group?" if place.dp_rank < 0 else "")
        )
    return place


def check_group(place: Place, group: dist.ProcessGroup | None) -> None:
    """Raise ConfigError where the group's ranks are not the DP ranks.

    They share the generation by a collective, which would wait for ever for other ranks.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if (rank, size) != (place.dp_rank, place.dp_size):
        which = "the default process group" if group is None else "process_group"
        raise ConfigError(
            f"this is DP rank {place.dp_rank} of {place.dp_size}, but rank {rank} of {size} in "
            f"{which}, through which DP ranks agree on a generation; pass process_group= with the "
            "DP ranks in their order, or hand DP rank 0's stream.generation to the others as "
            "generation="
        )


def _refuse_ambiguity() -> None:
    world = dist.get_world_size()
    mesh = ambiguous_mesh(world) if world > 1 else None
    if mesh is not None:
        raise ConfigError(
            f"this process has a device mesh of several dimensions, {mesh}: if each of the {world} "
            "ranks took samples of its own, ranks that share a model replica would train on "
            f"different ones; {advice(mesh)}"
        )


def initialised() -> bool:
    """Whether there is a process group to share a generation through."""
    return dist.is_available() and dist.is_initialized()


def share_generation(generation: int, group: dist.ProcessGroup | None) -> None:
    """DP rank 0 has its generation; a collective, like `receive_generation` on the others."""
    _broadcast(f"generation {generation}", group)


def share_failure(error: BaseException, group: dist.ProcessGroup | None) -> None:
    """DP rank 0 has none, and the others should not wait for it."""
    _broadcast(f"failure {error}", group)


def receive_generation(group: dist.ProcessGroup | None) -> int:
    """DP rank 0's generation; raises RankRefused with its error when it failed."""
    word, _, rest = _broadcast("", group).partition(" ")
    if word == "generation":
        return int(rest)
    raise RankRefused(f"DP rank 0 could not join: {rest}")


def _broadcast(text: str, group: dist.ProcessGroup | None) -> str:
    """The text of the group's rank 0."""
    data = text.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0")
    message = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device_of(group))
    first = 0 if group is None else dist.get_global_rank(group, 0)
    dist.broadcast(message, first, group)
    return bytes(message.tolist()).rstrip(b"\0").decode(errors="replace")


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Where a tensor has to be for this group's collectives."""
    backends = dist.get_backend_config(group)
    return torch.device("cpu" if "cpu:" in backends else "cuda")


def _integer(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise ConfigError(f"the environment has {variable}={text!r}, which is no number") from None
