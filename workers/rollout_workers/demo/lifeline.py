"""Ends a process of the demo when the process that started it is gone, however that ended.

The starter holds the other end of standard input, which children inherit through any launcher in
between: when it closes, by intent or because the starter was killed, every child leaves.
"""

import os
import sys
import threading


def hold() -> None:
    """Watch standard input from a daemon thread, and leave at once when it ends."""
    threading.Thread(target=_watch, name="lifeline", daemon=True).start()


def _watch() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(1)
