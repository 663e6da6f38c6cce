"""Whatever is not answered with success is answered in JSON that says why, aiohttp's words too."""

import inspect
import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from rollout_dispatcher.errors import IllegalTransition
from rollout_dispatcher.service.http.plane import HttpPlane, describe
from tests.service.conftest import SMALL
from tests.service.http.test_limits import connect, read_all
from tests.service.wires import http_client, make_router
from tests.support.server import ServeProcess

#: Where a push is answered sample by sample.
OUTCOMES = {("/v1/samples", status) for status in ("410", "422", "429")}
PUSH = b"POST /v1/samples HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("errors")
    with ServeProcess(folder, warm=True, **SMALL | {"max_body_bytes": "64KiB"}) as server:
        yield server


def answer_to(server: ServeProcess, said: bytes) -> tuple[int, dict[str, str], bytes]:
    with connect(server) as client:
        client.sendall(said)
        head, _, body = read_all(client).partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), headers, body


@pytest.mark.parametrize(
    ("said", "status", "code"),
    [
        (b"GET /nowhere HTTP/1.1\r\nHost: x\r\n", 404, "not-found"),
        (b"DELETE /v1/samples HTTP/1.1\r\nHost: x\r\n", 405, "method-not-allowed"),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nExpect: wonders\r\n", 417, "expectation-failed"),
        (b"GET /no HTTP/1.1\r\nHost: x\r\nExpect: wonders\r\n", 417, "expectation-failed"),
        (b"?? nonsense\r\n", 400, "bad-request"),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nno colon here\r\n", 400, "bad-request"),
        (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: x\r\n", 400, "bad-request"),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 9000 + b"\r\n", 400, "bad-request"),
        (PUSH + b"Content-Length: -1\r\n", 400, "bad-request"),
        (PUSH + b"Content-Length: 70000\r\n", 413, "body-too-large"),
        (PUSH + b"Content-Encoding: br\r\nContent-Length: 0\r\n", 415, "unknown-encoding"),
        (PUSH + b"Content-Length: 0\r\n", 400, "invalid"),
        (b"POST /v1/phases/x/end HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n", 400, "invalid"),
    ],
    ids=lambda it: it[:30].decode() if isinstance(it, bytes) else str(it),
)
def test_every_error_is_json(said: bytes, status: int, code: str, shared: ServeProcess) -> None:
    found, headers, body = answer_to(shared, said + b"Connection: close\r\n\r\n")
    assert found == status, body
    assert headers["content-type"].startswith("application/json")
    assert json.loads(body)["code"] == code
    assert json.loads(body)["message"]


@pytest.mark.parametrize("bug", [RuntimeError("our bug"), IllegalTransition("a", "b")], ids=repr)
@pytest.mark.parametrize(
    ("broken", "path", "body"),
    [
        ("push", "/v1/samples", b'{"fields": {"input_ids": [1, 2]}}'),
        ("close_group", "/v1/groups/g/close", b""),
        ("end_phase", "/v1/phases/3/end", b""),
        ("end_stream", "/v1/stream/end", b""),
    ],
)
async def test_a_bug_of_the_core_is_500_and_ends_the_service_as_on_the_other_plane(
    broken: str, path: str, body: bytes, bug: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = make_router()

    def fail(*_: object, **__: object) -> None:
        raise bug

    monkeypatch.setattr(router.core, broken, fail)
    async with http_client(router) as client:
        answer = await client.post(path, data=body)
        assert (answer.status, answer.content_type) == (500, "application/json")
        assert (await answer.json())["code"] == "internal"
    assert router.failure is bug
    router.close()


async def test_another_bug_is_500_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    router = make_router()
    monkeypatch.setattr("rollout_dispatcher.service.http.plane.describe", partial(int, "no number"))
    async with http_client(router) as client:
        answer = await client.get("/openapi.json")
        assert (answer.status, answer.content_type) == (500, "application/json")
    assert router.failure is None
    router.close()


def test_the_description_names_the_form_of_all_errors(shared: ServeProcess) -> None:
    described: dict[str, Any] = shared.get("/openapi.json").json
    assert set(described["components"]["schemas"]["Error"]["required"]) == {"code", "message"}
    for path, methods in described["paths"].items():
        for method, what in methods.items():
            for status, answer in what["responses"].items():
                if status >= "400" and (path, status) not in OUTCOMES:
                    schema = answer["content"]["application/json"]["schema"]
                    assert schema == {"$ref": "#/components/schemas/Error"}, (path, method, status)
    assert set(described["paths"]) == {
        "/v1/samples", "/v1/groups/{group_id}/close", "/v1/phases/{policy_version}/end",
        "/v1/stream/end", "/v1/clients", "/metrics", "/livez", "/readyz", "/statusz",
        "/openapi.json", "/",
    }  # fmt: skip


def test_every_route_is_described() -> None:
    source = inspect.getsource(HttpPlane.application)
    routes = re.findall(r'web\.(\w+)\(\s*"([^"]+)"', source)
    described = describe()["paths"]
    assert len(routes) > 9
    assert [(method, path) for method, path in routes if method not in described[path]] == []
