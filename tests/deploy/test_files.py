"""Manifests, Dockerfile and scripts, by the tools that know them; `make test-deploy` has these."""

import shutil
import subprocess
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.source import ROOT

DEPLOY = ROOT / "deploy"


def run(*command: str) -> "subprocess.CompletedProcess[str]":
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]} here: `make test-deploy` installs it")
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.parametrize("name", ["sidecar", "networkpolicy"])
def test_kubernetes_takes_the_manifest(name: str) -> None:
    path = str(DEPLOY / "kubernetes" / f"{name}.yaml")
    done = run("kubernetes-validate", "--strict", "-k", "1.31", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("passed for resource") == {"sidecar": 2, "networkpolicy": 1}[name]


@pytest.mark.parametrize("name", ["dispatcher", "trainer"])
def test_kubernetes_takes_the_jobs_of_the_job_set(name: str, tmp_path: Path) -> None:
    """A JobSet is no resource of Kubernetes itself; the Jobs that it makes are."""
    text = (DEPLOY / "kubernetes" / "jobset.yaml").read_text()
    _, _, job = text.partition(f"    - name: {name}\n")
    template = job.partition("      template:\n")[2].partition("\n    - name: ")[0]
    path = tmp_path / "job.yaml"
    path.write_text(
        f"apiVersion: batch/v1\nkind: Job\nmetadata: {{ name: {name} }}\n{dedent(template)}\n"
    )
    done = run("kubernetes-validate", "--strict", "-k", "1.31", str(path))
    assert done.returncode == 0, done.stderr
    assert f"passed for resource job/{name}" in done.stdout


def test_the_dockerfile_is_clean() -> None:
    done = run("hadolint", "deploy/docker/Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")


def test_the_batch_script_is_clean() -> None:
    done = run("shellcheck", "deploy/slurm/train.sbatch")
    assert (done.returncode, done.stdout) == (0, "")


def test_compose_takes_its_file(tmp_path: Path) -> None:
    (tmp_path / "token").touch()
    done = run("docker-compose", "-f", "deploy/compose/compose.yml", "config", "--quiet")
    assert done.returncode == 0, done.stderr


def test_prometheus_takes_the_config_of_compose() -> None:
    """Its rules lie beside it in the container."""
    config = (DEPLOY / "compose" / "prometheus.yml").read_text()
    done = run("promtool", "check", "config", "--syntax-only", "deploy/compose/prometheus.yml")
    assert done.returncode == 0, done.stderr
    assert "alerts.yml" in config
