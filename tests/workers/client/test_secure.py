"""Clients with tokens and TLS against a real dispatcher: they train, or say clearly why not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_dispatcher.errors import (
    ConfigError,
    DispatcherError,
    DispatcherUnreachable,
    TlsFailed,
    Unauthorized,
)
from rollout_workers import (
    Credentials,
    Outcome,
    RankClient,
    RolloutProducer,
)
from rollout_workers.rank.payload import arrays
from tests.support.certificates import Authority, Pair, write_token
from tests.support.server import serve

pytestmark = pytest.mark.e2e

SMALL: dict[str, Any] = {
    "listen": "127.0.0.1:0",
    "dp_size": 1,
    "global_batch_size": 2,
    "window": 1,
    "micro_batch_tokens": 2**21,
}
#: Several times what a client reads at once, so that decrypted bytes are left over between reads.
LARGE = 2**20


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def pair(authority: Authority) -> Pair:
    return authority.issue("127.0.0.1")


def test_with_token_and_client_certificate_from_the_environment(
    tmp_path: Path, authority: Authority, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, mine = write_token(tmp_path / "token"), authority.issue("trainer.example")
    options = {"token_file": token, "tls_client_ca": authority.ca} | pair.options()
    with serve(tmp_path / "server", **SMALL, **options) as endpoint:
        # Set for the clients only; the server beside them would take these for its own.
        monkeypatch.setenv("DISPATCHER_TOKEN_FILE", str(token))
        monkeypatch.setenv("DISPATCHER_TLS_CA", str(authority.ca))
        monkeypatch.setenv("DISPATCHER_TLS_CLIENT_CERT", str(mine.certificate))
        monkeypatch.setenv("DISPATCHER_TLS_CLIENT_KEY", str(mine.key))
        with (
            RolloutProducer(endpoint) as producer,
            RankClient(endpoint, dp_rank=0, dp_size=1) as rank,
        ):
            for value in range(2):
                ids = np.full(LARGE, value, dtype=np.int64)
                assert producer.push({"input_ids": ids}, timeout=30) is Outcome.ACCEPTED
            step = rank.next_step(30)
            assert step is not None
            parts = [arrays(one.payload, one.blocks)["input_ids"] for one in step]
            step.commit()
        samples = np.concatenate(parts).reshape(2, LARGE)
        assert sorted(samples[:, 0].tolist()) == [0, 1]
        assert (samples == samples[:, :1]).all()


def rejected(endpoint: str, credentials: Credentials) -> list[DispatcherError]:
    """The errors that a producer and a rank end with, at once rather than after retries."""
    found = []
    with pytest.raises(DispatcherError) as by_producer:
        RolloutProducer(endpoint, credentials=credentials, reconnect_timeout=3600)
    found.append(by_producer.value)
    with pytest.raises(DispatcherError) as by_rank:
        RankClient(endpoint, dp_rank=0, dp_size=1, credentials=credentials, reconnect_timeout=3600)
    return [*found, by_rank.value]


def assert_all(errors: list[DispatcherError], kind: type[DispatcherError], said: str) -> None:
    for error in errors:
        assert isinstance(error, kind), repr(error)
        assert said in str(error)
        assert "\n" not in str(error)


def test_a_wrong_or_missing_token_is_a_clear_error_at_once(tmp_path: Path) -> None:
    token, other = write_token(tmp_path / "a"), write_token(tmp_path / "b", "other" * 5)
    with serve(tmp_path / "server", **SMALL, token_file=token) as endpoint:
        assert_all(rejected(endpoint, Credentials()), Unauthorized, "asks for a token and got none")
        wrong = rejected(endpoint, Credentials(token_file=other))
        assert_all(wrong, Unauthorized, "the token is not this dispatcher's")
        other.chmod(0o644)
        assert_all(rejected(endpoint, Credentials(token_file=other)), ConfigError, "chmod 600")
        RolloutProducer(endpoint, credentials=Credentials(token_file=token)).close()


def test_a_certificate_that_is_not_trusted_is_a_clear_error_at_once(
    tmp_path: Path, authority: Authority
) -> None:
    ours = Credentials(tls_ca=authority.ca)
    forger = Authority(tmp_path, "forger").issue("127.0.0.1")
    cases = {
        "unable to get local issuer certificate": forger,
        "certificate has expired": authority.issue("127.0.0.1", expired=True),
        "IP address mismatch": authority.issue("elsewhere.example"),
    }
    for at, (said, pair) in enumerate(cases.items()):
        with serve(tmp_path / f"server{at}", **SMALL, **pair.options()) as endpoint:
            errors = rejected(endpoint, ours)
            assert_all(errors, TlsFailed, said)
            assert_all(errors, TlsFailed, "is not trusted")


def test_tls_on_one_side_only_is_a_clear_error_at_once(
    tmp_path: Path, authority: Authority, pair: Pair
) -> None:
    ours = Credentials(tls_ca=authority.ca)
    with serve(tmp_path / "plain", **SMALL) as endpoint:
        assert_all(rejected(f"tls://{endpoint}", ours), TlsFailed, "does not speak TLS")
    with serve(tmp_path / "tls", **SMALL, **pair.options()) as endpoint:
        plain = endpoint.removeprefix("tls://")
        assert_all(rejected(plain, Credentials()), TlsFailed, "write its address as tls://")


def test_without_the_client_certificate_that_is_asked_for(
    tmp_path: Path, authority: Authority, pair: Pair
) -> None:
    options = pair.options() | {"tls_client_ca": authority.ca}
    with serve(tmp_path / "server", **SMALL, **options) as endpoint:
        bare = Credentials(tls_ca=authority.ca)
        assert_all(rejected(endpoint, bare), Unauthorized, "asks for a client certificate")


def test_a_client_certificate_that_is_not_trusted_is_named(
    tmp_path: Path, authority: Authority, pair: Pair
) -> None:
    forged = Authority(tmp_path, "forger").issue("trainer.example")
    theirs = Credentials(
        tls_ca=authority.ca, tls_client_cert=forged.certificate, tls_client_key=forged.key
    )
    options = pair.options() | {"tls_client_ca": authority.ca}
    with serve(tmp_path / "server", **SMALL, **options) as endpoint:
        with pytest.raises((DispatcherUnreachable, TlsFailed), match=r"trainer\.example|refuses"):
            RolloutProducer(endpoint, credentials=theirs, reconnect_timeout=0.3)
        with pytest.raises((DispatcherUnreachable, TlsFailed), match=r"trainer\.example|refuses"):
            RankClient(endpoint, dp_rank=0, dp_size=1, credentials=theirs, reconnect_timeout=0.3)


def test_files_that_are_not_what_they_should_be_are_named(tmp_path: Path, pair: Pair) -> None:
    endpoint = "tls://127.0.0.1:1"
    absent = tmp_path / "absent.pem"
    assert_all(rejected(endpoint, Credentials(tls_ca=absent)), ConfigError, f"{absent} cannot be")
    alone = Credentials(tls_client_key=pair.key)
    assert_all(rejected(endpoint, alone), ConfigError, "give tls_client_cert too")


def test_a_replaced_token_file_counts_from_the_next_connection_on(tmp_path: Path) -> None:
    token = write_token(tmp_path / "token", "first" * 5)
    ours = Credentials(token_file=token)
    write_token(token, "second" * 5)
    with serve(tmp_path / "server", **SMALL, token_file=token) as endpoint:
        RolloutProducer(endpoint, credentials=ours).close()
