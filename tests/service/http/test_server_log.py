"""What clients do wrong is no error of ours, and is not repeated in the log."""

import logging

import pytest
from aiohttp.client_exceptions import ClientConnectionResetError
from aiohttp.http_exceptions import InvalidHeader

from rollout_dispatcher.service.http.guard import log_error


def logged(error: Exception, caplog: pytest.LogCaptureFixture) -> tuple[list[str], list[str]]:
    """What the server's log says at DEBUG of an error in a request, and what it counts."""
    counted: list[str] = []
    with caplog.at_level(logging.DEBUG, "rollout_dispatcher"):
        log_error("GET / was not answered", error, counted.append)
    return caplog.text.splitlines(), counted


def test_who_hangs_up_before_it_is_answered_leaves_a_line_and_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines, counted = logged(ClientConnectionResetError("Cannot write to closing transport"), caplog)
    (line,) = lines
    assert line.startswith("DEBUG")
    assert "an HTTP client hung up: ClientConnectionResetError" in line
    assert counted == []


def test_a_header_that_cannot_be_read_is_not_quoted(caplog: pytest.LogCaptureFixture) -> None:
    lines, counted = logged(InvalidHeader(b"Authorization: Bearer s3cret\x00"), caplog)
    assert "s3cret" not in str(lines)
    assert counted == ["malformed"]


def test_a_bug_of_ours_is_logged_as_one(caplog: pytest.LogCaptureFixture) -> None:
    lines, _ = logged(ZeroDivisionError("ours"), caplog)
    assert lines[0].startswith("ERROR")
    assert "ZeroDivisionError: ours" in lines
