"""The memory there is: the machine's, or the least that a control group on the way up allows."""

from pathlib import Path

import pytest

from rollout_dispatcher.service.process import machine_memory

GIB = 2**30


def machine(root: Path, files: dict[str, str]) -> Path:
    """A machine of 64 GiB with these files."""
    for name, text in {"proc/meminfo": f"MemTotal: {64 * 2**20} kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_control_groups_it_is_the_machines(tmp_path: Path) -> None:
    assert machine_memory(machine(tmp_path, {})) == 64 * GIB


V2 = {"proc/self/cgroup": "0::/pod/box\n", "sys/fs/cgroup/pod/box/memory.max": "max\n"}
V1 = {
    "proc/self/cgroup": "9:name=systemd:/\n5:cpu,memory:/pod/box\n0::/\n",
    "sys/fs/cgroup/memory/pod/box/memory.limit_in_bytes": "9223372036854771712\n",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (V2, 64 * GIB),
        (V2 | {"sys/fs/cgroup/pod/box/memory.max": f"{3 * GIB}\n"}, 3 * GIB),
        (V2 | {"sys/fs/cgroup/pod/memory.max": f"{2 * GIB}\n"}, 2 * GIB),
        (V1, 64 * GIB),
        (V1 | {"sys/fs/cgroup/memory/pod/memory.limit_in_bytes": f"{GIB}\n"}, GIB),
        # Inside a container the path is the host's, and its own group is the root of the tree.
        ({"proc/self/cgroup": "0::/of/the/host\n", "sys/fs/cgroup/memory.max": str(GIB)}, GIB),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "nonsense"}, 64 * GIB),
    ],
    ids=["v2 max", "v2", "v2 above", "v1 max", "v1 above", "container", "unreadable"],
)
def test_the_least_limit_on_the_way_up_counts(
    files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    assert machine_memory(machine(tmp_path, files)) == expected


def test_this_machine_has_some() -> None:
    assert 2**26 < machine_memory() < 2**50
