"""What is kept of a run of an environment's tests: versions, outcomes, and integrations in figures.

A test that trains says what its integration takes by pytest's `record_property`, one property a
figure: see `Integration`.
"""

import json
import re
import subprocess
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

_VERSIONS = """
import json, sys
from importlib.metadata import version
print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""


@dataclass(frozen=True, slots=True)
class Integration:
    """What it took to feed a framework, in figures; the names of the properties that are recorded.

    framework: as people call it. example: the file, from the repository's root. lines: of code
    between its `# integration: begin` and `# integration: end`, imports not counted.
    gradient_difference: the largest of any element from a single process with the whole batch,
    relative to the largest gradient; ranks: how many trained.
    """

    framework: str
    example: str
    lines: int
    ranks: int
    gradient_difference: float


def report(python: Path, requirements: Path, junit: Path) -> dict[str, Any]:
    """The figures of a result file. junit: what pytest wrote of the run."""
    cases = [*ElementTree.parse(junit).iter("testcase")]
    names = ["torch", *re.findall(r"^([\w.-]+)", requirements.read_text(), flags=re.MULTILINE)]
    said = subprocess.run([python, "-c", _VERSIONS, *names], check=True, capture_output=True)
    integrations = [found for case in cases if (found := _integration(case))]
    return {
        "versions": json.loads(said.stdout),
        "tests": [
            {
                "name": case.attrib["name"],
                "outcome": "skipped" if case.find("skipped") is not None else "passed",
                "seconds": round(float(case.attrib["time"]), 1),
            }
            for case in cases
        ],
        "integrations": integrations,
    }


def _integration(case: ElementTree.Element) -> dict[str, Any] | None:
    """The properties that a test has recorded."""
    said = {each.attrib["name"]: each.attrib["value"] for each in case.iter("property")}
    if not said:
        return None
    kinds: dict[str, Any] = {field.name: field.type for field in fields(Integration)}
    return {name: kind(said[name]) for name, kind in kinds.items()}
