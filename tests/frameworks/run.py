"""Tests the integrations with other people's trainers, each in an environment of its own.

    python -m tests.frameworks.run [ENVIRONMENT ...]      # all of them, unless some are named

An environment is build/frameworks/NAME, made of requirements/NAME.txt, and runs the tests in the
folder of its name. It also sees what this environment holds, torch above all, so that there is one
torch for all of them, in the version of constraints.txt: a framework that insists on another one
is an error, not a download. What a run found is kept in docs/results/frameworks-NAME.json.
"""

import os
import subprocess
import sys
import sysconfig
from argparse import ArgumentParser
from pathlib import Path

from tests.frameworks.report import report
from tests.results.files import save
from tests.results.tables import write_all
from tests.support.source import PYTHONPATH, ROOT

HERE = Path(__file__).parent
WORK = ROOT / "build" / "frameworks"
CONSTRAINTS = ROOT / "constraints.txt"


def environments() -> list[str]:
    """Those that there are requirements for."""
    return sorted(path.stem for path in (HERE / "requirements").glob("*.txt"))


def environment(name: str) -> Path:
    """Its Python, once everything that it requires is installed."""
    home, required = WORK / name, HERE / "requirements" / f"{name}.txt"
    python, installed = home / "bin" / "python", home / "installed.txt"
    # pip never looks at what it has not been asked for again, so the whole question is compared.
    asked = f"{sys.prefix}\n{CONSTRAINTS.read_text()}{required.read_text()}"
    if installed.exists() and installed.read_text() == asked:
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
    # Behind its own packages: what a framework wants in another version it gets.
    shared = sysconfig.get_path("purelib")
    own = sysconfig.get_path("purelib", vars={"base": str(home)})
    Path(own, "shared.pth").write_text(f"{shared}\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", str(CONSTRAINTS), "-r", str(required)], check=True)
    installed.write_text(asked)
    return python


def run(name: str) -> bool:
    """Test one; whether all went well. Only then is it kept as the last output."""
    print(f"== {name}", flush=True)
    python, junit = environment(name), WORK / f"{name}.xml"
    # Other people's packages warn of what is theirs to mend.
    tests = ["-m", "pytest", "-W", "default", "-o", "junit_family=xunit1", "-o", "timeout=240"]
    tests += [f"--junitxml={junit}", str(HERE / name)]
    env = os.environ | {"PYTHONPATH": PYTHONPATH, "PYTHONASYNCIODEBUG": "1"}
    passed = subprocess.run([python, *tests], check=False, cwd=ROOT, env=env).returncode == 0
    if passed:
        figures = report(python, HERE / "requirements" / f"{name}.txt", junit)
        save(f"frameworks-{name}", f"make test-frameworks ONLY={name}", figures)
    return passed


def main() -> int:
    """Test what is asked for, or all; the exit status."""
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="ENVIRONMENT", help=", ".join(environments()))
    names = parser.parse_args().names or environments()
    if unknown := set(names) - set(environments()):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {environments()}")
    failed = [name for name in names if not run(name)]
    write_all()
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
