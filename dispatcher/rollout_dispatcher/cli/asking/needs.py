"""Asks a dispatcher which objects of a payload store its run needs."""

import http.client
import json
import ssl
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rollout_dispatcher.cli.asking.wait_ready import Expected, HttpConnection
from rollout_dispatcher.errors import DispatcherError
from rollout_dispatcher.protocol.messages import MAX_KEYS

#: How long one answer may take: the journal's disk has to have all that it rests on.
ANSWER_SECONDS = 60.0
#: Of a request's keys, in JSON: half of what the dispatcher takes, as there is more around them.
_MAX_KEY_BYTES = 2**19
#: Of an answer, which has the same keys at the most.
_MAX_BODY = 2**20
PATH = "/v1/references/known"


class Unasked(DispatcherError):
    """Nobody has said which objects are needed."""

    code = "unasked"


class Needs:
    """One dispatcher. tls: called once there is an address that needs it. run_id: of its answers.

    Invariant: all answers are of one run, the one that is expected if one is.
    """

    def __init__(
        self, expected: Expected, tls: Callable[[], ssl.SSLContext], token: str | None
    ) -> None:
        self._expected, self._tls = expected, tls
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self.run_id: str | None = None

    def needed(self, store: str, keys: Sequence[str]) -> set[str]:
        """Which of these objects are needed, or may be soon. Raises Unasked, with what to do."""
        try:
            at, run_id = self._expected.look()
        except (OSError, ValueError) as error:
            raise Unasked(f"{self._expected.ready_file} cannot be read: {error}") from None
        self.run_id = self.run_id or run_id
        found = set[str]()
        connection = HttpConnection(at, ANSWER_SECONDS, self._tls() if at.tls else None)
        try:
            for some in _batches(keys):
                found.update(self._ask(connection, store, some))
        except (OSError, http.client.HTTPException) as error:
            why = str(error) or type(error).__name__
            raise Unasked(
                f"nothing is released, as the dispatcher at {at} does not say what it needs: {why}"
            ) from None
        finally:
            connection.close()
        return found

    def _ask(self, connection: HttpConnection, store: str, keys: list[str]) -> list[str]:
        body = json.dumps({"store": store, "keys": keys})
        connection.request("POST", PATH, body, self._headers)
        response = connection.getresponse()
        said = _parsed(response.read(_MAX_BODY))
        if response.status != 200:
            raise http.client.HTTPException(
                said.get("message") or f"HTTP {response.status}; is it of this release?"
            )
        if not isinstance(said.get("needed"), list) or not isinstance(said.get("run_id"), str):
            raise http.client.HTTPException("what answers there is no dispatcher of this release")
        if said["run_id"] != (self.run_id or said["run_id"]):
            raise http.client.HTTPException(
                f"it serves run {said['run_id']} instead of {self.run_id}"
            )
        self.run_id = said["run_id"]
        return [str(key) for key in said["needed"]]


def _batches(keys: Sequence[str]) -> Iterator[list[str]]:
    """As many as a request may have; at least one, as the run is asked for too."""
    batch, nbytes = list[str](), 0
    for key in keys:
        size = len(json.dumps(key))
        if batch and (len(batch) == MAX_KEYS or nbytes + size > _MAX_KEY_BYTES):
            yield batch
            batch, nbytes = [], 0
        batch.append(key)
        nbytes += size
    yield batch


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        said = json.loads(body)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}
