"""Addresses of the planes, written alike by server and clients.

`host:port`, `tls://host:port` where TLS is spoken, or `unix:/path`.
"""

from dataclasses import dataclass
from typing import Self

from rollout_dispatcher.errors import ConfigError

TLS_SCHEME = "tls://"
#: In URLs, which people paste; such a host would be looked up in vain, again and again.
_NO_NAME = frozenset("/@?# ")
_IPV6 = frozenset("0123456789abcdefABCDEF:.%")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A TCP address, or a Unix socket when `path` is set."""

    host: str = ""
    port: int = 0
    path: str = ""
    tls: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `127.0.0.1:7077`, `[::1]:7077`, `tls://host:7077` or `unix:/run/dispatcher.sock`.

        Raises ConfigError that shows the accepted forms.
        """
        if text.startswith("unix:") and len(text) > len("unix:"):
            return cls(path=text.removeprefix("unix:"))
        tls = text.startswith(TLS_SCHEME)
        host, _, port = text.removeprefix(TLS_SCHEME).rpartition(":")
        if ":" in host and not set(host) - _IPV6:
            raise ConfigError(
                f"{text!r} is ambiguous: write an IPv6 address in brackets, [::1]:7077"
            )
        host = host.strip("[]")
        if _is_name(host) and port.isascii() and port.isdigit() and int(port) < 65536:
            return cls(host=host, port=int(port), tls=tls)
        raise ConfigError(
            f"{text!r} is no address; write host:port (127.0.0.1:7077), tls://host:port or "
            "unix:/path/to/socket"
        )

    @property
    def scheme(self) -> str:
        """Which transport it is for: `tcp`, `tls` or `unix`."""
        if self.path:
            return "unix"
        return "tls" if self.tls else "tcp"

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{TLS_SCHEME if self.tls else ''}{host}:{self.port}"


def _is_name(host: str) -> bool:
    """Whether this may be looked up; what has an empty label, or a long one, may not even be."""
    try:
        return bool(host.encode("idna")) and host.isprintable() and not _NO_NAME & set(host)
    except UnicodeError:
        return False
