"""The newest segment's number, in a file of its own, `newest`.

A segment is named here before any block is written to it, so that one which is gone is missed. It
stands apart from the index, since that may be full while the log goes on. There are two records in
two sectors, written in turn: a torn one leaves the other. The file has its full size from the
beginning, so that naming a segment takes no room.
"""

import os
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from typing import Self

from rollout_dispatcher.errors import JournalCorrupt
from rollout_dispatcher.journal.files.disk import disk_errors, open_ours, sync_directory, write_new

_SECTOR = 512
_RECORD = Struct("<8sQ16s")
_MAGIC = b"rdnewest"


class NewestSegment:
    """The file `newest` of a journal directory. number: of the newest segment, 0 for none yet.

    Raises JournalCorrupt if no record is whole.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "newest"
        with disk_errors("read", self.path):
            data = self.path.read_bytes()
        numbers = [_number(data[at : at + _RECORD.size]) for at in (0, _SECTOR)]
        known = [number for number in numbers if number is not None]
        if not known:
            raise JournalCorrupt(self.path, 0, "it does not say which segment is the newest")
        self.number = max(known)
        self._turn = 1 - numbers.index(self.number)

    @classmethod
    def find(cls, directory: Path, *, begun: bool) -> Self:
        """That of this directory, made if nothing was `begun` in it; else it has to be there."""
        path = directory / "newest"
        if not path.exists():
            if begun:
                raise JournalCorrupt(path, 0, "the file is missing")
            cls.create(directory)
        return cls(directory)

    @classmethod
    def create(cls, directory: Path) -> None:
        """Begin with none; whole or not at all."""
        path = directory / "newest"
        draft = path.with_suffix(".new")
        with disk_errors("write", draft):
            draft.unlink(missing_ok=True)  # of a process that was killed meanwhile
            write_new(draft, _record(0).ljust(_SECTOR, b"\0") * 2)
            draft.rename(path)
            sync_directory(directory)

    def name(self, number: int) -> None:
        """This segment is the newest from now on. Raises JournalError, JournalFull."""
        with disk_errors("write", self.path):
            handle = open_ours(self.path)
            try:
                os.pwrite(handle, _record(number), self._turn * _SECTOR)
                os.fdatasync(handle)
            finally:
                os.close(handle)
        self.number = number
        self._turn = 1 - self._turn


def _record(number: int) -> bytes:
    digest = blake2b(_MAGIC + number.to_bytes(8, "little"), digest_size=16).digest()
    return _RECORD.pack(_MAGIC, number, digest)


def _number(record: bytes) -> int | None:
    if len(record) < _RECORD.size:
        return None
    _, number, _ = _RECORD.unpack(record)
    return number if record == _record(number) else None
