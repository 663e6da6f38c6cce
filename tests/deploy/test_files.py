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


@pytest.mark.parametrize(("name", "resources"), [("sidecar", 2), ("networkpolicy", 1)])
def test_kubernetes_takes_the_manifest(name: str, resources: int) -> None:
    path = str(DEPLOY / "kubernetes" / f"{name}.yaml")
    done = run("kubernetes-validate", "--strict", "-k", "1.31", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("passed for resource") == resources


def test_kubernetes_takes_what_the_job_set_stands_beside_and_the_jobs_it_makes(
    tmp_path: Path,
) -> None:
    """A JobSet is no resource of Kubernetes itself; its Job is."""
    text = (DEPLOY / "kubernetes" / "jobset.yaml").read_text()
    beside, _, job_set = text.rpartition("---\n")
    template = dedent(job_set.partition("      template:\n")[2])
    path = tmp_path / "jobs.yaml"
    path.write_text(
        f"{beside}---\napiVersion: batch/v1\nkind: Job\nmetadata: {{ name: trainer }}\n{template}\n"
    )
    done = run("kubernetes-validate", "--strict", "-k", "1.31", str(path))
    assert done.returncode == 0, done.stderr
    for resource in (
        "service/rollout-dispatcher",
        "persistentvolumeclaim/rollout-dispatcher-journal",
        "job/rollout-dispatcher",
        "job/trainer",
    ):
        assert f"passed for resource {resource}" in done.stdout


def test_a_failed_trainer_recreates_neither_the_dispatcher_nor_its_journal() -> None:
    """What a JobSet restarts is what is in it."""
    _, _, job_set = (DEPLOY / "kubernetes" / "jobset.yaml").read_text().rpartition("---\n")
    assert "kind: JobSet" in job_set
    assert job_set.count("- name: trainer\n") == 2  # its Job, and the container in that
    assert "journal" not in job_set


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
