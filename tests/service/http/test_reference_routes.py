"""Which objects of a payload store are needed, as who wants to free the rest is told."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from rollout_dispatcher.core.dispatch import Dispatch
from rollout_dispatcher.errors import JournalFull
from rollout_dispatcher.protocol.messages import MAX_KEYS
from rollout_dispatcher.service.config.serve import ServeConfig, core_config
from rollout_dispatcher.service.metrics.registry import Metrics
from rollout_dispatcher.service.router import Router
from tests.service.conftest import SMALL, Serve
from tests.service.durability.test_barrier import SlowLog
from tests.service.http.test_errors import plane_of
from tests.support.client import Producer
from tests.support.references import STORE, make_references
from tests.support.server import Response, ServeProcess

PATH = "/v1/references/known"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("references")
    options = SMALL | {"payload_stores": STORE, "journal_dir": folder / "journal"}
    with ServeProcess(folder, warm=True, **options) as server:
        yield server


def ask(server: ServeProcess, **body: Any) -> Response:
    return server.post(PATH, json.dumps(body).encode())


def test_what_is_pushed_and_what_may_be_is_needed(server: ServeProcess) -> None:
    there = ["p.1/0", "p.1/9", "q.1/0", "q.1/1", "somebody\u2019s", "\ud800", "/" * 2**19]
    with (
        Producer(server.endpoint, "p", opens_stores=True, incarnation="p.1"),
        Producer(server.endpoint, "q", opens_stores=True) as other,
    ):
        push, payload = make_references("q", 0, [5])
        other.send(push, payload)
        other.receive()
        answer = ask(server, store=STORE, keys=there)
    assert (answer.status, answer.json) == (200, {
        "run_id": server.status()["run_id"], "needed": ["p.1/0", "p.1/9", "q.1/0"],
    })  # fmt: skip


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({"store": "file:///mnt/other", "keys": []}, 422, f"--payload-stores: {STORE}"),
        ({"store": STORE, "keys": ["k"] * (MAX_KEYS + 1)}, 400, f"at most {MAX_KEYS} items"),
        ({"store": STORE, "keys": "k"}, 400, "keys: "),
        ({"store": STORE, "keys": [1]}, 400, "keys.0: "),
        ({"store": STORE}, 400, "keys: "),
        ({"store": STORE, "keys": [], "more": 1}, 400, "more: "),
        ([], 400, "no JSON object"),
        ({"store": STORE, "keys": ["k" * 2**20]}, 413, "1048576"),
    ],
    ids=lambda it: str(it)[:40],
)
def test_what_is_asked_otherwise_is_refused(
    body: object, status: int, told: str, server: ServeProcess
) -> None:
    answer = server.post(PATH, json.dumps(body).encode())
    assert (answer.status, told in answer.json["message"]) == (status, True), answer.text


def test_nobody_is_told_without_the_token(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef0123456789abcdef")
    (tmp_path / "token").chmod(0o600)
    assert ask(serve(token_file=tmp_path / "token"), store=STORE, keys=[]).status == 401


async def test_it_is_answered_once_what_it_rests_on_is_durable() -> None:
    """Else a dispatcher that is killed would need again what was freed on its word."""
    log = SlowLog()
    config = ServeConfig(
        dp_size=1, global_batch_size=1, micro_batch_size=1,
        journal_dir=Path("unused"), payload_stores=(STORE,),
    )  # fmt: skip
    clock = asyncio.get_running_loop().time
    core = Dispatch(core_config(config))
    router = Router(config, core, Metrics(config, core, clock), clock, log)
    async with TestClient(plane_of(router)) as client:
        router.perform(core.producer_connected("p", "", "p.1"))
        router.perform(core.producer_lost("p", clock(), for_good=True))
        body = {"store": STORE, "keys": ["p.1/0"]}
        asked = asyncio.ensure_future(client.post(PATH, json=body))
        for _ in range(5):  # these come later, wait for nothing, and overtake it
            assert (await client.post(PATH, json=body | {"store": "another"})).status == 422
        assert not asked.done()
        await log.durable(len(log.batches))
        assert (await (await asked).json())["needed"] == []
        log.failure = JournalFull("no room at all")
        assert (await client.post(PATH, json=body)).status == 503
    router.close()
