"""What a body holds behind its Content-Encoding, never more of it than may be.

aiohttp would decompress as the body arrives, before anything is counted; so it is told not to.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import Final

from rollout_dispatcher.errors import BodyTooLarge, ProtocolError, UnknownEncoding
from rollout_dispatcher.service.http.bodies.pieces import PIECE, Work

#: Compressed bytes that are looked at at once: what is left of them is copied after each piece.
WINDOW: Final = 16 * 1024
#: gzip members one after the other, as parallel compressors write them.
MAX_MEMBERS: Final = 1024
GZIP: Final = 16 + zlib.MAX_WBITS

Decode = Callable[[bytes, int], Work[bytes]]


def decoder(codings: str) -> Decode | None:
    """What undoes a Content-Encoding; None if nothing has to be. Raises UnknownEncoding."""
    named = [coding.strip().lower() for coding in codings.split(",")]
    named = [coding for coding in named if coding not in ("", "identity")]
    if not named:
        return None
    if len(named) > 1 or named[0] not in DECODERS:
        raise UnknownEncoding(", ".join(named)[:100], SUPPORTED)
    return DECODERS[named[0]]


def _gunzip(body: bytes, limit: int) -> Work[bytes]:
    return (yield from _inflate("gzip", body, GZIP, limit))


def _undeflate(body: bytes, limit: int) -> Work[bytes]:
    """Zlib's format, as the standard says, or without its header, as many write it."""
    has_header = bool(body) and body[0] & 0xF == zlib.DEFLATED
    wbits = zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS
    return (yield from _inflate("deflate", body, wbits, limit))


DECODERS: Final[Mapping[str, Decode]] = {
    "gzip": _gunzip,
    "x-gzip": _gunzip,
    "deflate": _undeflate,
}
#: As an Accept-Encoding header says it.
SUPPORTED: Final = "gzip, deflate"


def _inflate(coding: str, body: bytes, wbits: int, limit: int) -> Work[bytes]:
    """The text. Raises ProtocolError for what is no such stream, BodyTooLarge beyond `limit`."""
    text, at, members = bytearray(), 0, 0
    while at < len(body) or not members:
        members += 1
        if members > MAX_MEMBERS:
            raise ProtocolError(f"the body has more than {MAX_MEMBERS} {coding} members")
        member = zlib.decompressobj(wbits)
        while not member.eof:
            data = member.unconsumed_tail
            if not data:
                data = body[at : at + WINDOW]
                at += len(data)
            try:
                piece = member.decompress(data, PIECE)
            except zlib.error as error:
                raise ProtocolError(f"the body is no {coding}: {error}") from None
            if not piece and not data and not member.eof:
                raise ProtocolError(f"the body ends before its {coding} stream does")
            text += piece
            if len(text) > limit:
                raise BodyTooLarge(limit, decompressed=True)
            yield
        at -= len(member.unused_data)
        if wbits != GZIP and at < len(body):
            raise ProtocolError(f"{len(body) - at} bytes follow the body's {coding} stream")
    return bytes(text)
