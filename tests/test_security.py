"""Files of secrets and certificates: what is taken, and how what is not is refused."""

import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.security import client_tls, is_loopback, read_token, server_tls
from tests.support.certificates import Authority, write_token

SECRET = "correct-horse-battery-staple"


def refusal(error: pytest.ExceptionInfo[ConfigError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_token_is_read_without_the_white_space_around_it(tmp_path: Path) -> None:
    path = write_token(tmp_path / "token", f"  {SECRET}\t\n")
    assert read_token(path) == SECRET


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o644, 0o660])
def test_a_token_file_that_others_may_open_is_refused(mode: int, tmp_path: Path) -> None:
    path = write_token(tmp_path / "token", SECRET)
    path.chmod(mode)
    with pytest.raises(ConfigError) as caught:
        read_token(path)
    assert f"chmod 600 {path}" in refusal(caught)
    assert SECRET not in refusal(caught)


def test_the_group_may_read_a_token_file(tmp_path: Path) -> None:
    path = write_token(tmp_path / "token", SECRET)
    path.chmod(0o440)
    assert read_token(path) == SECRET


@pytest.mark.parametrize("content", ["", " \n", "short", "x" * 1025, "sp ace" * 5, "é" * 20])
def test_a_token_that_is_no_token_is_refused_and_not_shown(content: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_token(write_token(tmp_path / "token", content))
    assert "openssl rand -hex 32" in refusal(caught)
    assert not content.strip() or content.strip() not in refusal(caught)


def test_a_token_file_that_is_absent_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent cannot be read: No such file"):
        read_token(tmp_path / "absent")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost", "::ffff:127.0.0.1"])
def test_what_stays_on_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "fe80::1", "::ffff:10.0.0.7"])
def test_what_other_machines_reach(host: str) -> None:
    assert not is_loopback(host)


def test_a_name_without_an_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no address"):
        is_loopback("no-such-host.invalid")


def test_what_the_server_is_given_must_be_a_certificate_and_its_key(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    one, other = authority.issue("one.example"), authority.issue("other.example")
    assert server_tls(one.certificate, one.key, authority.ca).verify_mode is ssl.CERT_OPTIONAL
    with pytest.raises(ConfigError) as caught:
        server_tls(one.certificate, other.key, None)
    assert "is not the key of the certificate" in refusal(caught)
    with pytest.raises(ConfigError) as caught:
        server_tls(one.key, one.key, None)
    assert "no certificate and unencrypted key" in refusal(caught)
    with pytest.raises(ConfigError) as caught:
        server_tls(tmp_path / "absent.pem", one.key, None)
    assert "absent.pem cannot be read" in refusal(caught)
    with pytest.raises(ConfigError) as caught:
        server_tls(one.certificate, one.key, one.key)
    assert "holds no certificates" in refusal(caught)


def test_an_encrypted_key_is_refused_rather_than_asked_for_on_the_terminal(
    tmp_path: Path,
) -> None:
    pair, locked = Authority(tmp_path).issue("one.example"), tmp_path / "locked.key"
    key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ConfigError) as caught:
        server_tls(pair.certificate, locked, None)
    assert "unencrypted key" in refusal(caught)


def test_both_sides_insist_on_tls_1_2_and_clients_on_the_name(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("one.example")
    client = client_tls(authority.ca)
    for context in (client, server_tls(pair.certificate, pair.key, None)):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert client.check_hostname
    assert client.verify_mode is ssl.CERT_REQUIRED
