r"""A producer that pushes as fast as it is let: its credits are always used up.

    python -m tests.bench.fairness.flood ENDPOINT NAME SAMPLES TOKENS

Pushes of so many samples of so many tokens each; headers are put together as text and the payload
is made once, so that it keeps the dispatcher busy rather than itself.
"""

import json
import os
import sys
from collections.abc import Iterator
from itertools import count

from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.frame import encode_frame
from rollout_workers.demo.data import leave_with_starter
from tests.support.client import Producer


class Flood:
    """Endless pushes of one producer. samples: of a push. tokens: of a sample."""

    def __init__(self, name: str, samples: int, tokens: int) -> None:
        self._name, self._samples = name, samples
        self._payload = bytes(8 * tokens * samples)
        lengths = [tokens] * samples
        facts = {
            "fields": [{"name": "input_ids", "dtype": "int64", "per_token": True, "shape": []}],
            "tokens": lengths,
            "loss_tokens": [tokens - 1] * samples,
        }
        self._facts = json.dumps(facts, separators=(",", ":"))[1:-1]

    def frame(self, first_seq: int, floor: int) -> Iterator[bytes]:
        """The push of these numbers."""
        numbers = range(first_seq, first_seq + self._samples)
        ids = json.dumps([f"{self._name}/{seq}" for seq in numbers], separators=(",", ":"))
        header = f'{{{self._facts},"sample_ids":{ids},"first_seq":{first_seq},"floor":{floor}}}'
        yield encode_frame(m.Push.type_code, header.encode(), len(self._payload))
        yield self._payload

    def run(self, endpoint: str) -> None:
        """Push until this process is ended."""
        producer = Producer(endpoint, self._name)
        outstanding: dict[int, None] = {}
        numbers = count(0, self._samples)
        to_send: list[int] = []
        while True:
            while len(outstanding) < producer.welcome.credits:
                outstanding[first := next(numbers)] = None
                to_send.append(first)
            for first in to_send:
                for part in self.frame(first, next(iter(outstanding))):
                    producer.send_bytes(part)
            to_send.clear()
            match producer.receive(within=120)[0]:
                case m.Pushed(first_seq=first):
                    del outstanding[first]
                case m.Resend(first_seq=first):
                    to_send.append(first)


if __name__ == "__main__":
    leave_with_starter()
    os.nice(19)  # as if on other machines: it is not the processor that is to be shared
    Flood(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])).run(sys.argv[1])
