"""Request bodies of all kinds, from outside: clear answers, never a 500, and nobody else waits."""

import gzip
import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rollout_dispatcher.service.http.samples import MAX_SAMPLES
from rollout_workers import RolloutProducer
from tests.service.conftest import SMALL, Serve
from tests.service.http.test_limits import connect, read_all
from tests.support.client import Producer, Trainer
from tests.support.server import ServeProcess, eventually, series

MIB = 2**20
SAMPLE = b'{"fields": {"input_ids": [5, 6, 7]}}'
TOKEN = "a-token-that-nobody-may-read"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """Room for all that these tests push, and the default limit of a body."""
    folder = tmp_path_factory.mktemp("shared")
    with ServeProcess(folder, warm=True, **SMALL | {"buffer_capacity": 1000}) as server:
        yield server


def large(nbytes: int) -> bytes:
    """One sample of so many bytes, of which each number has two."""
    head, tail = b'{"fields": {"input_ids": [', b"1]}}"
    return head + b"1," * ((nbytes - len(head) - len(tail)) // 2) + tail


def exchange(server: ServeProcess, request: bytes) -> bytes:
    """What is answered to these bytes until the connection ends, which it has to."""
    with connect(server) as client:
        client.sendall(request)
        return read_all(client)


def post(body: bytes, *headers: str) -> bytes:
    lines = ["POST /v1/samples HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body


def test_a_compressed_body_is_refused_in_clear_words(shared: ServeProcess) -> None:
    for coding in ("gzip", "identity, br"):
        answer = exchange(shared, post(gzip.compress(SAMPLE), f"Content-Encoding: {coding}"))
        assert answer.startswith(b"HTTP/1.1 415")
        assert b"cannot be undone; send none" in answer
        assert b"Accept-Encoding: identity" in answer


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000, b'{"a":' * 10_000, b'{"fields": {"x": ' + b"[" * 100_000,
        b'{"fields": {"input_ids": [1], "x": -Infinity}}',
        b'{"fields": {"input_ids": [1]}, "sample_id": "\xff"}',
        b"\xef\xbb\xbf" + SAMPLE, SAMPLE.decode().encode("utf-16"), SAMPLE + SAMPLE,
        SAMPLE + b"\n" + SAMPLE[:-1], b"[" + SAMPLE, b"[" + SAMPLE + b",]", b"[" + SAMPLE + b"]]",
    ],
    ids=lambda body: repr(body[:40]),
)  # fmt: skip
def test_a_body_that_is_hard_to_read_is_answered_400_and_nothing_of_it_is_taken(
    body: bytes, shared: ServeProcess
) -> None:
    before = shared.status()["accepted"]
    answer = shared.post("/v1/samples", body)
    assert (answer.status, answer.json["code"]) == (400, "invalid")
    assert shared.status()["accepted"] == before


def test_a_body_at_the_limit_is_read_and_one_byte_more_is_refused(serve: Serve) -> None:
    server = serve(max_body_bytes="1MiB", micro_batch_tokens=2**20)
    body = large(MIB).ljust(MIB)
    assert server.post("/v1/samples", body).json["outcomes"] == ["accepted"]
    answer = server.post("/v1/samples", body + b" ")
    assert (answer.status, answer.json["code"]) == (413, "body-too-large")
    assert "raise --set max-body-bytes" in answer.json["message"]
    chunked = server.request("POST", "/v1/samples", iter([body, b" "]))
    assert chunked.status == 413


def test_a_body_is_asked_for_only_if_it_may_come(shared: ServeProcess) -> None:
    expect = "Expect: 100-continue"
    assert exchange(shared, post(SAMPLE, expect)).startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP")
    with connect(shared) as client:
        client.sendall(post(b"", expect).replace(b"Length: 0", b"Length: 99999999"))
        assert client.recv(65536).startswith(b"HTTP/1.1 413")


def test_a_body_that_nobody_waits_for_any_more_is_left(serve: Serve) -> None:
    server = serve(buffer_capacity=100_000)
    lines = (SAMPLE + b"\n") * MAX_SAMPLES
    with ThreadPoolExecutor(2) as threads:
        posted = [threads.submit(server.post, "/v1/samples", lines) for _ in range(2)]
        received = 2 * len(lines)
        server.await_scrape(lambda found: found["receiving_bytes"] == received, "two are read")
        with connect(server) as impatient:
            impatient.sendall(post(lines))
        assert [one.result().status for one in posted] == [200] * 2
    server.await_scrape(lambda found: found["receiving_bytes"] == 0, "nothing is left to read")
    assert server.status()["accepted"] == 2 * MAX_SAMPLES


def test_more_samples_than_the_core_is_told_of_at_once_are_all_answered(serve: Serve) -> None:
    server = serve(buffer_capacity=150)
    lines = [{"fields": {"input_ids": [1]}, "sample_id": f"s{at}"} for at in range(200)]
    lines[100] |= {"fields": {"input_ids": [1] * 100}}  # more than a micro-batch takes
    answer = server.post("/v1/samples", b"\n".join(json.dumps(line).encode() for line in lines))
    outcomes = answer.json["outcomes"]
    assert [outcomes.count(it) for it in ("accepted", "refused", "full")] == [150, 1, 49]
    assert outcomes[100] == "refused"
    assert list(answer.json["errors"]) == ["100"]


def test_a_push_during_a_drain_is_told_to_come_again(serve: Serve) -> None:
    server = serve()
    producer, trainer = Producer(server.endpoint, "p"), Trainer(server.endpoint, 2)
    producer.push([3, 4, 5, 6])
    server.await_status(in_flight=4)
    server.send_signal(signal.SIGTERM)
    server.await_status(run_state="draining")
    answer = server.post("/v1/samples", SAMPLE)
    assert (answer.status, answer.json["code"]) == (503, "stopping")
    assert answer.headers["Retry-After"] == "1"
    assert len(trainer.ranks) == 2


def spoilt(request: bytes) -> list[bytes]:
    """A request with a byte too much, each byte at each place that matters."""
    start = request.index(b"Authorization")
    places = [start, start + 3, *range(start + 13, start + 24), request.index(b"\r\n", start)]
    bad = [*range(32), 58, 127, 128, 255]
    return [request[:at] + bytes([byte]) + request[at:] for at in places for byte in bad]


@pytest.mark.parametrize("log_level", ["info", "debug"])
def test_a_token_is_in_no_log_however_malformed_its_request_is(
    log_level: str, serve: Serve, tmp_path: Path
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    server = serve(token_file=token_file, log_level=log_level)
    whole = post(SAMPLE, f"Authorization: Bearer {TOKEN}")
    assert exchange(server, whole).startswith(b"HTTP/1.1 200")
    requests = [
        *spoilt(whole), f"{TOKEN} / HTTP/1.1\r\n\r\n".encode(),
        f"GET /livez?{TOKEN} X HTTP/9.9\r\n\r\n".encode(),
        post(SAMPLE, f"X: {TOKEN * 1000}"), post(SAMPLE, f"Content-Length: {TOKEN}"),
        post(SAMPLE, f"Transfer-Encoding: {TOKEN}"), post(SAMPLE, f"Content-Encoding: {TOKEN}"),
        f"POST /v1/samples HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        f"Transfer-Encoding: chunked\r\n\r\n5\r\nhello{TOKEN}".encode(),
    ]  # fmt: skip
    for request in requests:
        with connect(server) as client:
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            while client.recv(65536):
                pass
    assert TOKEN not in server.log()
    assert "traceback" not in server.log()
    counted = series(server.get("/metrics", ("Authorization", f"Bearer {TOKEN}")).text)
    assert counted["connection_errors_total{reason=malformed,role=http}"] > 100
    assert ("malformed HTTP request" in server.log()) == (log_level == "debug")


def test_a_body_is_read_as_the_runs_samples_are_though_that_is_decided_meanwhile(
    serve: Serve,
) -> None:
    """It takes a tenth of a second, in which the first step is planned of others."""
    server = serve(buffer_capacity=10_000)
    sample = {"fields": {"input_ids": [7] * 60, "x": [0.5] * 60}}
    body = json.dumps([sample] * MAX_SAMPLES).encode()
    with (
        RolloutProducer(server.endpoint) as producer,
        Trainer(server.endpoint, 2) as trainer,
        ThreadPoolExecutor(1) as pool,
    ):
        other = {"input_ids": range(3), "x": np.zeros(3)}
        producer.push_many([other] * 3)
        answer = pool.submit(server.post, "/v1/samples", body)
        eventually(
            lambda: answer.done() or server.scrape()["receiving_bytes"] >= len(body), "it is here"
        )
        producer.push(other)
        trainer.train()
        assert answer.result().status == 200
