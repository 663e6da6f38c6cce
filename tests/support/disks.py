"""Disks that are really full: small file systems of their own."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(at: Path, megabytes: int) -> Iterator[Path]:
    """A file system of so many MiB, mounted there; skips the test where that is not allowed."""
    at.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "small-disk", str(at)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("A SMALL FILE SYSTEM CANNOT BE MOUNTED HERE: a really full disk is not tested")
    try:
        yield at
    finally:
        subprocess.run(["umount", str(at)], check=True)


def remount(disk: Path, options: str) -> None:
    """Mount it otherwise: `size=8m`, `ro`."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True)
