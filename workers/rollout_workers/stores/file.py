"""`file:///root`: objects as files in a directory that producers and DP ranks all have.

A file is one of safetensors, with a single tensor `spans` of bytes: the spans of a push, end to
end. The store writes it under another name, makes it durable and then renames it, so under its own
name it is whole. A file of safetensors of any other origin is an object as well: its bytes are
those behind its header.

Invariant: an object's file exists under one of its two names from before its first byte is written
until it is released, so an unfinished file of a process that died is listed, and deleted.

A key's path below the root has one folder an incarnation, one file an object:

    p.1/0           p.1/0
    ../../etc/x     %2E./..%2Fetc%2Fx
    one             one

The part of a key before its first slash is the folder, the rest the file's name, each quoted as in
a URL. So a path has at most two parts, none of which is hidden, `..`, or empty: no key leads out of
the root, and no two lead to the same file.
"""

import builtins
import errno
import json
import logging
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar, Self, TypeVar
from urllib.parse import quote, unquote, urlsplit

from rollout_dispatcher.errors import StoreFailed
from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.protocol.outbox import Buffer, Outbox
from rollout_workers.stores.interface import Missing, Part, PayloadStore

log = logging.getLogger(__name__)


#: Behind the name of a file that is being written; no quoted name has a `%` followed by this.
PART = "%part"
#: The root among its folders; no quoted name begins with a point.
ROOT = "."
#: The name of nothing; no quoted name is this.
_EMPTY = "%"


def place(key: str) -> tuple[str, str]:
    """The folder of a key, `ROOT` without a slash in it, and the name of its file."""
    first, slash, rest = key.partition("/")
    return (_quoted(first), _quoted(rest)) if slash else (ROOT, _quoted(first))


def key_of(folder: str, name: str) -> str | None:
    """The key of a file, whole or unfinished; None if it is no object's."""
    name = name.removesuffix(PART)
    key = _unquoted(name) if folder == ROOT else f"{_unquoted(folder)}/{_unquoted(name)}"
    return key if place(key) == (folder, name) else None


def may_have(folder: str, prefix: str) -> bool:
    """Whether keys of a folder may begin so."""
    begin = _unquoted(folder) + "/"
    return begin.startswith(prefix) or prefix.startswith(begin)


def _quoted(part: str) -> str:
    found = quote(part, safe="", errors="surrogatepass") or _EMPTY
    return "%2E" + found[1:] if found.startswith(".") else found


def _unquoted(name: str) -> str:
    return "" if name == _EMPTY else unquote(name, errors="replace")


T = TypeVar("T")

#: Objects begin at a multiple of this in their files, as safetensors' readers like it.
ALIGNMENT = 64
#: How often to make a folder again that others remove, since it is empty.
ATTEMPTS = 100
#: Errors of opening where there is no object of this name.
_NO_FILE = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENAMETOOLONG, errno.ENXIO}
)
_NOT_FOLLOWED = os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class FileStore(PayloadStore):
    """Objects below the directory `root`, which has to be the same one on every machine."""

    scheme: ClassVar[str] = "file"

    def __init__(self, address: str, root: Path) -> None:
        self.address, self.root = address, root
        self._inode = root.stat().st_ino

    @classmethod
    def open(cls, address: str) -> Self:
        """Raises StoreFailed where there is no such directory."""
        parts = urlsplit(address)
        root = Path(unquote(parts.path))
        if parts.netloc not in ("", "localhost") or not root.is_absolute() or len(root.parts) < 2:
            raise StoreFailed(address, "name a directory by its whole path: file:///data/rollouts")
        if parts.query or parts.fragment:
            raise StoreFailed(address, "its ? or # means nothing here; write %3F or %23 in a name")
        if not root.is_dir():
            raise StoreFailed(
                address,
                f"there is no directory {root} here; make it, or mount it, on every machine that "
                "has producers or DP ranks: the same directory for all of them",
            )
        return cls(address, root)

    def put(self, key: str, spans: Sequence[Buffer]) -> StoredObject:
        """Write its file; leaves nothing behind where it raises StoreFailed."""
        outbox, (folder, name) = Outbox(), place(key)
        nbytes, written = sum(map(len, spans)), name + PART
        outbox.put([_header(key, nbytes), *spans])
        with self._naming_errors(f"writing {key}"):
            at, file = self._create(folder, written)
            try:
                while outbox.nbytes:
                    outbox.sent(os.writev(file, outbox.head()))
                os.fsync(file)
                os.rename(written, name, src_dir_fd=at, dst_dir_fd=at)
                written = name
                os.fsync(at)
            except BaseException:
                with suppress(OSError, StoreFailed):
                    os.unlink(written, dir_fd=at)
                    self._remove_folders({folder})
                raise
            finally:
                os.close(file)
                os.close(at)
        return StoredObject(self.address, key, nbytes)

    def get_into(
        self,
        references: Sequence[Reference],
        memory: memoryview,
        parts: Sequence[Sequence[Part]],
    ) -> builtins.list[Missing | None]:
        """Read the parts alone; no file is opened twice."""
        found: dict[int, Missing | None] = {}
        wanted: dict[StoredObject, builtins.list[int]] = {}
        for at, reference in enumerate(references):
            wanted.setdefault(reference.stored, []).append(at)
        for stored, places in wanted.items():
            with self._naming_errors(f"reading {stored.key}"):
                if (file := self._open(stored)) is None:
                    why = Missing(f"{self.address} has no {stored.key}")
                    found |= dict.fromkeys(places, why)
                    continue
                try:
                    start = _start(file, stored.nbytes)
                    for at in places:
                        found[at] = _read(file, start, references[at], memory, parts[at])
                finally:
                    os.close(file)
        return [found[at] for at in range(len(references))]

    def release(self, keys: Sequence[str]) -> builtins.list[str]:
        """Remove their files, and the folders that are empty then."""
        if not keys:
            return []
        with self._folder(ROOT) as root:
            left = [key for key in keys if not self._remove(root, *place(key))]
        self._remove_folders({place(key)[0] for key in keys})
        return left

    def list(self, prefix: str) -> builtins.list[str]:
        """Unfinished ones too."""
        with self._naming_errors(f"listing {prefix or 'all'}"), self._folder(ROOT) as root:
            found = set(_keys_in(root, ROOT))
            for item in os.scandir(root):
                if item.is_dir(follow_symlinks=False) and may_have(item.name, prefix):
                    found.update(_keys_in(root, item.name))
        return sorted(key for key in found if key is not None and key.startswith(prefix))

    def close(self) -> None:
        """Nothing is open."""

    # -- mechanism

    def _create(self, folder: str, name: str) -> tuple[int, int]:
        """Descriptors of the folder and of a new, empty file in it."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _NOT_FOLLOWED
        for left in reversed(range(ATTEMPTS)):
            try:
                with self._folder(ROOT) as root:
                    at = _made(root, folder)
                try:
                    return at, os.open(name, flags, 0o666, dir_fd=at)
                except BaseException:
                    os.close(at)
                    raise
            except FileNotFoundError:  # the last of the folder's objects was released meanwhile
                if not left:
                    raise
        raise AssertionError

    def _open(self, stored: StoredObject) -> int | None:
        """A descriptor of an object's file; None if there is no file of its name."""
        folder, name = place(stored.key)
        try:
            with self._folder(folder) as at:
                # A pipe of this name would block.
                return os.open(name, os.O_RDONLY | os.O_NONBLOCK | _NOT_FOLLOWED, dir_fd=at)
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            return None

    def _remove(self, root: int, folder: str, name: str) -> bool:
        """Whether it is gone."""
        try:
            with _opened(root, folder) as at:
                for one in (name, name + PART):
                    with suppress(FileNotFoundError):
                        os.unlink(one, dir_fd=at)
        except OSError as error:
            if error.errno in _NO_FILE:
                return True
            log.warning("%s in %s stays: %s", name, self.root, error)
            return False
        return True

    def _remove_folders(self, folders: Iterable[str]) -> None:
        """Those that are empty."""
        with self._folder(ROOT) as root:
            for folder in folders:
                with suppress(OSError):  # it is the root, or gone, or has other objects
                    os.rmdir(folder, dir_fd=root)

    @contextmanager
    def _folder(self, folder: str) -> Iterator[int]:
        """A descriptor of a folder that is no symbolic link; the root may be one.

        Raises StoreFailed where the root is another directory than it was, so that nothing is read,
        written or taken for gone below the mount point of a file system that is not mounted. Two
        mounts of one file system have the same inode, and an empty mount point another one.
        """
        try:
            root = os.open(self.root, _FOLDER)
        except OSError as error:
            raise StoreFailed(self.address, error) from error
        try:
            if os.fstat(root).st_ino != self._inode:
                raise StoreFailed(self.address, f"{self.root} is not what it was; is it mounted?")
            with _opened(root, folder) as at:
                yield at
        finally:
            os.close(root)

    @contextmanager
    def _naming_errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreFailed(self.address, f"{doing}: {error}") from error


@contextmanager
def _opened(root: int, folder: str) -> Iterator[int]:
    """A descriptor of a folder in the root."""
    at = os.open(folder, _FOLDER | os.O_NOFOLLOW, dir_fd=root)
    try:
        yield at
    finally:
        os.close(at)


def _made(root: int, folder: str) -> int:
    """A descriptor of a folder in the root, which is made if it is not there."""
    with suppress(FileExistsError):
        os.mkdir(folder, dir_fd=root)
        os.fsync(root)
    return os.open(folder, _FOLDER | os.O_NOFOLLOW, dir_fd=root)


def _keys_in(root: int, folder: str) -> Iterator[str | None]:
    with suppress(FileNotFoundError), _opened(root, folder) as at:  # it may be empty, and gone
        for item in os.scandir(at):
            if item.is_file(follow_symlinks=False):
                yield key_of(folder, item.name)


def _header(key: str, nbytes: int) -> bytes:
    """The safetensors header of an object of so many bytes."""
    text = json.dumps(
        {
            "__metadata__": {"key": key},
            "spans": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]},
        }
    ).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _start(file: int, nbytes: int) -> int | None:
    """Where an object of so many bytes begins in its file; None if the file is no such object."""
    found = os.fstat(file)
    start = found.st_size - nbytes
    if not stat.S_ISREG(found.st_mode) or start < 8:
        return None
    return start if 8 + int.from_bytes(os.pread(file, 8, 0), "little") == start else None


def _read(
    file: int, start: int | None, reference: Reference, memory: memoryview, parts: Sequence[Part]
) -> Missing | None:
    """Fill memory with parts of a reference, unless it is missing."""
    stored = reference.stored
    if start is None:
        return Missing(f"{stored.key} in {stored.store} is no object of {stored.nbytes} bytes")
    for source, target, nbytes in parts:
        at, end = reference.offset + source, reference.offset + source + nbytes
        if end > stored.nbytes:
            return Missing(f"{stored.key} ends before byte {end}")
        into = memory[target : target + nbytes]
        while into.nbytes:
            count = os.preadv(file, [into], start + at)
            if not count:
                return Missing(f"{stored.key} ends at byte {at}")
            into, at = into[count:], at + count
    return None
