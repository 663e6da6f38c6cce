"""Clients, for people: where each is, how fast it pushes, what went wrong last.

A client keeps its entry when it connects again. Producers over HTTP have no connection that stands
for them: those of one host are one client. Invariant: of these, and of clients that are gone
without a goodbye, the last `MAX_GONE` are remembered, so that whoever looks after a fault finds who
it was.
"""

from dataclasses import dataclass
from math import exp, inf
from typing import Any

#: Clients without a connection that are remembered.
MAX_GONE = 100
#: Samples count for a rate with a weight that falls to a third in so many seconds.
RATE_SECONDS = 30.0


@dataclass(slots=True)
class Client:
    """One client. connection: that speaks for it; None once it is gone, and over HTTP. host: empty
    of a Unix socket. last_error: why its last connection ended, or its last sample was refused.
    """

    client_id: str
    role: str
    host: str = ""
    dp_rank: int | None = None
    connection: object | None = None
    accepted: int = 0
    last_error: str = ""
    #: Over HTTP it counts as connected for a while after each request.
    connected_until: float = -inf
    _rate: float = 0.0
    _rate_at: float = 0.0

    def samples_per_second(self, now: float) -> float:
        """Accepted of late."""
        return self._rate * exp((self._rate_at - now) / RATE_SECONDS)

    def answered(self, accepted: int, error: str, now: float) -> None:
        """Of a push so many samples were accepted. error: why one was refused, if one was."""
        self.accepted += accepted
        self._rate = self.samples_per_second(now) + accepted / RATE_SECONDS
        self._rate_at = now
        self.last_error = error or self.last_error

    def as_json(self, now: float) -> dict[str, Any]:
        """For `GET /v1/clients`."""
        return {
            "client_id": self.client_id,
            "role": self.role,
            "dp_rank": self.dp_rank,
            "host": self.host,
            "connected": self.connection is not None or now < self.connected_until,
            "samples_accepted": self.accepted,
            "samples_per_second": round(self.samples_per_second(now), 2),
            "last_error": self.last_error,
        }


class Clients:
    """Every client that is connected, and those that went last."""

    def __init__(self) -> None:
        self._clients: dict[str, Client] = {}
        self._gone: dict[str, None] = {}  # the last one last

    def joined(
        self, client_id: str, role: str, host: str, connection: object, dp_rank: int | None = None
    ) -> None:
        """This connection speaks for a client from now on."""
        known = self._clients.setdefault(client_id, Client(client_id, role))
        known.role, known.host, known.connection, known.dp_rank = role, host, connection, dp_rank
        self._gone.pop(client_id, None)

    def answered(self, client_id: str, accepted: int, error: str, now: float) -> None:
        """A producer's push was, as `Client.answered` takes it."""
        if (known := self._clients.get(client_id)) is not None:
            known.answered(accepted, error, now)

    def lost(self, client_id: str, connection: object, reason: str) -> Client | None:
        """A connection is over; returns the client that is gone by that without a goodbye."""
        known = self._clients.get(client_id)
        if known is None or known.connection is not connection:
            return None
        if reason == "bye":
            del self._clients[client_id]
            return None
        known.connection, known.last_error = None, f"connection lost: {reason}"
        self._remember(client_id)
        return known

    def pushed_over_http(self, host: str, accepted: int, error: str, now: float) -> None:
        """A request from there was, as `Client.answered` takes it."""
        client_id = f"http {host}".strip()
        known = self._clients.setdefault(client_id, Client(client_id, "producer", host))
        known.answered(accepted, error, now)
        known.connected_until = now + RATE_SECONDS
        self._gone.pop(client_id, None)
        self._remember(client_id)

    def _remember(self, client_id: str) -> None:
        self._gone[client_id] = None
        if len(self._gone) > MAX_GONE:
            oldest = next(iter(self._gone))
            del self._gone[oldest], self._clients[oldest]

    def as_json(self, now: float) -> list[dict[str, Any]]:
        """All of them, in order of their first connection."""
        return [client.as_json(now) for client in self._clients.values()]
