"""`dispatcher serve`, whose listening sockets are shut down at SIGUSR2.

`DEAFENED` names the port, so that one plane goes.
"""

import os
import signal
import socket
import sys
from pathlib import Path

from rollout_dispatcher.cli.main import main


def _listening() -> list[int]:
    """Descriptors of TCP sockets that listen on the port in the file."""
    port = int(Path(os.environ["DEAFENED"]).read_text())
    found: list[int] = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            sock = socket.socket(fileno=os.dup(int(path.name)))
        except OSError:
            continue
        with sock:
            listens = sock.family == socket.AF_INET and sock.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            )
            if listens and sock.getsockname()[1] == port:
                found.append(int(path.name))
    return found


def _shut_down(*_: object) -> None:
    for fd in _listening():
        with socket.socket(fileno=os.dup(fd)) as sock:
            sock.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR2, _shut_down)
    sys.exit(main())
