"""How every test starts ranks: under torchrun, on this machine, its logs where the test's are."""

import sys
from pathlib import Path


def torchrun_command(ranks: int, folder: Path) -> list[str]:
    """The command, to which a script and its arguments are added; it logs into `folder`.

    Without a place of its own for its logs, torchrun leaves a new folder in the temporary one.
    """
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks),
        "--log-dir", str(folder / "torchrun"),
    ]  # fmt: skip
