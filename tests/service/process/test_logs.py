"""Log lines: one JSON object each, whatever the message holds."""

import json
import logging
import re
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest

from rollout_dispatcher.service.config.types import LogFormat, LogLevel
from rollout_dispatcher.service.process import logs


def line_of(message: str, *args: object, **details: Any) -> dict[str, str]:
    record = logging.LogRecord(
        "rollout_dispatcher.x", logging.WARNING, "x.py", 1, message, args, details.get("exc_info")
    )
    text = logs.JsonFormatter().format(record)
    assert "\n" not in text
    found: dict[str, str] = json.loads(text)
    return found


def test_a_line_has_time_level_logger_and_message() -> None:
    line = line_of("rank %d left", 3)
    assert set(line) == {"time", "level", "logger", "message"}
    assert (line["level"], line["logger"]) == ("warning", "rollout_dispatcher.x")
    assert line["message"] == "rank 3 left"


def test_the_time_is_utc_with_milliseconds() -> None:
    text = line_of("now")["time"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", text)
    time = datetime.fromisoformat(text)
    assert abs(datetime.now(time.tzinfo) - time) < timedelta(minutes=1)


@pytest.mark.parametrize(
    "message", ['"quoted"', "two\nlines", "\x00\x1b[31m", "grüße 🎲", "\udc80"]
)
def test_any_message_is_one_line_and_comes_back(message: str) -> None:
    assert line_of("%s", message)["message"] == message


def test_a_traceback_is_a_field_of_its_own() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        line = line_of("failed", exc_info=sys.exc_info())
    assert line["message"] == "failed"
    assert line["traceback"].endswith("ValueError: broken")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def written(
    capsys: pytest.CaptureFixture[str], form: LogFormat, level: LogLevel = LogLevel.INFO
) -> str:
    logs.set_up(level, form)
    logging.getLogger("rollout_dispatcher").info("hello")
    logging.getLogger("rollout_dispatcher").warning("careful")
    return capsys.readouterr().err


def test_where_nobody_watches_the_log_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    lines = written(capsys, LogFormat.AUTO).splitlines()
    assert [json.loads(line)["message"] for line in lines] == ["hello", "careful"]


def test_on_a_terminal_the_log_is_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    first, second = written(capsys, LogFormat.AUTO).splitlines()
    assert first.endswith(" INFO    hello")
    assert second.endswith(" WARNING careful")


def test_the_format_can_be_chosen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "{" not in written(capsys, LogFormat.TEXT)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert written(capsys, LogFormat.JSON).startswith("{")


def test_what_is_less_severe_than_asked_for_is_not_logged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (line,) = written(capsys, LogFormat.JSON, LogLevel.WARNING).splitlines()
    assert json.loads(line)["message"] == "careful"
