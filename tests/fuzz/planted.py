"""Faults that fuzzing must find, and a dispatcher that has one of them.

    python -m tests.fuzz.planted BUG|none serve ...

What is changed is changed here: production code has no switch.
"""

import sys
from collections.abc import Callable
from typing import Any

from rollout_dispatcher.cli.main import main
from rollout_dispatcher.core.steps.generation import Generation
from rollout_dispatcher.errors import DispatcherError, Stopping
from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.frame import Frame, FrameReader
from rollout_dispatcher.service.barrier import DurabilityBarrier
from rollout_dispatcher.service.connections.peer import Peer
from rollout_dispatcher.service.delivery.frames import Frames
from rollout_dispatcher.service.http.guard import HttpGuard
from rollout_dispatcher.service.router import Router
from rollout_workers.demo.data import leave_with_starter

Plant = Callable[[Any, str, object], None]


def believe_every_size(plant: Plant) -> None:
    """Memory is set aside for whatever a prefix says."""

    def believe(reader: FrameReader, reserved: int, header: int, payload: int) -> None:
        if header + payload > 1 << 30:
            raise MemoryError

    plant(FrameReader, "_check", believe)


def believe_the_header(plant: Plant) -> None:
    """A payload is cut as the header says, whatever is there."""

    def spans(push: m.Push, nbytes: int) -> list[int]:
        return [push.schema_.nbytes(tokens) for tokens in push.tokens]

    plant(m.Push, "spans", spans)


def trip_over_json(plant: Plant) -> None:
    """What is wrong with a header is not told apart from our own faults."""

    def decode(frame: Frame) -> m.Message:
        return m.MESSAGES[frame.type].model_validate_json(bytes(frame.header))

    plant(codec, "decode", decode)


def keep_what_came(plant: Plant) -> None:
    """Every connection leaves something behind."""
    kept: list[bytearray] = []
    begin = Peer.__init__

    def hoard(peer: Peer, *arguments: Any) -> None:
        begin(peer, *arguments)
        kept.append(bytearray(b"x" * 65_536))

    plant(Peer, "__init__", hoard)


def blame_everybody(plant: Plant) -> None:
    """One peer's error ends everybody's connection."""
    fail = Peer.fail

    def fail_all(peer: Peer, error: DispatcherError) -> None:
        fail(peer, error)
        if isinstance(peer._listener, Router) and not isinstance(error, Stopping):
            peer._listener.stop("somebody made a mistake")

    plant(Peer, "fail", fail_all)


def commit_on_one_word(plant: Plant) -> None:
    """A step is committed when one rank has said so."""

    def any_rank(generation: Generation, step: int) -> bool:
        return any(rank.committed >= step for rank in generation.ranks.values())

    plant(Generation, "has_committed", any_rank)


def heed_the_past(plant: Plant) -> None:
    """Ranks of a generation that is over may speak in the next."""
    plant(Generation, "_check_number", lambda *_: None)


def answer_at_once(plant: Plant) -> None:
    """Nobody waits until what they hear of is durable."""
    plant(DurabilityBarrier, "after", lambda _, then: then())


def mix_up_samples(plant: Plant) -> None:
    """The samples of a micro-batch go out in another order than planned."""
    samples = Frames._samples

    def reversed_samples(frames: Frames, entries: Any) -> list[Any]:
        return samples(frames, entries)[::-1]

    plant(Frames, "_samples", reversed_samples)


#: Those that the session shows by itself.
IN_SESSION = {
    "believe-every-size": believe_every_size,
    "believe-the-header": believe_the_header,
    "trip-over-json": trip_over_json,
}
#: Those that only a running dispatcher shows.
IN_SERVICE = {"keep-what-came": keep_what_came, "blame-everybody": blame_everybody}
#: Those that the order of words shows, between generations.
IN_ORDER = {
    "commit-on-one-word": commit_on_one_word,
    "heed-the-past": heed_the_past,
    "answer-at-once": answer_at_once,
    "mix-up-samples": mix_up_samples,
}


def trip_over_groups(plant: Plant) -> None:
    """A sample that comes over HTTP and is of a group is met by an error of ours."""
    push_now = Router.push_now

    def trip(router: Router, samples: Any, **how: Any) -> Any:
        if any(sample.group_id for sample in samples):
            raise LookupError("group")
        return push_now(router, samples, **how)

    plant(Router, "push_now", trip)


def keep_who_asked(plant: Plant) -> None:
    """Every connection for HTTP leaves something behind."""
    kept: list[bytearray] = []
    protocol = HttpGuard.protocol

    def hoard(guard: HttpGuard, *arguments: Any) -> Any:
        kept.append(bytearray(b"x" * 131_072))
        return protocol(guard, *arguments)

    plant(HttpGuard, "protocol", hoard)


#: Those that requests show.
OVER_HTTP = {"trip-over-groups": trip_over_groups, "keep-who-asked": keep_who_asked}

if __name__ == "__main__":
    leave_with_starter()
    if sys.argv[1] != "none":
        (IN_SESSION | IN_SERVICE | OVER_HTTP)[sys.argv[1]](setattr)
    sys.exit(main(sys.argv[2:]))
