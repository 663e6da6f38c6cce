"""Asks a dispatcher, again and again, over one connection as long as that holds."""

import gzip
import http.client
import json
import ssl
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from email.message import Message
from email.utils import parsedate_to_datetime

from rollout_dispatcher.cli.asking.wait_ready import Expected, HttpConnection
from rollout_dispatcher.cli.top.exposition import parse
from rollout_dispatcher.cli.top.history import History
from rollout_dispatcher.cli.top.reading import FAMILIES, Reading
from rollout_dispatcher.cli.top.view import view
from rollout_dispatcher.errors import DispatcherError

#: How long one answer may take.
ANSWER_SECONDS = 5.0
#: More than thousands of ranks need.
_MAX_BODY = 64 * 2**20
#: What comes of an answer that is none of ours, or of a release with other names.
_ODD = (
    ValueError, LookupError, TypeError, AttributeError, EOFError, RecursionError, zlib.error,
)  # fmt: skip


class NoAnswer(DispatcherError):
    """The dispatcher cannot be asked at present; it may be again."""

    code = "no-answer"


@dataclass(frozen=True, slots=True)
class _Answer:
    text: str
    time: float


class Source:
    """tls: called once there is an address that needs it. token: shown with each question."""

    def __init__(
        self, expected: Expected, tls: Callable[[], ssl.SSLContext], token: str | None = None
    ) -> None:
        self._expected, self._tls = expected, tls
        self._headers = {"Accept-Encoding": "gzip"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._connection: HttpConnection | None = None
        self._shown: tuple[str, float] | None = None
        self.address = str(expected.http or expected.ready_file)

    def read(self) -> Reading:
        """Look once. Raises NoAnswer, with why in a few words."""
        try:
            status = self._get("/statusz", "application/json")
            metrics = self._get("/metrics", "text/plain")
            return self._checked(_reading(time.monotonic(), status, metrics))
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise NoAnswer(_reason(error)) from None
        except _ODD:
            self.close()
            raise NoAnswer("what answers there is no dispatcher of this release") from None

    def _checked(self, reading: Reading) -> Reading:
        """It, if it can be shown: of a process that is new here all that is shown is looked up."""
        if reading.process != self._shown:
            looks = History()
            looks.add(reading)
            looks.add(replace(reading, at=reading.at + 1))  # rates are of two
            view(looks)
            self._shown = reading.process
        return reading

    def close(self) -> None:
        """Hang up; the next look connects again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _get(self, path: str, accept: str) -> _Answer:
        connection = self._connected()
        connection.request("GET", path, headers=self._headers | {"Accept": accept})
        response = connection.getresponse()
        body = response.read(_MAX_BODY)
        if response.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        text = body.decode(errors="replace")
        if response.status != 200:
            raise http.client.HTTPException(f"HTTP {response.status} {_message(text)}")
        return _Answer(text, _time(response.headers))

    def _connected(self) -> HttpConnection:
        if self._connection is None:
            try:
                at, _ = self._expected.look()
            except ValueError:
                raise OSError(f"{self._expected.ready_file} is not written yet") from None
            self.address = str(at)
            tls = self._tls() if at.tls else None
            self._connection = HttpConnection(at, ANSWER_SECONDS, tls)
        return self._connection


def _reading(at: float, status: _Answer, metrics: _Answer) -> Reading:
    """Raises ValueError where it is no JSON."""
    return Reading(at, metrics.time, json.loads(status.text), parse(metrics.text, FAMILIES))


def _time(headers: Message) -> float:
    """The dispatcher's time of day, whose clock may not be ours."""
    said = headers.get("Date")
    return time.time() if said is None else parsedate_to_datetime(said).timestamp()


def _reason(error: Exception) -> str:
    if isinstance(error, http.client.HTTPException):
        return str(error) or type(error).__name__
    assert isinstance(error, OSError)
    return error.strerror or str(error) or type(error).__name__


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(text[:80].split())
