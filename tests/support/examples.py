"""Runs the programs of examples/ as their docstrings say."""

import sys
from pathlib import Path

from tests.e2e.harness import finish, running
from tests.support.source import ROOT

EXAMPLES = ROOT / "examples"


def torchrun(ranks: int, program: Path, folder: Path, *arguments: str, **env: str) -> str:
    """Run a program on this many ranks and return what they printed; fails if one of them does.

    folder: where torchrun's logs go. The program sees this environment and this checkout.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, "--log-dir", str(folder / "torchrun"), str(program), *arguments]
    with running(sys.executable, *command, **env) as process:
        return finish(process)
