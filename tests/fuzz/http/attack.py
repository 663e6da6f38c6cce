"""A campaign over the HTTP plane of a real dispatcher whose good producer and ranks work on."""

import json
import random
import re
import socket
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.fuzz.arena import PATIENCE_S, Arena, Work, arena
from tests.fuzz.campaign import ROUND, WARM_UP
from tests.fuzz.http.requests import GOOD_SAMPLE, connection

_STATUS = re.compile(rb"^HTTP/1\.[01] (\d{3})", re.MULTILINE)
#: What a request may be answered: nothing in it is a fault of the dispatcher's.
FAULTS_OF_OURS = range(500, 600)
#: But these: it is told to come again, or is of another version of HTTP.
EXCEPT = {503, 505}
#: Memory may grow by so much from `WARM_UP` on: names of samples and groups are remembered.
GROWTH_BYTES = 16 << 20
#: Seconds that a client is silent before it hangs up; some do at once, and hear no answer.
PATIENCES = (1e-6, 0.002, 0.05, 0.05, 0.05, 0.05)
#: The same once an answer has begun.
QUIET_S = 0.004


def fuzz_http(folder: Path, examples: int, number: int, bug: str = "none") -> dict[str, Any]:
    """So many connections beside good peers; raises what they show."""
    answers: Counter[int] = Counter()
    warm = 0
    with arena(folder, bug) as target:
        work = Work(target)
        work.go_on()
        for at in range(examples):
            dice = random.Random(f"{number}/{at}")
            stream = connection(dice)
            try:
                answers.update(ask(target, stream, patience=dice.choice(PATIENCES)))
            except (AssertionError, OSError) as error:
                error.add_note(f"input {at} of seed {number}: {stream[:4000]!r}")
                raise
            if at % ROUND == ROUND - 1:
                _goes_on(target, work)
            if not warm and at >= WARM_UP * examples:
                warm = target.resident
        _goes_on(target, work)
        grown = target.resident - warm
        assert grown <= GROWTH_BYTES, f"{grown >> 20} MiB more memory after {examples} inputs"
        work.end()
    counts = {str(status): count for status, count in sorted(answers.items())}
    memory = {"warm_mb": round(warm / 1e6, 2), "end_mb": round((warm + grown) / 1e6, 2)}
    return {"inputs": examples, "answers": counts, "trained": len(work.trained)} | memory


def ask(target: Arena, stream: bytes, *, patience: float = PATIENCE_S) -> list[int]:
    """Say all of it on one connection; the status of each answer. No answer may be our fault.

    patience: seconds of silence after which we hang up; whoever has begun to answer has fewer.
    """
    answer = bytearray()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(target.http)
        with suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(stream)
            hung_up = False
            while True:
                if not hung_up:
                    sock.settimeout(min(patience, QUIET_S) if answer else patience)
                try:
                    data = sock.recv(65536)
                except TimeoutError:
                    assert not hung_up, "the dispatcher does not hang up"
                    hung_up = True
                    sock.settimeout(PATIENCE_S)
                    sock.shutdown(socket.SHUT_WR)
                    continue
                if not data:
                    break
                answer += data
    found = [int(status) for status in _STATUS.findall(answer)]
    ours = [status for status in found if status in FAULTS_OF_OURS and status not in EXCEPT]
    assert not ours, bytes(answer[:2000])
    return found


def _goes_on(target: Arena, work: Work) -> None:
    """The good work on, over HTTP too, and what was received is given room back for."""
    body = json.dumps(GOOD_SAMPLE).encode()
    head = b"POST /v1/samples HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert ask(target, head + body)[0] in {200, 429}, "a good request is not answered"
    assert ask(target, b"GET /livez HTTP/1.0\r\n\r\n") == [200]
    assert target.status()["balanced"]
    log = target.log
    assert "Traceback" not in log, log[log.index("Traceback") :][:3000]
    work.go_on()
