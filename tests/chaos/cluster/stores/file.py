"""A store of files: a directory in a volume that may go, as a mounted file system would."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

from rollout_workers.stores.file import FileStore
from tests.chaos.cluster.stores.store import Store


class FileEngine(Store):
    """volume: what has the store's directory, as a mounted file system would have it."""

    def __init__(self, volume: Path) -> None:
        self._volume, self.root = volume, volume / "rollouts"
        self.root.mkdir(parents=True)
        super().__init__(f"file://{self.root}")
        self._files = FileStore.open(self.address)

    def keys(self) -> list[str]:
        """By when they were put."""
        return sorted(self._files.list(""), key=self._put_at)

    def read(self, key: str) -> bytes | None:
        """What is behind the header of its file."""
        try:
            data = (self.root / key).read_bytes()
        except OSError:
            return None
        return data[8 + int.from_bytes(data[:8], "little") :]

    def release(self, keys: Sequence[str]) -> None:
        """Remove their files."""
        self._files.release(keys)

    @contextmanager
    def away(self, random: Random) -> Iterator[None]:
        """The volume is not there, or nothing but its mount point."""
        mount_point = random.random() < 0.5
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
