"""The newest segment's number, in a file of its own, `newest`.

A segment is named here before any block is written to it, so that one which is gone is missed. It
stands apart from the index, since that may be full while the log goes on. There are two records in
two sectors, written in turn: a torn one leaves the other. The file has its full size from the
beginning, so that naming a segment takes no room.
"""

import os
from pathlib import Path
from typing import Self

from rollout_dispatcher.errors import JournalCorrupt
from rollout_dispatcher.journal.files.disk import disk_errors, open_ours, sync_directory, write_new
from rollout_dispatcher.journal.files.segment_header import SECTOR, mark, marked

#: That of no segment.
_OF = 0


class NewestSegment:
    """The file `newest` of a journal directory. number: of the newest segment, 0 for none yet.

    Raises JournalCorrupt if no record is whole.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "newest"
        with disk_errors("read", self.path):
            data = self.path.read_bytes()
        number = marked(data, (0, SECTOR), _OF)
        if number is None:
            raise JournalCorrupt(self.path, 0, "it does not say which segment is the newest")
        self.number = number
        self._turn = int(data.startswith(mark(number, _OF)))

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
            write_new(draft, mark(0, _OF).ljust(SECTOR, b"\0") * 2)
            draft.rename(path)
            sync_directory(directory)

    def name(self, number: int) -> None:
        """This segment is the newest from now on. Raises JournalError, JournalFull."""
        with disk_errors("write", self.path):
            handle = open_ours(self.path)
            try:
                os.pwrite(handle, mark(number, _OF), self._turn * SECTOR)
                os.fdatasync(handle)
            finally:
                os.close(handle)
        self.number = number
        self._turn = 1 - self._turn
