"""`python -m rollout_workers.stores`, as an operator empties a store with it."""

import json
import subprocess
import sys

from rollout_workers.stores.file import FileStore


def run(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rollout_workers.stores", *arguments],
        input=given, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_objects_are_listed_and_released(store: FileStore) -> None:
    odd = 'a/"\n'
    for key in ("p.1/0", "q.1/0", odd):
        store.put(key, [b"x"])
    listed = run("list", store.address)
    assert [json.loads(line) for line in listed.stdout.splitlines()] == [odd, "p.1/0", "q.1/0"]
    assert run("list", store.address, "p.").stdout == '"p.1/0"\n'
    done = run("release", store.address, given=listed.stdout)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert store.list("") == []


def test_a_store_that_cannot_be_used_is_told() -> None:
    failed = run("list", "file:///nowhere/at/all")
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert "there is no directory" in failed.stderr


def test_a_line_that_is_no_key_releases_nothing(store: FileStore) -> None:
    store.put("p.1/0", [b"x"])
    failed = run("release", store.address, given='"p.1/0"\nnull\n')
    assert failed.returncode == 1
    assert "line 2" in failed.stderr
    assert store.list("") == ["p.1/0"]
