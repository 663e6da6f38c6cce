"""Who may connect: off loopback nobody without a token or certificate, and what a token opens."""

import json
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from rollout_dispatcher.cli.main import main
from rollout_dispatcher.errors import ConfigError, Unauthorized
from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.service.access import OVERLAP_SECONDS, Access, Rights
from rollout_dispatcher.service.config.serve import ServeConfig
from tests.service.conftest import Serve
from tests.support.certificates import Authority, write_token
from tests.support.client import Producer, WireClient
from tests.support.server import Header, ServeProcess, eventually, series

SECRET = "correct-horse-battery-staple"
FLAGS = ["--dp-size", "2", "--global-batch-size", "4", "--micro-batch-tokens", "64"]
BODY = b'{"fields": {"input_ids": [5, 6, 7], "loss_mask": [false, true, true]}}'


def config(**changes: Any) -> ServeConfig:
    return ServeConfig.model_validate(
        {"dp_size": 2, "global_batch_size": 8, "micro_batch_size": 2} | changes
    )


def bearer(token: str) -> Header:
    return "Authorization", f"Bearer {token}"


def count(server: ServeProcess, role: str, reason: str) -> float:
    found = series(server.get("/metrics", bearer(SECRET)).text)
    return found.get(f"connection_errors_total{{reason={reason},role={role}}}", 0)


OFF_LOOPBACK: list[dict[str, Any]] = [
    {"listen": ["0.0.0.0:0"]},
    {"listen": ["[::]:0"]},
    {"listen": ["127.0.0.1:0", "192.0.2.7:0"]},
    {"http": "0.0.0.0:0"},
]


@pytest.mark.parametrize("changes", OFF_LOOPBACK, ids=str)
def test_off_loopback_it_needs_a_token_or_client_certificates(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    assert "can be reached from other machines" in str(caught.value)
    assert "--token-file" in str(caught.value)
    assert "\n" not in str(caught.value)
    authority = Authority(tmp_path)
    tls = authority.issue("localhost").options()
    with pytest.raises(ConfigError, match="can be reached"):
        config(**changes, **tls)  # TLS alone does not say who connects
    config(**changes, token_file=write_token(tmp_path / "token"))
    config(**changes, **tls, tls_client_ca=authority.ca)
    config(**changes, insecure=True)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"tls_cert": "a.pem"}, "give both or neither"),
        ({"tls_key": "a.key"}, "give both or neither"),
        ({"tls_client_ca": "ca.pem"}, "give --tls-cert and --tls-key too"),
        ({"listen": ["tls://127.0.0.1:0"]}, "without --tls-cert and --tls-key"),
        ({"token_file": "/nonexistent/token"}, "/nonexistent/token cannot be read"),
        ({"tls_cert": "/nonexistent/a", "tls_key": "/nonexistent/b"}, "cannot be read"),
    ],
)
def test_what_is_half_said_or_absent_is_refused(changes: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        config(**changes)


def test_a_unix_socket_needs_neither(tmp_path: Path) -> None:
    config(listen=[f"unix:{tmp_path}/a"], http=f"unix:{tmp_path}/b")


def test_it_serves_other_machines_with_a_token_or_where_that_is_insisted_on(
    serve: Serve, tmp_path: Path
) -> None:
    there = f"{own_address()}:0"
    for options, token, warning in (
        ({"token_file": write_token(tmp_path / "token")}, SECRET, "no TLS: samples, and a token, "),
        ({"insecure": True}, None, "--insecure: whoever reaches"),
    ):
        server = serve(listen=there, **options)
        Producer(server.endpoint, "p", token=token).bye()
        assert warning in server.log()


def own_address() -> str:
    """An address of this machine that is not loopback; no packet is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        address: str = probe.getsockname()[0]
    if address.startswith("127."):
        pytest.skip("this machine has no address but loopback")
    return address


def hello(role: str, token: str | None) -> m.HelloProducer | m.HelloRank:
    if role == "producer":
        return m.HelloProducer(client_id="p", token=token)
    return m.HelloRank(client_id="r", dp_rank=0, dp_size=2, token=token)


@pytest.mark.parametrize("role", ["producer", "rank"])
def test_the_token_lets_in_and_nothing_else_does(role: str, serve: Serve, tmp_path: Path) -> None:
    server = serve(token_file=write_token(tmp_path / "token"))
    for wrong in (None, "", SECRET + "x", SECRET[:-1], SECRET.upper(), "é" * 20):
        with WireClient(server.endpoint) as client:
            client.send(hello(role, wrong))
            error = client.expect_error("unauthorized")
            assert not error.retriable
            assert "--token-file" in error.message
            assert SECRET not in error.message
    eventually(lambda: count(server, role, "unauthorized") == 6, "six refusals are counted")
    with WireClient(server.endpoint) as client:
        client.send(hello(role, SECRET))
        assert isinstance(client.receive()[0], m.WelcomeProducer | m.WelcomeRank)
    assert SECRET not in server.log()
    assert (wrong or "") not in server.log()


def test_nothing_is_taken_from_whoever_has_not_shown_it(serve: Serve, tmp_path: Path) -> None:
    server = serve(token_file=write_token(tmp_path / "token"))
    with WireClient(server.endpoint) as client:
        hello = codec.encode(m.HelloProducer(client_id="p", token="wrong" * 5))
        client.send_bytes(hello + codec.encode(m.EndStream()))  # in one go, before any answer
        client.expect_error("unauthorized")
    status = server.get("/statusz", bearer(SECRET)).json
    assert status["run_state"] == "running"


def test_over_http_every_route_but_the_probes_needs_the_token(serve: Serve, tmp_path: Path) -> None:
    server = serve(token_file=write_token(tmp_path / "token"))
    routes = ["/", "/metrics", "/statusz", "/openapi.json", "/nowhere"]
    pushes = ["/v1/samples", "/v1/stream/end", "/v1/phases/3/end", "/v1/groups/g/close"]
    asked = [("GET", path) for path in routes] + [("POST", path) for path in pushes]
    refused = ["", f"Basic {SECRET}", SECRET, f"Bearer {SECRET}x", "Bearer", "Bearer é"]
    for method, path in asked:
        for wrong in ([], *([("Authorization", text)] for text in refused)):
            answer = server.request(method, path, BODY, *wrong)
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert answer.json["code"] == "unauthorized"
    assert count(server, "http", "unauthorized") == len(asked) * (1 + len(refused))
    for path in routes:
        for right in (bearer(SECRET), ("Authorization", f"bearer {SECRET}")):
            assert server.get(path, right).status == (404 if path == "/nowhere" else 200)
    assert server.post("/v1/samples", BODY, bearer(SECRET)).json["outcomes"] == ["accepted"]
    assert server.get("/statusz", bearer(SECRET)).json["run_state"] == "running"
    for probe in ("/livez", "/readyz"):
        assert server.get(probe).status == 200
    assert main(["wait-ready", "--http", server.http, "--timeout", "5s"]) == 0


def test_the_secret_is_shown_nowhere(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token_file = write_token(tmp_path / "token")
    server = serve(token_file=token_file, log_level="debug")
    for path in ("/statusz", "/metrics"):
        assert SECRET not in server.get(path, bearer(SECRET)).text
    assert SECRET not in server.log()
    assert main(["check-config", *FLAGS, "--token-file", str(token_file)]) == 0
    assert SECRET not in capsys.readouterr().out
    assert SECRET not in repr(config(token_file=token_file).access())
    assert SECRET not in repr(m.HelloProducer(client_id="p", token=SECRET))


def test_a_unix_socket_is_private_from_its_first_moment(serve: Serve, tmp_path: Path) -> None:
    paths = [tmp_path / "sample.sock", tmp_path / "http.sock"]
    serve(listen=f"unix:{paths[0]}", http=f"unix:{paths[1]}")
    for path in paths:
        found = path.stat()
        assert found.st_mode & 0o777 == 0o600
        # A mode that was set after the socket was made would have changed its inode since.
        assert found.st_ctime_ns == found.st_mtime_ns


def test_probes_name_nobody_to_who_has_not_shown_the_token(serve: Serve, tmp_path: Path) -> None:
    server = serve(token_file=write_token(tmp_path / "token"), group_size=4)
    name, group = "node\x1b[31m\n7", "solve: 2+2\u202e"
    with Producer(server.endpoint, name, token=SECRET) as producer:
        producer.push([3], group_ids=[group])
        with Producer(server.endpoint, "other", token=SECRET) as other:
            other.push([3], group_ids=["h"])
            producer.send(m.EndPhase(policy_version=3))
            producer.ping()
            shown = server.get("/readyz", bearer(SECRET))
            assert r"is group solve: 2+2\u202e (1 of 4), of producer node\x1b[31m\n7," in shown.text
            assert "the end of the phase before 3 waits for producer other" in shown.text
            assert not set("\x1b\u202e") & set(server.get("/statusz", bearer(SECRET)).text)
            for wrong in ([], [bearer(f"{SECRET}x")]):
                probe = server.get("/readyz", *wrong)
                told = server.get("/readyz", ("Accept", "application/json"), *wrong).json
                assert probe.status == 200
                assert "2 open groups hold 2 samples; the oldest has not grown for" in probe.text
                assert "the end of the phase before 3 waits for 1 producer" in probe.text
                for text in (probe.text, json.dumps(told)):
                    assert not any(word in text for word in ("node", "solve", "other"))
                assert "open-groups" in {delay["cause"] for delay in told["delays"]}
    assert count(server, "http", "unauthorized") == 0


@pytest.mark.parametrize("path", ["/statusz", "/readyz"])
def test_two_tokens_in_one_request_are_refused(path: str, serve: Serve, tmp_path: Path) -> None:
    server = serve(token_file=write_token(tmp_path / "token"))
    for first, second in ((SECRET, "x" * 20), (SECRET, SECRET)):
        answer = server.get(path, bearer(first), bearer(second))
        assert (answer.status, answer.json["code"]) == (400, "invalid")
        assert "more than one Authorization header" in answer.json["message"]


PUSHERS = "a-token-for-rollout-workers"


def two_tokens(tmp_path: Path) -> dict[str, Any]:
    return {
        "token_file": write_token(tmp_path / "token"),
        "producer_token_file": write_token(tmp_path / "pushers", PUSHERS),
    }


def test_a_producers_token_pushes_and_does_nothing_else(serve: Serve, tmp_path: Path) -> None:
    server = serve(**two_tokens(tmp_path))
    with WireClient(server.endpoint) as rank:
        rank.send(m.HelloRank(client_id="r", dp_rank=0, dp_size=2, token=PUSHERS))
        assert "take a DP rank's place" in rank.expect_error("forbidden").message
    assert server.get("/statusz", bearer(SECRET)).json["generation"] == 0
    for said in (m.EndStream(force=True), m.EndPhase(policy_version=3, force=True)):
        with Producer(server.endpoint, "p", token=PUSHERS) as producer:
            producer.send(said)
            assert "end for all producers (force)" in producer.expect_error("forbidden").message
    with Producer(server.endpoint, "q", token=PUSHERS) as producer:
        assert producer.push([3]).outcomes == ["accepted"]
        producer.send(m.CloseGroup(group_id="g"))
        producer.send(m.EndPhase(policy_version=3))
        producer.ping()
    at = server.get("/statusz", bearer(SECRET)).json
    assert (at["run_state"], at["accepted"]) == ("running", 1)
    with Producer(server.endpoint, "s", token=SECRET) as producer:
        producer.end_stream(force=True)


def test_over_http_a_producers_token_pushes_and_does_nothing_else(
    serve: Serve, tmp_path: Path
) -> None:
    server = serve(**two_tokens(tmp_path))
    pushers = bearer(PUSHERS)
    gets, posts = (
        ["/statusz", "/metrics", "/nowhere"],
        ["stream/end?force=true", "phases/3/end?force=1"],
    )
    refused = [server.get(path, pushers) for path in gets]
    refused += [server.post(f"/v1/{path}", b"", pushers) for path in posts]
    assert [(it.status, it.json["code"]) for it in refused] == [(403, "forbidden")] * 5
    assert server.post("/v1/samples", BODY, pushers).json["outcomes"] == ["accepted"]
    for path in ("/v1/groups/g/close?size=2", "/v1/phases/0/end"):
        assert server.post(path, b"", pushers).status == 200
    assert server.get("/openapi.json", pushers).status == 200
    assert server.post("/v1/samples", BODY, bearer("x" * 20)).status == 401
    at = server.get("/statusz", bearer(SECRET)).json
    assert (at["run_state"], at["config"]["max_wait"]) == ("running", 0.01)
    assert count(server, "http", "forbidden") == len(refused)
    assert PUSHERS not in server.log()


def test_a_producers_token_needs_another_one_beside_it(tmp_path: Path) -> None:
    files = two_tokens(tmp_path)
    with pytest.raises(ConfigError, match="--producer-token-file needs --token-file"):
        config(producer_token_file=files["producer_token_file"])
    with pytest.raises(ConfigError, match="hold the same token"):
        config(token_file=files["token_file"], producer_token_file=files["token_file"])
    flags = [*FLAGS, "--producer-token-file", str(files["producer_token_file"])]
    assert main(["check-config", *flags]) == 2
    assert main(["check-config", *flags, "--token-file", str(files["token_file"])]) == 0


def test_a_replaced_token_counts_after_sighup_and_the_former_one_for_a_while(
    serve: Serve, tmp_path: Path
) -> None:
    files = two_tokens(tmp_path)
    server = serve(**files)
    new, new_pushers = "the-second-secret-of-all", "the-second-secret-of-workers"
    write_token(files["token_file"], new)
    write_token(files["producer_token_file"], new_pushers)
    assert server.get("/statusz", bearer(new)).status == 401, "not before it is asked to"
    with Producer(server.endpoint, "p", token=PUSHERS) as producer:
        server.send_signal(signal.SIGHUP)
        eventually(lambda: server.get("/statusz", bearer(new)).status == 200, "it is read")
        producer.ping()  # who is connected stays
    for pushers in (PUSHERS, new_pushers):
        assert server.post("/v1/samples", BODY, bearer(pushers)).status == 200
        assert server.get("/statusz", bearer(pushers)).status == 403
    assert server.get("/statusz", bearer(SECRET)).status == 200
    assert "another token of --token-file; the former is valid for 10 min" in server.log()
    files["token_file"].write_text("short\n")
    server.send_signal(signal.SIGHUP)
    eventually(lambda: "holds a token of 5 bytes" in server.log(), "it is refused")
    assert server.get("/statusz", bearer(new)).status == 200, "what is wrong changes nothing"


def test_a_former_token_is_valid_for_the_overlap_and_no_longer() -> None:
    access = Access("a" * 20, producer_token="b" * 20)
    access.renew(Access("c" * 20, producer_token="a" * 20), now=100.0)
    assert access.rights("c" * 20, 100.0) is Rights.ALL
    assert access.rights("a" * 20, 100.0) is Rights.PUSH, "by what the files hold now"
    assert access.rights("b" * 20, 99.0 + OVERLAP_SECONDS) is Rights.PUSH
    with pytest.raises(Unauthorized):
        access.rights("b" * 20, 100.0 + OVERLAP_SECONDS)
    with pytest.raises(Unauthorized):
        access.rights("", 100.0)
