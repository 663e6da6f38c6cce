"""What faults may do to the payload store of a chaos run, and what the checker asks of it."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from random import Random

import numpy as np

from tests.chaos.actors.samples import BALLAST, LONGEST, ballast_of, is_sample, name_of

#: Samples of so many bytes go by reference: most of them.
INLINE_LIMIT = 4096
_ID_BYTES = np.dtype(np.int64).itemsize


class Store(ABC):
    """Objects by key, in an engine.

    deleted: samples that were in objects which went behind everybody's back. env: what producers
    and ranks need in their environment.
    """

    def __init__(self, address: str, env: Mapping[str, str] = {}) -> None:
        self.address, self.env = address, env
        self.deleted: set[str] = set()

    def flags(self) -> list[str]:
        """Options of `dispatcher serve`."""
        return ["--payload-stores", self.address, "--set", f"inline-limit={INLINE_LIMIT}B"]

    def everything(self) -> dict[str, list[str]]:
        """The objects that are there, and the samples in each."""
        return {key: self.names(key) for key in self.keys()}

    def names(self, key: str) -> list[str]:
        """The samples that are in an object; none if it is not there, or not whole yet."""
        data = self.read(key)
        return [] if data is None else list(names_in(data))

    def delete(self, key: str) -> bool:
        """Remove an object; returns whether it was there."""
        names = self.names(key)
        self.deleted.update(names)
        if names:
            self.release([key])
        return bool(names)

    def kill(self, random: Random) -> None:
        """Kill -9 what has the objects, or knows them, and start another; nobody puts meanwhile."""
        for names in self.everything().values():
            self.deleted.update(names)
        self.restart(random)

    def left(self) -> dict[str, list[str]]:
        """What is there that is left when all is over, as `everything` has it.

        What the engine holds beyond the objects that it lists is one more, without samples.
        """
        return self.everything()

    @abstractmethod
    def keys(self) -> list[str]:
        """Of the objects that are there, those that came last at the end."""

    @abstractmethod
    def read(self, key: str) -> bytes | None:
        """The spans of an object, None if it is not there, or not whole yet."""

    @abstractmethod
    def release(self, keys: Sequence[str]) -> None:
        """Remove objects."""

    @abstractmethod
    def away(self, random: Random) -> AbstractContextManager[None]:
        """It cannot be reached for the block's time; nothing is lost of it."""

    def restart(self, random: Random) -> None:
        """Kill -9 what has the objects, which go with it, and start another."""
        raise NotImplementedError(f"nobody has the objects of {self.address}")

    def close(self) -> None:  # noqa: B027  most have nothing to end
        """End what was started."""


def names_in(data: bytes) -> Iterator[str]:
    """The samples of an object, which has one behind the other."""
    at = 0
    while at < len(data):
        name, nbytes = _sample_at(data, at)
        yield name
        at += nbytes


def _sample_at(data: bytes, at: int) -> tuple[str, int]:
    """The sample that begins here, ballast before tokens, and its bytes."""
    for length in range(1, LONGEST + 1):
        ids_at, end = at + BALLAST * length, at + (BALLAST + _ID_BYTES) * length
        if end > len(data):
            break
        tokens = np.frombuffer(data[ids_at:end], np.int64)
        if is_sample(tokens) and ballast_of(tokens).tobytes() == data[at:ids_at]:
            return name_of(tokens), end - at
    raise AssertionError(f"no sample begins at byte {at} of an object")
