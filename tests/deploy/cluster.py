"""A real Slurm of one node on loopback: munged, slurmctld and slurmd, as processes of the test."""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.addresses import free_port
from tests.support.server import eventually

DAEMONS = ("munged", "slurmctld", "slurmd")
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[None]:
    """Within, `sbatch` and the like talk to this cluster. folder: short, as it holds a socket."""
    config = folder / "slurm.conf"
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    controller = free_port()
    config.write_text(
        CONFIG.format(
            host=socket.gethostname().partition(".")[0],
            folder=folder,
            controller=controller,
            node=free_port(controller),
            cpus=os.cpu_count(),
        )
    )
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    with contextlib.ExitStack() as stack:
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        environment.setenv("SLURM_CONF", str(config))
        munge = ["--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
        munge += [f"--{it}-file={folder}/munged.{it}" for it in ("pid", "log", "seed")]
        _start(stack, folder, "munged", *munge)
        eventually((folder / "munge.socket").exists, "munged listens")
        _start(stack, folder, "slurmctld", "-D", "-f", str(config))
        _start(stack, folder, "slurmd", "-D", "-f", str(config))
        eventually(_is_up, "the node is idle")
        yield


def _start(stack: contextlib.ExitStack, folder: Path, name: str, *arguments: str) -> None:
    path = shutil.which(name)
    assert path is not None
    log = stack.enter_context((folder / f"{name}.log").open("wb"))
    daemon = subprocess.Popen([path, *arguments], stdout=log, stderr=log)
    stack.callback(_end, daemon)


def _end(daemon: "subprocess.Popen[bytes]") -> None:
    daemon.terminate()
    try:
        daemon.wait(10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _is_up() -> bool:
    said = subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True, check=False)
    return said.stdout.strip() == "idle"
