"""Request bodies read all at once, for tests that have nobody else to let in."""

from collections.abc import Generator
from typing import TypeVar

from rollout_dispatcher.sample import Sample
from rollout_dispatcher.service.http.bodies.samples import read_samples
from rollout_dispatcher.service.http.bodies.tensors import Reading

T = TypeVar("T")


def finish(work: Generator[None, None, T]) -> T:
    """What comes of the work."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: T = done.value
            return result


def parse_body(body: bytes, reading: Reading) -> tuple[list[Sample], bool]:
    """The samples of a body, and whether their ids were given."""
    return finish(read_samples(body, reading))
