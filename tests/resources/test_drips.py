"""A frame that comes a byte at a time is silence, whoever sends it and whatever it is."""

import pytest

from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.frame import MAGIC, PREFIX
from tests.service.conftest import Serve
from tests.support.client import Producer, Rank, WireClient
from tests.support.server import eventually

PING = PREFIX.pack(MAGIC, m.Ping.type_code, 0, 4096, 0)
PUSH = PREFIX.pack(MAGIC, m.Push.type_code, 0, 4096, 2**20)


def introduced(endpoint: str, role: str) -> WireClient:
    return Producer(endpoint, "drips") if role == "producer" else Rank(endpoint, 0, 2)


@pytest.mark.parametrize(
    ("role", "begun"),
    [("producer", PUSH), ("producer", PING), ("producer", MAGIC), ("rank", PING)],
    ids=["push", "ping", "prefix", "rank"],
)
def test_a_frame_that_drips_is_ended(role: str, begun: bytes, serve: Serve) -> None:
    server = serve(idle_timeout="1s", rank_timeout="1s", heartbeat_interval="100ms")
    witness = Producer(server.endpoint, "witness")
    drips = introduced(server.endpoint, role)
    drips.send_bytes(begun)
    rest = iter((PING + bytes(4096))[len(begun) :])
    ended = f"connection_errors_total{{reason=silent,role={role}}}"

    def is_ended() -> bool:
        witness.ping()
        try:
            drips.send_bytes(bytes([next(rest)]))
        except ConnectionError:
            return True
        return server.scrape().get(ended, 0) > 0

    eventually(is_ended, "its connection is ended")
    server.await_scrape(lambda found: found.get(ended) == 1, "it is counted")
    witness.ping()
    assert server.scrape()["receiving_bytes"] == 0
