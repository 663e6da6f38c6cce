"""Every route answers as `/openapi.json` says, to what it allows and to what it does not.

Requests are made from the description, the same ones each time. What the description allows may be
refused all the same, with its reason: it says nothing of the run's window, or of a group's size.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import ServeProcess

pytestmark = pytest.mark.e2e

TOKEN = "0123456789abcdef0123456789abcdef"
ENDS_THE_RUN = "/v1/stream/end"
SERVED: dict[str, Any] = {
    "dp_size": 2, "global_batch_size": 8, "micro_batch_tokens": 4096, "max_body_bytes": "4MiB",
}  # fmt: skip


def examine(server: ServeProcess, folder: Path, *options: str) -> None:
    """folder: where it keeps what it has found."""
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "run", "--no-color",
        f"http://{server.http}/openapi.json", "--generation-deterministic", "--max-examples", "30",
        "--exclude-checks", "positive_data_acceptance", "--request-timeout", "20", *options,
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=200, cwd=folder
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_route_answers_as_it_is_described(tmp_path: Path) -> None:
    with ServeProcess(
        tmp_path, checked=False, **SERVED, journal_dir=tmp_path / "journal"
    ) as server:
        examine(server, tmp_path, "--exclude-path", ENDS_THE_RUN)
        assert server.status()["balanced"]


def test_the_end_of_the_stream_answers_as_it_is_described(tmp_path: Path) -> None:
    with ServeProcess(tmp_path, checked=False, **SERVED) as server:
        # What waits for ranks keeps it serving.
        assert server.post("/v1/samples", b'{"fields": {"input_ids": [1, 2]}}').status == 200
        examine(server, tmp_path, "--include-path", ENDS_THE_RUN)


def test_where_there_is_a_token_every_route_but_probes_asks_for_it(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    with ServeProcess(tmp_path, checked=False, **SERVED, token_file=token) as server:
        paths = ["/v1/samples", "/statusz", "/metrics"]
        assert [server.get(path).status for path in ("/livez", "/readyz", *paths)] == [
            200, 200, 401, 401, 401,
        ]  # fmt: skip
        options = ["--header", f"Authorization: Bearer {TOKEN}", "--exclude-path", ENDS_THE_RUN]
        examine(server, tmp_path, *options)
