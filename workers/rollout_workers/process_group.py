"""Which DP rank this process is, and how the ranks of one process group share a generation.

A generation is shared by a broadcast in the process group and not through its key-value store:
torchrun may hand a restarted group the store of its predecessor, where the old number still
stands. It passes as text: nothing is unpickled.
"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rollout_dispatcher.errors import ConfigError, RankRefused
from rollout_workers.meshes import advice, ambiguous_mesh

#: Room for what DP rank 0 says; a longer error message is cut.
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

    They share the generation by a collective, which would wait for ever for others than these.
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
    """DP rank 0 has its generation; a collective, like `hear_generation` on the others."""
    _tell_others(f"generation {generation}", group)


def share_failure(error: BaseException, group: dist.ProcessGroup | None) -> None:
    """DP rank 0 has none, and the others should not wait for it."""
    _tell_others(f"failure {error}", group)


def hear_generation(group: dist.ProcessGroup | None) -> int:
    """DP rank 0's generation; raises RankRefused with its error when it failed."""
    word, _, rest = _hear_rank_0(group).partition(" ")
    if word == "generation":
        return int(rest)
    raise RankRefused(f"DP rank 0 could not join: {rest}")


def _tell_others(text: str, group: dist.ProcessGroup | None) -> None:
    data = text.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0")
    message = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(message.to(_device(group)), _first(group), group)


def _hear_rank_0(group: dist.ProcessGroup | None) -> str:
    message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=_device(group))
    dist.broadcast(message, _first(group), group)
    return bytes(message.tolist()).rstrip(b"\0").decode(errors="replace")


def _first(group: dist.ProcessGroup | None) -> int:
    """The global rank of the group's rank 0."""
    return 0 if group is None else dist.get_global_rank(group, 0)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Where a tensor has to be for this group's collectives."""
    backends = dist.get_backend_config(group)
    return torch.device("cpu" if "cpu:" in backends else "cuda")


def _integer(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise ConfigError(f"the environment has {variable}={text!r}, which is no number") from None
