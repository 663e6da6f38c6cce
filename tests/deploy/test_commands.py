"""Whatever a deployment file starts, `dispatcher` understands, and it listens only with a token."""

import re
import shlex
from pathlib import Path

import pytest

from rollout_dispatcher.cli.main import main
from tests.support.source import ROOT

FILES = [
    "compose/compose.yml", "docker/Dockerfile", "kubernetes/jobset.yaml",
    "kubernetes/sidecar.yaml", "slurm/train.sbatch", "systemd/rollout-dispatcher.service",
]  # fmt: skip
#: What the files leave to those who run them.
VARIABLES = {
    r"\$\(\([^)]*\)\)": "8",
    r'"?\$\{?DISPATCH_BATCH_SIZE\}?"?': "512",
    r'"?\$\{?MICRO_BATCH_TOKENS\}?"?': "32768",
    r'"\$\{DISPATCHER_\w+:-([^}]*)\}"': r"\1",
    r'"\$RUN/(\w+)(\.json)?"': r"/run/\1\2",
    r"\$\{STATE_DIRECTORY\}": "/var/lib/dispatcher",
}


def command_of(text: str) -> list[str]:
    """The arguments of `serve`, whichever way the file writes lists."""
    text = re.sub(r"\\\n", " ", text)
    for pattern, value in VARIABLES.items():
        text = re.sub(pattern, value, text)
    if lists := re.findall(r"- serve\n((?: +- --.*\n)+)", text):
        return [line.strip().removeprefix("- ") for line in lists[0].splitlines()]
    if flat := re.search(r"\[serve, ([^\]]*)\]", text):
        return [word.strip() for word in flat[1].split(",")]
    found = re.search(r"(?:bin/dispatcher|  rollout-dispatcher|dispatcher) serve (--[^&\n]*)", text)
    assert found is not None
    return shlex.split(re.sub(r" +#", " ", found[1]))


@pytest.mark.parametrize("name", FILES)
def test_serve_understands_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = command_of((ROOT / "deploy" / name).read_text())
    assert flags
    token, config = tmp_path / "token", tmp_path / "config.toml"
    token.write_text("a-token-of-more-than-sixteen-letters\n")
    token.chmod(0o600)
    producers = tmp_path / "producer-token"
    producers.write_text("another-token-of-more-than-sixteen-letters\n")
    producers.chmod(0o600)
    config.write_text("dp_size = 2\nglobal_batch_size = 16\nmicro_batch_tokens = 4096\n")
    files = ("--token-file", token), ("--producer-token-file", producers), ("--config", config)
    for flag, path in files:
        for index, word in enumerate(flags):
            if word.startswith(f"{flag}="):
                flags[index] = f"{flag}={path}"
            elif word == flag:
                flags[index + 1] = str(path)
    in_container = name.startswith(("docker", "compose", "kubernetes"))
    if in_container:
        monkeypatch.setenv("DISPATCHER_LISTEN", "0.0.0.0:7077")
        monkeypatch.setenv("DISPATCHER_HTTP", "0.0.0.0:9471")
    elif name.startswith("slurm"):
        monkeypatch.setenv("DISPATCHER_TOKEN_FILE", str(token))
    assert main(["check-config", *flags]) == 0, capsys.readouterr().err
