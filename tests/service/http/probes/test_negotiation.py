"""A client gets what it likes best of what there is, and ours where it does not mind."""

import pytest

from rollout_dispatcher.service.http.probes import preferred, takes_gzip

OFFERED = ["text/plain", "application/json"]
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, "text/plain"),
        ("", "text/plain"),
        ("*/*", "text/plain"),
        ("application/json", "application/json"),
        ("application/json, */*", "application/json"),  # liked alike, and named
        ("application/json, text/plain, */*", "text/plain"),
        ("APPLICATION/JSON ; Q=1.0 , text/plain;q=0.9", "application/json"),
        ("application/json;q=0.1, text/*;q=0.2", "text/plain"),
        ("text/html, application/*", "application/json"),
        ("application/json;q=0, */*;q=0.1", "text/plain"),
        ("text/plain;q=0", "text/plain"),
        ("image/png", "text/plain"),
        ("application/json;q=often", "application/json"),
        (";;,,=;q", "text/plain"),
    ],
)
def test_the_preferred_media_type(accept: str | None, expected: str) -> None:
    assert preferred(accept, OFFERED) == expected


def test_prometheus_gets_openmetrics() -> None:
    offered = ["text/plain", "application/openmetrics-text"]
    assert preferred(PROMETHEUS, offered) == offered[1]


@pytest.mark.parametrize(
    ("accepted", "gzip"),
    [
        (None, False),
        ("", False),
        ("gzip", True),
        ("deflate, GZIP;q=0.5", True),
        ("*", True),
        ("identity", False),
        ("gzip;q=0", False),
        ("gzip;q=0, *", False),
        ("identity;q=1, gzip;q=0.5", False),
        ("br", False),
    ],
)
def test_gzip_is_for_those_who_take_it(accepted: str | None, gzip: bool) -> None:
    assert takes_gzip(accepted) is gzip
