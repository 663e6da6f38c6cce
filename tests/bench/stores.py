"""Payload stores of this machine for benches, and the interpreters that have their engines.

Each engine is in an environment of its own, build/frameworks/NAME, but files, which need none.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.support.mooncake import mooncake_store
from tests.support.source import PYTHONPATH, ROOT


def python_of(name: str) -> Path:
    """What runs an engine."""
    if name == "file":
        return Path(sys.executable)
    return ROOT / "build" / "frameworks" / name / "bin" / "python"


def figures_of(python: Path, module: str, words: Sequence[str]) -> Any:
    """What a benchmark writes as JSON that another interpreter runs."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        with Path(folder, "log").open("wb+") as log:
            done = subprocess.run(
                [python, "-m", module, *words, "--json", file],
                check=False, cwd=ROOT, env=os.environ | {"PYTHONPATH": PYTHONPATH},
                stdout=log, stderr=log,
            )  # fmt: skip
            if done.returncode:
                log.seek(0)
                sys.exit(f"{module} failed:\n{log.read().decode(errors='replace')}")
        return json.loads(file.read_text())


@contextmanager
def file_store(folder: Path) -> Iterator[str]:
    """Files in memory, so that no disk is measured, or where temporary ones are said to lie."""
    with TemporaryDirectory(dir=tempfile.tempdir or "/dev/shm") as root:
        yield f"file://{root}"


@contextmanager
def ray_store(folder: Path) -> Iterator[str]:
    """A cluster of this machine."""
    import ray  # noqa: PLC0415  only here is it needed

    memory = 1 << 30
    context = ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=memory, log_to_driver=False
    )
    os.environ["RAY_ADDRESS"] = context.address_info["gcs_address"]  # there may be others here
    try:
        yield "ray://rollouts/payloads"
    finally:
        ray.shutdown()


STORES: dict[str, Callable[[Path], Any]] = {
    "file": file_store,
    "mooncake": mooncake_store,
    "ray": ray_store,
}
