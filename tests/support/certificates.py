"""Real certificates for tests, made by trustme in a moment: an authority and what it signs."""

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import trustme


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, in PEM."""

    certificate: Path
    key: Path

    def options(self) -> dict[str, Any]:
        """As `dispatcher serve` takes them."""
        return {"tls_cert": self.certificate, "tls_key": self.key}


class Authority:
    """A certificate authority that keeps its files in a folder of its own."""

    def __init__(self, folder: Path, name: str = "ours") -> None:
        self._folder, self._ca = folder / name, trustme.CA()
        self._folder.mkdir()
        self.ca = self._folder / "ca.pem"
        self._ca.cert_pem.write_to_path(str(self.ca))

    def issue(self, *names: str, expired: bool = False) -> Pair:
        """A pair for these host names or addresses."""
        past = datetime.now(UTC) - timedelta(days=1) if expired else None
        made = self._ca.issue_cert(*names, not_after=past)
        pair = Pair(self._folder / f"{names[0]}.pem", self._folder / f"{names[0]}.key")
        pair.certificate.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        made.private_key_pem.write_to_path(str(pair.key))
        return pair

    def client(self, pair: Pair | None = None) -> ssl.SSLContext:
        """How a client that trusts this authority connects."""
        context = ssl.create_default_context(cafile=self.ca)
        if pair is not None:
            context.load_cert_chain(pair.certificate, pair.key)
        return context


def write_token(path: Path, token: str = "correct-horse-battery-staple") -> Path:
    """A token file as it should be."""
    path.touch(mode=0o600)
    path.write_text(token + "\n")
    return path
