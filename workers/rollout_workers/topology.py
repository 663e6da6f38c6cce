"""The place of a process among those of a trainer, and how all of them join a dispatcher together.

A process checks its own arguments before it joins, and the processes make all that they make
together before one of them connects: then a rank that cannot connect gets an error in its own
constructor, and no other waits for it there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import get_worker_info

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.transport.memory import Memory
from rollout_workers.client.process import REMEDIES
from rollout_workers.process_group import (
    Place,
    check_group,
    find_place,
    initialised,
    receive_generation,
    share_failure,
    share_generation,
)
from rollout_workers.rank.client import RankClient, StepClient
from rollout_workers.replica.channel import Relay
from rollout_workers.replica.join import (
    ReplicaPlace,
    join_mesh,
    place_in,
    ranks_averaged,
    refuse_contradiction,
)
from rollout_workers.replica.members import Leader


@dataclass(frozen=True, slots=True)
class Topology:
    """A process among the DP ranks, and in its model replica.

    place: among the DP ranks. grad_ranks: ranks whose gradients the trainer averages.
    replica: the processes that share its DP rank; None without a mesh.
    process_group: of the DP ranks, where there is no mesh; None for the default one.
    """

    place: Place
    grad_ranks: int
    replica: ReplicaPlace | None = None
    process_group: dist.ProcessGroup | None = None

    @property
    def speaks(self) -> bool:
        """Whether this process reports and logs for all: DP rank 0, in its DP leader."""
        return self.place.dp_rank == 0 and (self.replica is None or self.replica.leads)

    @property
    def dp_ranks(self) -> Sequence[int] | None:
        """Global ranks of the DP ranks that this process meets; None if it may meet others."""
        if self.replica is not None:
            return self.replica.counterparts
        if self.process_group is not None:
            return dist.get_process_group_ranks(self.process_group)
        return None

    def join(
        self, endpoint: str, generation: int | None, memory: Memory, **options: Any
    ) -> StepClient:
        """This process's client; a collective of all DP ranks.

        generation: None to ask for one for all of them. options: further ones of `RankClient`.
        Raises what `RankClient` raises, and in a peer the error of its DP leader.
        """
        place = self.place

        def connect(relay: Relay | None, agreed: int | None) -> RankClient:
            kind = RankClient if relay is None else partial(Leader, relay)
            return kind(
                endpoint,
                dp_rank=place.dp_rank,
                dp_size=place.dp_size,
                generation=agreed,
                memory=memory,
                **options,
            )

        if self.replica is not None:
            return join_mesh(self.replica, connect, memory, training=options["training"])
        return self._join_by_group(partial(connect, None), generation)

    def _join_by_group(
        self, connect: Callable[[int | None], RankClient], generation: int | None
    ) -> RankClient:
        """Join with one generation for all DP ranks, asked for by DP rank 0."""
        place, group = self.place, self.process_group
        if generation is not None or place.dp_size == 1:
            return connect(generation)
        if not initialised():
            if place.dp_rank == 0:
                return connect(None)
            raise ConfigError(
                "DP ranks must agree on a generation: call torch.distributed.init_process_group() "
                "first, or pass DP rank 0's stream.generation as generation="
            )
        check_group(place, group)
        if place.dp_rank != 0:
            return connect(receive_generation(group))
        try:
            client = connect(None)
        except BaseException as error:
            share_failure(error, group)
            raise
        share_generation(client.generation, group)
        return client


def find_topology(
    *,
    dp_rank: int | None,
    dp_size: int | None,
    process_group: dist.ProcessGroup | None,
    generation: int | None,
    mesh: DeviceMesh | None,
    dp_dims: str | Sequence[str] | None,
    grad_mesh: DeviceMesh | None,
) -> Topology:
    """The topology of a stream's options; see `MicroBatchStream`. Raises ConfigError."""
    _refuse_loader_workers()
    refuse_contradiction(mesh, dp_dims, dp_rank, dp_size, process_group, generation)
    replica = None if mesh is None else place_in(mesh, dp_dims)
    place = replica.dp if replica else find_place(dp_rank, dp_size, process_group)
    averaged = place.dp_size
    if grad_mesh is not None:
        averaged = ranks_averaged(grad_mesh, place.dp_size, replica.counterparts if replica else ())
    return Topology(place, averaged, replica, process_group)


def _refuse_loader_workers() -> None:
    """Raise ConfigError in a worker of a DataLoader: each would be a DP rank of its own."""
    if (worker := get_worker_info()) is not None:
        raise ConfigError(
            f"a stream is made in worker {worker.id} of a DataLoader with num_workers="
            f"{worker.num_workers}, where each worker would take the DP rank's place; "
            f"{REMEDIES['stream']}"
        )
