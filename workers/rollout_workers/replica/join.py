"""All processes of a mesh join together: leaders connect, in one generation, peers hear of it."""

from collections.abc import Callable, Mapping
from datetime import timedelta

from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.transport.memory import Memory
from rollout_workers.rank.client import RankClient
from rollout_workers.rank.steps import StepClient
from rollout_workers.replica.channel import JOIN_TIMEOUT, Channel
from rollout_workers.replica.failures import restored, told
from rollout_workers.replica.follower import Follower
from rollout_workers.replica.places import ReplicaPlace
from rollout_workers.replica.relay import Relay

#: Connects, with the relay that tells the peers if there are any, and the generation, None to ask.
Connect = Callable[[Relay | None, int | None], RankClient]


def join_mesh(
    place: ReplicaPlace,
    connect: Connect,
    memory: Memory,
    *,
    whole_steps: bool,
    training: Mapping[str, str],
) -> StepClient:
    """This process's client; a collective of all ranks of the mesh.

    memory: what a peer receives into. Raises what `connect` raises, in the peers too; DP rank 0's
    error in all of them.
    """
    channel = Channel(place.members, "replica") if len(place.members) > 1 else None
    if channel is not None and not place.leads:
        return Follower(channel, place.dp, memory, whole_steps=whole_steps, training=training)
    relay = None if channel is None else Relay(channel)
    try:
        return _join_leaders(place, lambda generation: connect(relay, generation))
    except BaseException as error:
        if relay is not None:
            relay.end(told(error))
            relay.join()
        raise


def _join_leaders(place: ReplicaPlace, connect: Callable[[int | None], RankClient]) -> RankClient:
    """Connect in one generation, which DP rank 0 asks for and tells the other leaders."""
    if place.dp.dp_size == 1:
        return connect(None)
    # To connect may take long, and DP rank 0 has the last word on how long that is.
    channel = Channel(place.leaders, "leaders", JOIN_TIMEOUT + timedelta(minutes=1))
    try:
        return _lead(channel, connect) if place.dp.dp_rank == 0 else _hear(channel, connect)
    finally:
        channel.close()


def _lead(channel: Channel, connect: Callable[[int | None], RankClient]) -> RankClient:
    try:
        client = connect(None)
    except BaseException as error:
        channel.say(told(error))
        channel.agree()
        raise
    channel.say(client.welcome)
    channel.agree()
    return client


def _hear(channel: Channel, connect: Callable[[int | None], RankClient]) -> RankClient:
    message, _ = channel.hear()
    channel.agree()
    if isinstance(message, m.Error):
        raise restored(message)
    assert isinstance(message, m.WelcomeRank)
    return connect(message.generation)
