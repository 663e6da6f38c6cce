"""The token that a deployment file makes or mounts is one that `dispatcher` takes and can read."""

import re
import subprocess
from pathlib import Path

import pytest

from rollout_dispatcher.security import read_token
from tests.support.source import ROOT

DEPLOY = ROOT / "deploy"
SECRET = "a-token-of-more-than-sixteen-letters\n"


@pytest.mark.parametrize("name", ["sidecar", "jobset"])
def test_a_pods_secret_has_a_mode_that_is_taken_and_a_group_that_may_read_it(
    name: str, tmp_path: Path
) -> None:
    text = (DEPLOY / "kubernetes" / f"{name}.yaml").read_text()
    modes = re.findall(r"secret: \{.*defaultMode: (0\d+) \}", text)
    assert modes
    for number, mode in enumerate(modes):
        token = tmp_path / str(number)
        token.write_text(SECRET)
        token.chmod(int(mode, 8))
        assert read_token(token) == SECRET.strip()
    assert text.count("fsGroup: ") == len(modes), "one for each pod"


@pytest.mark.parametrize("name", ["compose/compose.yml", "docker/Dockerfile"])
def test_containers_read_the_token_as_its_group(name: str, tmp_path: Path) -> None:
    text = (DEPLOY / name).read_text()
    (made,) = re.findall(r"^#   (\(umask .*\))$", text, re.MULTILINE)
    subprocess.run(["bash", "-c", made], cwd=tmp_path, check=True)
    assert read_token(tmp_path / "token")
    assert (tmp_path / "token").stat().st_mode & 0o040
    if name.startswith("docker"):
        assert '--group-add "$(id -g)"' in text
        return
    assert "TOKEN_GROUP=$(id -g)" in text
    services = re.findall(r"^  \w+:\n(?:    .*\n)+", text, re.MULTILINE)
    with_token = [service for service in services if "secrets: [token]" in service]
    assert len(with_token) == 2
    for service in with_token:
        assert 'group_add: ["${TOKEN_GROUP:-1000}"]' in service
        assert "user:" not in service, "its volumes are its image's user's"
