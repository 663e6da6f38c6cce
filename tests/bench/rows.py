"""What benches do with their rows: a line of each as it comes, and all of them in a file."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Row = TypeVar("Row", bound=DataclassInstance)


def report(rows: "Iterable[Row]", line: "Callable[[Row], str]", file: Path | None) -> None:
    """Print each as `line` has it; write them to the file, if there is one."""
    found = []
    for row in rows:
        print(line(row), flush=True)
        found.append(asdict(row))
    if file is not None:
        file.write_text(json.dumps(found, indent=2) + "\n")
