"""The committed results in docs/results: what was measured, by which command, when and on what."""

import json
import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from tests.support.source import ROOT

FOLDER = ROOT / "docs" / "results"


@dataclass(frozen=True, slots=True)
class Machine:
    """What a measurement ran on. python, numpy: versions."""

    cpus: int
    python: str
    numpy: str


@dataclass(frozen=True, slots=True)
class Measured:
    """One result file.

    command: what printed or wrote the figures. date: ISO, of the day. figures: as the command has
    them. note: what else the reader must know, a sentence; mostly empty.
    """

    command: str
    date: str
    machine: Machine
    figures: Any
    note: str = ""

    def __str__(self) -> str:
        """Where the figures are from, in Markdown."""
        on = self.machine
        said = (
            f"Measured with `{self.command}` on {self.date}: {on.cpus} cores, "
            f"Python {on.python}, numpy {on.numpy}."
        )
        return f"{said} {self.note}".strip()


def this_machine() -> Machine:
    """The one at hand."""
    cpus = os.cpu_count()
    assert cpus is not None
    return Machine(cpus, platform.python_version(), version("numpy"))


def load(name: str) -> Measured:
    """Read a result file."""
    data = json.loads((FOLDER / f"{name}.json").read_text())
    return Measured(**data | {"machine": Machine(**data["machine"])})


def save(name: str, command: str, figures: object) -> None:
    """Write a result file of today and this machine."""
    today = datetime.now(tz=UTC).date().isoformat()
    measured = asdict(Measured(command, today, this_machine(), figures))
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(measured, indent=1) + "\n")
