"""The journal's directory: one dispatcher at a time, one format.

    lock    the pid of the running dispatcher, for the error of another one
    format  the format's number; a journal of another format is not changed
    newest  the newest segment's number
    index   the last snapshot; the segments lie beside it

The directory itself is locked (flock), since a file in it can be removed and created again while
the first dispatcher holds its lock. NFS cannot lock directories: there only the file `lock` is.

`newest` names a segment before any block is written to it, so that its loss is detected. It is
apart from the index, since that may be full while the log goes on. It has two records in two
sectors, written in turn: a torn one leaves the other. The file has its full size from the
beginning, so that naming a segment takes no room.

Invariants: nothing else in the directory is read or written before the lock is held and the format
is known; no segment is begun once the path names another directory.
"""

import errno
import fcntl
import os
from contextlib import ExitStack
from pathlib import Path

from rollout_dispatcher.errors import JournalCorrupt, JournalError
from rollout_dispatcher.journal.files.disk import disk_errors, open_ours, sync_directory, write_new
from rollout_dispatcher.journal.files.segment_header import SECTOR, mark, marked

FORMAT = 4
_PREFIX = "rollout-dispatcher journal, format "


#: Errors of file systems that cannot lock directories (NFS: a lock needs a writable file).
_NO_DIRECTORY_LOCKS = {errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}


class Directory:
    """A journal directory, locked until `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with ExitStack() as undo:
            with disk_errors("use the journal directory", path):
                if not path.is_dir():
                    path.mkdir(mode=0o700, parents=True)
                    sync_directory(path.parent)
                self._itself = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
                undo.callback(os.close, self._itself)
                self._lock = open_ours(path / "lock", os.O_CREAT)
                undo.callback(os.close, self._lock)
            self._take()
            self._check_format()
            self._release = undo.pop_all()

    def close(self) -> None:
        """Release the locks."""
        self._release.close()

    def check_is_there(self) -> None:
        """Raise JournalError if the path names another directory now, or none."""
        with disk_errors("find the journal directory", self.path):
            if os.path.samestat(os.fstat(self._itself), self.path.stat()):
                return
        raise JournalError(
            f"the journal directory {self.path} was moved or removed while this dispatcher wrote "
            "to it, and another one is in its place; put it back, then restart"
        )

    def _take(self) -> None:
        with disk_errors("lock", self.path):
            try:
                for handle in (self._itself, self._lock):
                    try:
                        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except OSError as error:
                        if handle == self._lock or error.errno not in _NO_DIRECTORY_LOCKS:
                            raise
            except BlockingIOError:
                pid = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
                raise JournalError(
                    f"the journal {self.path} is in use by another dispatcher (pid "
                    f"{pid or 'unknown'}); stop it, or give this one a --journal-dir of its own"
                ) from None
        with disk_errors("write to", self.path / "lock"):
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _check_format(self) -> None:
        path = self.path / "format"
        with disk_errors("read or write", path):
            if not path.exists():
                self._begin(path)
            text = path.read_text(errors="replace").strip()
        number = text.removeprefix(_PREFIX)
        if not text.startswith(_PREFIX) or not number.isdecimal():
            raise self._not_ours()
        if int(number) != FORMAT:
            raise JournalError(
                f"the journal {self.path} has format {number}, this release reads format {FORMAT} "
                "alone; finish or drain its run with the release that wrote it, or move the "
                "directory away to begin without the samples in it"
            )

    def _begin(self, path: Path) -> None:
        """Turn an empty directory into a journal; any other is refused."""
        draft = path.with_suffix(".new")
        if any(item.name not in {"lock", draft.name, "lost+found"} for item in self.path.iterdir()):
            raise self._not_ours()
        draft.unlink(missing_ok=True)  # of a process that was killed meanwhile
        write_new(draft, f"{_PREFIX}{FORMAT}\n".encode())
        draft.rename(path)
        sync_directory(self.path)

    def _not_ours(self) -> JournalError:
        return JournalError(
            f"{self.path} has files in it and no file `format` that says that they are a journal; "
            "give --journal-dir a directory of its own"
        )


#: Keys the marks in `newest`; no segment has this number.
_NO_SEGMENT = 0


class NewestSegment:
    """The file `newest` of a journal directory. number: of the newest segment, 0 for none yet.

    begun: the journal has other files, so this one has to exist; else it is created. Raises
    JournalCorrupt if it is missing, or no record is whole.
    """

    def __init__(self, directory: Path, *, begun: bool = True) -> None:
        self.path = directory / "newest"
        if not self.path.exists():
            if begun:
                raise JournalCorrupt(self.path, 0, "the file is missing")
            self._create()
        with disk_errors("read", self.path):
            data = self.path.read_bytes()
        number = marked(data, (0, SECTOR), _NO_SEGMENT)
        if number is None:
            raise JournalCorrupt(self.path, 0, "it does not say which segment is the newest")
        self.number = number
        self._turn = int(data.startswith(mark(number, _NO_SEGMENT)))

    def _create(self) -> None:
        """Create the file atomically, with no segment."""
        draft = self.path.with_suffix(".new")
        with disk_errors("write", draft):
            draft.unlink(missing_ok=True)  # of a process that was killed meanwhile
            write_new(draft, mark(0, _NO_SEGMENT).ljust(SECTOR, b"\0") * 2)
            draft.rename(self.path)
            sync_directory(self.path.parent)

    def name(self, number: int) -> None:
        """Record the newest segment. Raises JournalError, JournalFull."""
        with disk_errors("write", self.path):
            handle = open_ours(self.path)
            try:
                os.pwrite(handle, mark(number, _NO_SEGMENT), self._turn * SECTOR)
                os.fdatasync(handle)
            finally:
                os.close(handle)
        self.number = number
        self._turn = 1 - self._turn
