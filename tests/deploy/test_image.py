"""The built image serves: as nobody special, on a read-only root, and says that it is well.

`make image` builds it; DISPATCHER_IMAGE=rollout-dispatcher make test-deploy tries it.
"""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.addresses import free_port
from tests.support.client import Producer
from tests.support.server import eventually

IMAGE = os.environ.get("DISPATCHER_IMAGE", "")
pytestmark = pytest.mark.skipif(
    not IMAGE or os.geteuid() != 0 or shutil.which("buildah") is None,
    reason="no image is named by DISPATCHER_IMAGE (see make image), or not root, or no buildah",
)
#: What a container runtime does of it: a root that is read-only, a memory file system for its
#: temporary files, devices, and another user.
CONTAINED = """
set -e
mount --bind "$1" "$1"
mount -o remount,bind,ro "$1"
mount --rbind /dev "$1/dev"
mount -t proc proc "$1/proc"
mount -t tmpfs -o mode=0700,uid=10001 tmpfs "$1/journal"
root=$1; shift
exec chroot --userspec=10001:10001 "$root" "$@"
"""


class Image:
    """One container's file system, and what the image says is run in it."""

    def __init__(self, container: str) -> None:
        said = subprocess.check_output(["buildah", "inspect", container], text=True)
        self.config: dict[str, Any] = json.loads(said)["Docker"]["config"]
        mounted = subprocess.check_output(["buildah", "mount", container], text=True)
        self.root = Path(mounted.strip())

    def start(self, *command: str, **environ: str) -> "subprocess.Popen[bytes]":
        variables = dict(item.split("=", 1) for item in self.config["Env"])
        contained = ["unshare", "--mount", "sh", "-c", CONTAINED, "sh", str(self.root), *command]
        return subprocess.Popen(contained, env=variables | environ, stderr=subprocess.PIPE)


@pytest.fixture
def image() -> Iterator[Image]:
    container = subprocess.check_output(["buildah", "from", IMAGE], text=True).strip()
    yield Image(container)
    subprocess.run(["buildah", "rm", container], check=True, stdout=subprocess.DEVNULL)


def test_it_serves_and_is_well_on_a_root_that_it_cannot_write_to(image: Image) -> None:
    assert image.config["User"] == "10001"
    samples, http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    where = {"DISPATCHER_LISTEN": samples, "DISPATCHER_HTTP": http}
    serve = [*image.config["Entrypoint"], *image.config["Cmd"]]
    flags = ["--dp-size=2", "--global-batch-size=8", "--micro-batch-tokens=64"]
    health = image.config["Healthcheck"]["Test"]
    assert health[0] == "CMD"

    def is_well() -> bool:
        with image.start(*health[1:], **where) as asked:
            asked.communicate()
            return asked.returncode == 0

    assert not is_well()
    server = image.start(*serve, *flags, "--journal-dir=/journal/run", **where)
    try:
        eventually(is_well, "the health check is content", within=60)
        producer = Producer(samples, "p0")
        producer.send_push([5], seq=0)
        producer.receive()
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0  # the journal keeps what nobody has trained on
    finally:
        server.kill()
        _, log = server.communicate()
    assert b"Traceback" not in log, log.decode()


def test_there_is_no_torch_and_no_compiler_in_it(image: Image) -> None:
    packages = {
        path.name for path in image.root.glob("opt/dispatcher/lib/python3*/site-packages/*")
    }
    assert {"rollout_dispatcher", "rollout_workers"} <= packages
    assert "torch" not in packages
    assert not list(image.root.glob("usr/bin/*gcc*"))
