"""All processes of a mesh join together: leaders connect, in one generation, and relay to peers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.transport.memory import Memory
from rollout_workers.client.link import error_message, restored
from rollout_workers.process_group import Mesh, Place, dp_dims_of
from rollout_workers.rank.client import RankClient, StepClient
from rollout_workers.replica.channel import JOIN_TIMEOUT, Channel, Relay
from rollout_workers.replica.members import Follower


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """A process among the DP ranks and in its model replica; ranks are of the default group.

    members: ranks of its DP rank, the DP leader first: it is 0 in all other dimensions.
    leaders: the DP leader of every DP rank, in order.
    counterparts: the rank at this process's place in each replica, by DP rank.
    """

    dp: Place
    members: tuple[int, ...]
    leaders: tuple[int, ...]
    counterparts: tuple[int, ...]

    @property
    def leads(self) -> bool:
        """Whether this process is the DP leader of its replica."""
        return self.members[0] == dist.get_rank()


def refuse_contradiction(mesh: DeviceMesh | None, dp_dims: object, *others: object) -> None:
    """Raise ConfigError where a mesh and another argument give this process's place."""
    if mesh is None and dp_dims is not None:
        raise ConfigError(
            "dp_dims names dimensions of a mesh, and there is none; pass mesh= with the trainer's "
            "device mesh"
        )
    if mesh is not None and any(other is not None for other in others):
        raise ConfigError(
            "mesh= says which ranks are data parallel and who agrees on a generation; leave out "
            "dp_rank, dp_size, process_group and generation"
        )


def place_in(mesh: DeviceMesh, dp_dims: str | Sequence[str] | None) -> ReplicaPlace:
    """This process's place, where these dimensions are data parallel.

    Example: ranks 0 to 3 as (dp=2, tp=2) are the rows [0, 1] and [2, 3]; rank 3 is of DP rank 1,
    which 2 leads, and the leaders are 0 and 2.

    Raises ConfigError for dimensions that the mesh does not have, a mesh that this process is not
    in, and a part of a larger mesh.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError("mesh= needs torch.distributed: call init_process_group() first")
    if mesh.mesh_dim_names is None:
        raise ConfigError(
            "the dimensions of the mesh have no names; make it with "
            "init_device_mesh(..., mesh_dim_names=...)"
        )
    names, sizes = tuple(mesh.mesh_dim_names), tuple(map(int, mesh.mesh.shape))
    chosen = _chosen(Mesh(names, sizes), dp_dims)
    _refuse_part(mesh, names)
    data = [names.index(name) for name in names if name in chosen]
    rest = [index for index in range(len(names)) if index not in data]
    dp_size = prod(sizes[index] for index in data)
    table = mesh.mesh.permute(*data, *rest).reshape(dp_size, -1).tolist()
    me = dist.get_rank()
    dp_rank = next((index for index, row in enumerate(table) if me in row), None)
    if dp_rank is None:
        raise ConfigError(
            f"rank {me} is not in the mesh that is passed as mesh=; make the stream on the ranks "
            "of the mesh alone"
        )
    column = table[dp_rank].index(me)
    return ReplicaPlace(
        dp=Place(dp_rank, dp_size),
        members=tuple(table[dp_rank]),
        leaders=tuple(row[0] for row in table),
        counterparts=tuple(row[column] for row in table),
    )


def ranks_averaged(grad_mesh: DeviceMesh, dp_size: int, counterparts: Sequence[int]) -> int:
    """Over how many ranks gradients are averaged, if all DP ranks are among them.

    counterparts: see `ReplicaPlace`; empty where they are not known. Raises ConfigError.
    """
    size = int(grad_mesh.size())
    found = set(grad_mesh.mesh.flatten().tolist())
    if size % dp_size or not found.issuperset(counterparts):
        raise ConfigError(
            f"grad_mesh has {size} ranks, {sorted(found)}, and not all {dp_size} DP ranks are "
            "among them: their gradients would not be averaged. Pass the mesh that the trainer "
            "averages gradients over, all data-parallel dimensions included (what fully_shard gets "
            "as mesh=, for instance)"
        )
    return size


def _chosen(mesh: Mesh, dp_dims: str | Sequence[str] | None) -> set[str]:
    """The data-parallel dimensions as given; by default the only one there is."""
    if dp_dims is None and len(mesh.names) == 1:
        return set(mesh.names)
    if dp_dims is None:
        raise ConfigError(
            f"the mesh has the dimensions {mesh}, and nothing says which of them are data "
            f"parallel; pass {dp_dims_of(mesh.names)}, for instance"
        )
    given = {dp_dims} if isinstance(dp_dims, str) else set(dp_dims)
    if not given or not given.issubset(mesh.names):
        raise ConfigError(
            f"dp_dims is {dp_dims!r}, and the mesh has the dimensions {mesh}; pass the names of "
            "those over which ranks train on different samples"
        )
    return given


def _refuse_part(mesh: DeviceMesh, names: tuple[str, ...]) -> None:
    """Raise ConfigError for a slice of a larger mesh: its other slices would claim the same place.

    torch has no public name for what a mesh is a part of; where it is called otherwise the
    dispatcher refuses the second claim.
    """
    find = getattr(mesh, "_get_root_mesh", None)
    root = find() if callable(find) else mesh
    if root.mesh.numel() != mesh.mesh.numel():
        whole = ", ".join(root.mesh_dim_names or ())
        raise ConfigError(
            f"the mesh of ({', '.join(names)}) is a part of one of ({whole}), whose other parts "
            "would take the same DP ranks; pass the whole mesh, and dp_dims= for what is data "
            "parallel"
        )


#: Connects, with the relay to the peers if there are any, and the generation, None to ask for one.
Connect = Callable[[Relay | None, int | None], RankClient]


def join_mesh(
    place: ReplicaPlace,
    connect: Connect,
    memory: Memory,
    *,
    training: Mapping[str, str],
) -> StepClient:
    """This process's client; a collective of all ranks of the mesh.

    memory: gives the memory that a peer receives into. Raises what `connect` raises, in the peers
    too; DP rank 0's error in all of them.
    """
    channel = Channel(place.members, "replica") if len(place.members) > 1 else None
    if channel is not None and not place.leads:
        return Follower(channel, place.dp, memory, training=training)
    relay = None if channel is None else Relay(channel)
    try:
        return _join_leaders(place, lambda generation: connect(relay, generation))
    except BaseException as error:
        if relay is not None:
            relay.end(error_message(error))
            relay.join()
        raise


def _join_leaders(place: ReplicaPlace, connect: Callable[[int | None], RankClient]) -> RankClient:
    """Connect in one generation, which DP rank 0 asks for and sends to the other leaders."""
    if place.dp.dp_size == 1:
        return connect(None)
    # To connect may take long: DP rank 0's own timeout ends it.
    channel = Channel(place.leaders, "leaders", JOIN_TIMEOUT + timedelta(minutes=1))
    try:
        if place.dp.dp_rank > 0:
            message, _ = channel.receive()
            channel.agree()
            if isinstance(message, m.Error):
                raise restored(message)
            assert isinstance(message, m.WelcomeRank)
            return connect(message.generation)
        try:
            client = connect(None)
        except BaseException as error:
            channel.send(error_message(error))
            channel.agree()
            raise
        channel.send(client.welcome)
        channel.agree()
        return client
    finally:
        channel.close()
