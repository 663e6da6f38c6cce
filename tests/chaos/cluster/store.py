"""The payload store of a chaos run: a directory, from which objects go behind everybody's back."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from rollout_workers.stores.file import FileStore
from tests.chaos.actors.samples import BALLAST, LONGEST, ballast_of, is_sample, name_of

#: Samples of so many bytes go by reference: most of them.
INLINE_LIMIT = 4096
_ID_BYTES = np.dtype(np.int64).itemsize


class Store:
    """Objects by key. deleted: samples that were in objects which were removed.

    volume: what has the store's directory, as a mounted file system would have it.
    """

    def __init__(self, volume: Path) -> None:
        self._volume, self.root = volume, volume / "rollouts"
        self.root.mkdir(parents=True)
        self.address = f"file://{self.root}"
        self.deleted: set[str] = set()
        self._files = FileStore.open(self.address)

    def flags(self) -> list[str]:
        """Options of `dispatcher serve`."""
        return ["--payload-stores", self.address, "--inline-limit", f"{INLINE_LIMIT}B"]

    def keys(self) -> list[str]:
        """Of the objects that are there, those that came last at the end."""
        return sorted(self._files.list(""), key=self._put_at)

    def everything(self) -> dict[str, list[str]]:
        """The objects that are there, and the samples in each."""
        return {key: self.names(key) for key in self.keys()}

    def names(self, key: str) -> list[str]:
        """The samples that are in an object; none if it is not there, or not whole yet."""
        try:
            return list(_names_in((self.root / key).read_bytes()))
        except OSError:
            return []

    def delete(self, key: str) -> bool:
        """Remove an object; returns whether it was there."""
        names = self.names(key)
        self.deleted.update(names)
        if names:
            self._files.release([key])
        return bool(names)

    @contextmanager
    def away(self, *, mount_point: bool) -> Iterator[None]:
        """The volume is not there, or nothing but its mount point."""
        elsewhere = self._volume.with_name(f"{self._volume.name}-away")
        self._volume.rename(elsewhere)
        if mount_point:
            self._volume.mkdir()
        try:
            yield
        finally:
            if mount_point:
                # Fails if somebody has written there: what is under a mount is seen by nobody.
                self._volume.rmdir()
            elsewhere.rename(self._volume)

    def _put_at(self, key: str) -> float:
        try:
            return (self.root / key).stat().st_mtime
        except OSError:
            return 0.0


def _names_in(data: bytes) -> Iterator[str]:
    """The samples of an object's file: what is behind its header, sample by sample."""
    at = 8 + int.from_bytes(data[:8], "little")
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
    raise AssertionError(f"no sample begins at byte {at} of an object's file")
