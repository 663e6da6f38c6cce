"""The oldest versions that pyproject.toml allows, as constraints for pip: the smoke test uses them.

    python -m tests.packaging.oldest > constraints-oldest.txt

Every requirement that users get without torch has a lower bound, and the bound is what is tested.
What these bring in turn is the newest that fits, as pip chooses.
"""

import re
import tomllib
from typing import Any

from tests.support.source import ROOT


def project() -> dict[str, Any]:
    """What pyproject.toml says of the project."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def oldest_python() -> str:
    """The oldest Python that is allowed, as `3.11`."""
    return str(project()["requires-python"]).removeprefix(">=")


def requirements() -> list[str]:
    """What the dispatcher requires of others. Of the extra `workers` see pyproject.toml."""
    named = [*project()["dependencies"], *project()["optional-dependencies"]["server"]]
    return [one for one in named if not one.startswith("rollout-planner")]


def oldest(requirement: str) -> str:
    """`numpy>=1.26,<3` -> `numpy==1.26`. Raises ValueError where there is no lower bound."""
    found = re.match(r"([A-Za-z0-9._-]+)>=([0-9.]+)(,|$)", requirement)
    if found is None:
        raise ValueError(f"{requirement} does not begin with its lower bound, as in numpy>=1.26")
    return f"{found[1]}=={found[2]}"


def main() -> None:
    """Print them."""
    print("\n".join(map(oldest, requirements())))


if __name__ == "__main__":
    main()
