"""What benches do with their rows: a line of each as it comes, and all of them in a file."""

import argparse
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


def command(
    about: str | None,
    measure: "Callable[..., Iterable[Row]]",
    line: "Callable[[Row], str]",
    **numbers: int,
) -> None:
    """The command of a bench: `numbers` are its options, and `measure` takes them."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0] if about else None)
    for name, usual in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    given = vars(parser.parse_args())
    file = given.pop("json")
    report(measure(**given), line, file)
