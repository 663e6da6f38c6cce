"""Log lines: one JSON object each, whatever the message holds."""

import ast
import json
import logging
import re
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import rollout_dispatcher
from rollout_dispatcher.hints import MAX_CHARACTERS
from rollout_dispatcher.service import process as logs
from rollout_dispatcher.service.config.values import LogFormat, LogLevel


def record(message: str, *args: object, **details: Any) -> logging.LogRecord:
    return logging.LogRecord(
        "rollout_dispatcher.x", logging.WARNING, "x.py", 1, message, args, details.get("exc_info")
    )


def text_of(message: str, *args: object, **details: Any) -> str:
    return logs.TextFormatter().format(record(message, *args, **details))


def line_of(message: str, *args: object, **details: Any) -> dict[str, str]:
    text = logs.JsonFormatter().format(record(message, *args, **details))
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


@pytest.mark.parametrize("message", ['"quoted"', "grüße 🎲", "C:\\new"])
def test_a_message_comes_back_as_it_was(message: str) -> None:
    assert line_of("%s", message)["message"] == message
    assert text_of("%s", message).endswith(f" WARNING {message}")


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("p\n2026-01-01 12:00:00 INFO forged", r"p\n2026-01-01 12:00:00 INFO forged"),
        ("over\rwritten", r"over\rwritten"),
        ("\x00\x1b[31mred\x9b0m", r"\x00\x1b[31mred\x9b0m"),
        ("a\u2028b\u2029c\x85d\x0be", r"a\u2028b\u2029c\x85d\x0be"),
        ("right\u202eto left\u2066", r"right\u202eto left\u2066"),
        ("half a pair \udc80", r"half a pair \udc80"),
    ],
)
def test_what_a_peer_says_neither_begins_a_line_nor_is_obeyed(said: str, shown: str) -> None:
    assert line_of("%s", said)["message"] == shown
    assert text_of("%s", said).endswith(f" WARNING {shown}")


def test_a_message_has_a_bounded_length() -> None:
    said = "x" * 10**6
    for text in (line_of("client %s", said)["message"], text_of("client %s", said)):
        assert len(text) < 2 * MAX_CHARACTERS
        assert text.endswith(f"... ({10**6 + 7 - MAX_CHARACTERS:,} characters more)")


def test_what_an_error_quotes_stays_within_its_traceback() -> None:
    try:
        raise ValueError("a\n2026-01-01 12:00:00 INFO forged\x1b[2J")
    except ValueError:
        details = sys.exc_info()
    first, *others = text_of("broke", exc_info=details).split("\n")
    assert first.endswith(" WARNING broke")
    assert all(line.startswith("    ") for line in others)
    assert others[-1] == r"    2026-01-01 12:00:00 INFO forged\x1b[2J"
    assert line_of("broke", exc_info=details)["traceback"].endswith(r"forged\x1b[2J")


def test_fields_are_what_a_line_is_given_and_nothing_else() -> None:
    given = record("gone")
    given.event, given.dp_rank, given.step, given.peer = "rank-gone", 3, 7, "a\nb"
    formatter = logs.JsonFormatter()
    formatter.run_id = "run"
    line = json.loads(formatter.format(given))
    fields = {name: line.get(name) for name in logs.FIELDS}
    assert fields == {
        "event": "rank-gone", "run_id": "run", "dp_rank": 3, "step": 7, "producer": None,
        "peer": r"a\nb", "left_out": None,
    }  # fmt: skip


def test_every_line_of_the_dispatcher_names_its_event() -> None:
    """But those that only --log-level debug has."""
    calls = [
        node
        for path in sorted(Path(rollout_dispatcher.__file__).parent.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and re.match(r"log\.(info|warning|error|exception|critical)$", ast.unparse(node.func))
    ]
    assert len(calls) > 50
    extras = [{each.arg: each.value for each in call.keywords}.get("extra") for call in calls]
    without = [
        ast.unparse(call)
        for call, extra in zip(calls, extras, strict=True)
        if extra is None or (isinstance(extra, ast.Dict) and "'event'" not in ast.unparse(extra))
    ]
    assert without == []


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


def test_the_same_line_is_written_so_often_a_minute_and_then_says_how_many_were_left_out() -> None:
    now = 0.0
    repeats = logs.Repeats(lambda: now)

    def shown(line: int) -> list[str]:
        record = logging.LogRecord("x", logging.ERROR, "x.py", line, "at %d", (line,), None)
        return [record.getMessage()] if repeats.filter(record) else []

    assert sum(len(shown(7)) for _ in range(logs.BURST + 3)) == logs.BURST
    assert shown(8) == ["at 8"], "another place has a count of its own"
    now += logs.PERIOD_SECONDS
    assert shown(7) == ["at 7 (3 more like this were left out)"]
    assert shown(7) == ["at 7"]


def test_of_what_strangers_cause_a_few_lines_of_each_kind_are_written() -> None:
    repeats = logs.Repeats(lambda: 0.0)

    def is_shown(kind: str) -> bool:
        record = logging.LogRecord("x", logging.INFO, "x.py", 1, "ended", (), None)
        record.kind = kind
        return repeats.filter(record)

    assert [sum(is_shown(kind) for _ in range(1000)) for kind in ("tls", "silent")] == [
        logs.FEW
    ] * 2
