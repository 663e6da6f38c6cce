"""Addresses: one notation, read and written alike."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.protocol.endpoint import Endpoint


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("127.0.0.1:7077", Endpoint(host="127.0.0.1", port=7077)),
        ("localhost:0", Endpoint(host="localhost", port=0)),
        ("[::1]:65535", Endpoint(host="::1", port=65535)),
        ("unix:/run/dispatcher.sock", Endpoint(path="/run/dispatcher.sock")),
        ("unix:relative:7", Endpoint(path="relative:7")),
    ],
)
def test_an_address_is_read_and_written_alike(text: str, endpoint: Endpoint) -> None:
    assert Endpoint.parse(text) == endpoint
    assert str(endpoint) == text


@pytest.mark.parametrize(
    "text",
    ["", ":", "7077", "host", "host:", ":7077", "host:port", "host:65536", "host:-1", "unix:",
     "host:\u00b2", "host:\u0661", "[]:1", "a..b:1", f"{'x' * 64}:1", "a\0b:1",
     "http://127.0.0.1:7077", "user@host:1", "a b:1"],
)  # fmt: skip
def test_what_is_no_address_is_refused_with_the_forms_there_are(text: str) -> None:
    with pytest.raises(ConfigError, match=r"host:port .* or unix:/path"):
        Endpoint.parse(text)


@pytest.mark.parametrize("text", ["::1:7077", "tls://fe80::1:7077", "::", "2001:db8::7:65535"])
def test_an_ipv6_address_without_brackets_is_refused(text: str) -> None:
    """Its last part may be the port or not."""
    with pytest.raises(ConfigError, match=r"in brackets, \[::1\]:7077"):
        Endpoint.parse(text)


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_a_config_error(text: str) -> None:
    try:
        endpoint = Endpoint.parse(text)
    except ConfigError:
        return
    assert Endpoint.parse(str(endpoint)) == endpoint
