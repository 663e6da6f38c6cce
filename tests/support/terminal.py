"""A real terminal for tests: a shell in tmux, on a server of its own that ends with the block.

with Terminal(80, 24, tmux) as terminal:
terminal.type("dispatcher top")
eventually(lambda: "lost" in terminal.text(), "the first frame")
terminal.press("q")
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Self

from tests.support.source import ROOT

PROMPT = "ready> "


class Terminal:
    """folder: where the server's socket lies. environment: further variables of the shell."""

    def __init__(
        self, folder: Path, tmux: str, *, width: int, height: int, **environment: str
    ) -> None:
        self._command = [tmux, "-u", "-S", str(folder / "tmux"), "-f", os.devnull]
        self._size = ["-x", str(width), "-y", str(height)]
        paths = [ROOT, ROOT / "dispatcher", ROOT / "workers", os.environ.get("PYTHONPATH", "")]
        self._environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": ":".join(map(str, paths)),
            "LC_ALL": "C.UTF-8",
            "PS1": PROMPT,
        } | environment

    def __enter__(self) -> Self:
        said = [f"{name}={value}" for name, value in self._environment.items()]
        shell = ["env", *said, "bash", "--norc", "--noprofile"]
        self._tmux("new-session", "-d", *self._size, *shell)
        return self

    def __exit__(self, *_: object) -> None:
        self._tmux("kill-server")

    def type(self, line: str) -> None:
        """A line, and the return key."""
        self._tmux("send-keys", "-l", line)
        self.press("Enter")

    def press(self, *keys: str) -> None:
        """Keys by tmux's names: `q`, `C-c`, `Down`."""
        self._tmux("send-keys", *keys)

    def resize(self, width: int, height: int) -> None:
        """Have the window another size."""
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def lines(self) -> list[str]:
        """What the window shows, without trailing spaces."""
        return self._tmux("capture-pane", "-p").splitlines()

    def text(self) -> str:
        """The same, in one."""
        return "\n".join(self.lines())

    def _tmux(self, *words: str) -> str:
        environment = {name: text for name, text in os.environ.items() if name != "TMUX"}
        command = [*self._command, *words]
        done = subprocess.run(command, check=True, capture_output=True, env=environment)
        return done.stdout.decode()
