"""Request bodies read all at once, for tests that have nobody else to let in."""

import asyncio
from typing import TypeVar

from rollout_dispatcher.sample import Sample
from rollout_dispatcher.service.http.bodies import Work, in_pieces
from rollout_dispatcher.service.http.samples import read_samples
from rollout_dispatcher.service.http.tensors import Reading

T = TypeVar("T")


def finish(work: Work[T]) -> T:
    """What comes of the work."""
    return asyncio.run(in_pieces(work))


def parse_body(body: bytes, reading: Reading) -> tuple[list[Sample], bool]:
    """The samples of a body, and whether their ids were given."""
    return finish(read_samples(body, reading))[:2]
