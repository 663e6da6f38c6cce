"""What each of four ranks of a mesh does when something goes wrong, and the error that it gets.

    replica_cases.py RANK DIRECTORY START ENDPOINT

Not under torchrun, which would end the ranks that are left. Writes DIRECTORY/RANK.json: by case,
what was raised or returned; that it is there says that nobody hung.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rollout_dispatcher.errors import DispatcherError
from rollout_workers import Credentials, MicroBatchStream
from rollout_workers.replica.channel import KEEP_ALIVE_S

Case = Callable[[DeviceMesh, str, int, Path], object]


def join(mesh: DeviceMesh, endpoint: str, **options: Any) -> MicroBatchStream:
    return MicroBatchStream(endpoint, mesh=mesh, dp_dims="dp", reconnect_timeout=1.0, **options)


def train(stream: MicroBatchStream, steps: int | None = None) -> list[int]:
    """Train so many steps, or all that come."""
    done: list[int] = []
    while len(done) != steps:
        try:
            step = next(stream)
        except StopIteration:
            return done
        list(step)
        step.commit()
        done.append(step.number)
    return done


def outcome(action: Callable[[], object]) -> object:
    """What it returns, or the class and text of what it raises."""
    try:
        return action()
    except DispatcherError as error:
        return [type(error).__name__, str(error)]


# -- nobody dies: all in one start, on (dp=2, tp=2)


def wrong_address(mesh: DeviceMesh, endpoint: str, rank: int, _: Path) -> object:
    """Only the DP leaders know it."""
    return outcome(lambda: join(mesh, endpoint if rank % 2 else "nowhere"))


def wrong_token(mesh: DeviceMesh, endpoint: str, rank: int, directory: Path) -> object:
    """Only DP rank 0's leader has it."""
    token = directory / f"token-{rank}"
    token.touch(mode=0o600)
    token.write_text(("no!" if rank == 0 else "yes") * 6)
    return outcome(lambda: join(mesh, endpoint, credentials=Credentials(token_file=token)))


def second_is_refused(mesh: DeviceMesh, endpoint: str, rank: int, directory: Path) -> object:
    """DP rank 1's leader has not the token; DP rank 0 has joined by then."""
    token = directory / f"second-token-{rank}"
    token.touch(mode=0o600)
    token.write_text(("no!" if rank == 2 else "yes") * 6)

    def made() -> None:
        join(mesh, endpoint, credentials=Credentials(token_file=token)).close()

    return outcome(made)


def losses_differ(mesh: DeviceMesh, endpoint: str, rank: int, _: Path) -> object:
    """A peer averages otherwise than its leader, which the dispatcher cannot know."""

    def made() -> None:
        join(mesh, endpoint, loss_normalisation=("token-mean", "sequence-mean")[rank % 2]).close()

    return outcome(made)


def pauses(mesh: DeviceMesh, endpoint: str, rank: int, _: Path) -> object:
    """The leader pauses for longer than the keep-alive, then its peer does."""
    with join(mesh, endpoint) as stream:
        found = []
        for paused in (0, 1):
            if rank % 2 == paused:
                time.sleep(2.5 * KEEP_ALIVE_S)
            found += train(stream, 1)
        return found


def peer_closes(mesh: DeviceMesh, endpoint: str, rank: int, _: Path) -> object:
    """Rank 1 closes after a step that its leader does not take for the last."""
    with join(mesh, endpoint) as stream:
        train(stream, 1)
        found = outcome(lambda: train(stream)) if rank == 0 else None
        if rank != 1:  # the other replica stays until then
            dist.barrier()
    if rank == 1:
        dist.barrier()
    return found


def leader_closes(mesh: DeviceMesh, endpoint: str, rank: int, _: Path) -> object:
    with join(mesh, endpoint) as stream:
        train(stream, 1)
        return outcome(lambda: train(stream)) if rank == 1 else None


def all_load(mesh: DeviceMesh, endpoint: str, rank: int, _: Path) -> object:
    """A checkpoint of where this stream begins, which peers load late."""
    with join(mesh, endpoint) as stream:
        state = stream.state_dict()
        time.sleep(0.5 * rank)
        stream.load_state_dict(state)
        done = train(stream, 1)
        stream.checkpoint_saved(stream.state_dict())
        return [done, stream.state_dict() == {**state, "step": done[0]}]


def leader_loads(mesh: DeviceMesh, endpoint: str, rank: int, _: Path) -> object:
    """The peers do not; DP ranks load or none does, as the dispatcher sees to."""
    with join(mesh, endpoint) as stream:
        if rank % 2 == 0:
            stream.load_state_dict(stream.state_dict())
            time.sleep(1.0)
            return None
        return outcome(lambda: train(stream, 1))


def peer_loads(mesh: DeviceMesh, endpoint: str, rank: int, _: Path) -> object:
    with join(mesh, endpoint) as stream:
        if rank % 2 == 0:
            train(stream, 1)
            time.sleep(0.5)
            return None
        return outcome(lambda: stream.load_state_dict(stream.state_dict()))


def contradictions(mesh: DeviceMesh, endpoint: str, _rank: int, _: Path) -> object:
    options: list[dict[str, Any]] = [
        {"mesh": mesh, "dp_dims": "dp", "dp_rank": 0, "dp_size": 2},
        {"mesh": mesh},
        {"mesh": mesh, "dp_dims": "data"},
        {"mesh": mesh["tp"], "dp_dims": "tp"},
        {"dp_dims": "dp"},
        {"mesh": mesh, "dp_dims": "dp", "grad_mesh": mesh["tp"]},
        {},
    ]
    return [outcome(lambda given=given: MicroBatchStream(endpoint, **given)) for given in options]  # type: ignore[misc]


def dispatcher_goes(mesh: DeviceMesh, endpoint: str, rank: int, directory: Path) -> object:
    """It is ended by the test once all have taken a step; the last case."""
    with join(mesh, endpoint) as stream:
        train(stream, 1)
        (directory / f"ready-{rank}").touch()
        return outcome(lambda: train(stream))


TOGETHER: tuple[Case, ...] = (
    contradictions, wrong_address, wrong_token, second_is_refused, losses_differ, pauses,
    peer_closes, leader_closes, all_load, leader_loads, peer_loads, dispatcher_goes,
)  # fmt: skip


# -- one dies: a start each, on (dp=1, tp=4)


def dies(victim: int) -> Case:
    def case(mesh: DeviceMesh, endpoint: str, rank: int, _: Path) -> object:
        stream = join(mesh, endpoint)
        train(stream, 1)
        dist.barrier()
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        found = outcome(lambda: train(stream))
        return [found, time.monotonic() - began]

    return case


STARTS: dict[str, tuple[tuple[int, int], dict[str, Case]]] = {
    "together": ((2, 2), {case.__name__: case for case in TOGETHER}),
    "leader-dies": ((1, 4), {"dies": dies(0)}),
    "peer-dies": ((1, 4), {"dies": dies(3)}),
}


def main(rank: int, directory: Path, start: str, endpoint: str) -> None:
    store = dist.FileStore(str(directory / "store"), 4)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    shape, cases = STARTS[start]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    found: dict[str, object] = {}
    for name, case in cases.items():
        found[name] = case(mesh, endpoint, rank, directory)
        print(rank, name, found[name], flush=True)
        if start == "together":
            dist.barrier()
    (directory / f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # what is left of the groups of the dead is of no interest


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
