"""Addresses of the planes: `host:port` or `unix:/path`, written alike by server and clients."""

from dataclasses import dataclass
from typing import Self

from dispatcher.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A TCP address, or a Unix socket when `path` is set."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `127.0.0.1:7077`, `[::1]:7077` or `unix:/run/dispatcher.sock`.

        Raises ConfigError that shows the accepted forms.
        """
        if text.startswith("unix:") and len(text) > len("unix:"):
            return cls(path=text.removeprefix("unix:"))
        host, colon, port = text.rpartition(":")
        if colon and host and port.isascii() and port.isdigit() and int(port) < 65536:
            return cls(host=host.strip("[]"), port=int(port))
        raise ConfigError(
            f"{text!r} is no address; write host:port (127.0.0.1:7077) or unix:/path/to/socket"
        )

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
