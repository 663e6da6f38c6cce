"""Whether the default process group is the data-parallel one, as far as device meshes tell.

Where a mesh has tensor- or pipeline-parallel ranks, each rank of the default group would take a
place among the DP ranks and train on samples of its own, where those of one model replica need the
same. That trains wrongly without a word, so it is refused unless the caller says which ranks are
data parallel.

torch keeps no list of the meshes that exist, so they are looked for among the objects of the
garbage collector; where it has frozen them, the names of their process groups tell nearly as much.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch.distributed as dist

from rollout_workers.live_objects import instances

#: What torch calls the process group of a mesh's dimension, before the dimension's name.
_GROUP_PREFIX = "mesh_"
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

    @property
    def data_parallel(self) -> list[str]:
        """Those of them whose names say that they are data parallel."""
        return [name for name in self.parallel if name.startswith(DATA_PARALLEL)]

    def is_plain(self, world: int) -> bool:
        """Whether it is compatible with each of `world` ranks being a DP rank."""
        if _MODEL_PARALLEL.intersection(self.parallel):
            return False
        return len(self.sizes) == 1 or prod(self.sizes) == 1 or max(self.sizes) == world


def ambiguous_mesh(world: int) -> Mesh | None:
    """A mesh of this process by which not all `world` ranks are DP ranks; the largest one."""
    for meshes in (_meshes, _from_groups):
        found = [mesh for mesh in meshes() if not mesh.is_plain(world)]
        if found:
            return max(found, key=lambda mesh: prod(mesh.sizes))
    return None


def advice(mesh: Mesh) -> str:
    """What to pass to a stream or sampler in a process that has this mesh."""
    names = mesh.data_parallel or ["dp"]
    dims = repr(names[0]) if len(names) == 1 else repr(tuple(names))
    return f"pass mesh= with the whole mesh and dp_dims={dims}, on every rank"


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


def _from_groups() -> Iterable[Mesh]:
    """A mesh of the dimensions of more than one rank that process groups are named after."""
    try:
        groups = list(dist.distributed_c10d._world.pg_map)  # noqa: SLF001  there is no other list
        sizes = {group.group_desc: group.size() for group in groups}
    except Exception:
        return
    dims = {
        name.removeprefix(_GROUP_PREFIX): size
        for name, size in sorted(sizes.items())
        if name.startswith(_GROUP_PREFIX) and 1 < size < dist.get_world_size()
    }
    if dims:
        yield Mesh(tuple(dims), tuple(dims.values()))
