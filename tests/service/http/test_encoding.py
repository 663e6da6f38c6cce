"""Compressed bodies are undone within the limit, or refused in clear words."""

import contextlib
import gzip
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.errors import BodyTooLarge, ProtocolError, UnknownEncoding
from rollout_dispatcher.service.http.bodies import PIECE, WINDOW, decoder
from tests.support.bodies import finish

LIMIT = 2**20


def raw_deflate(data: bytes) -> bytes:
    squeeze = zlib.compressobj(wbits=-15)
    return squeeze.compress(data) + squeeze.flush()


ENCODERS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gzip", gzip.compress), ("X-GZIP", gzip.compress), ("deflate", zlib.compress),
    ("deflate", raw_deflate), (" identity , gzip", gzip.compress),
]  # fmt: skip
#: Well compressible, and not at all; around the sizes of the pieces.
texts = st.builds(
    lambda unit, times: (unit * (times // max(1, len(unit)) + 1))[:times],
    st.binary(min_size=1, max_size=300),
    st.integers(0, 3 * PIECE),
)


def decoded(coding: str, body: bytes, limit: int = LIMIT) -> bytes:
    decode = decoder(coding)
    assert decode is not None
    return finish(decode(body, limit))


@pytest.mark.parametrize(("coding", "encode"), ENCODERS)
@given(text=texts)
def test_what_was_compressed_is_undone(
    coding: str, encode: Callable[[bytes], bytes], text: bytes
) -> None:
    assert decoded(coding, encode(text)) == text


@given(parts=st.lists(texts, min_size=1, max_size=4))
def test_gzip_may_be_of_several_members(parts: list[bytes]) -> None:
    assert decoded("gzip", b"".join(map(gzip.compress, parts))) == b"".join(parts)


def test_members_without_end_are_refused() -> None:
    with pytest.raises(ProtocolError, match="more than 1024 gzip members"):
        decoded("gzip", gzip.compress(b"") * 2000)


@pytest.mark.parametrize(("coding", "encode"), ENCODERS)
@pytest.mark.parametrize("kept", [0, 1, 5, WINDOW, -5, -1])
def test_a_stream_that_is_cut_off_is_refused(
    coding: str, encode: Callable[[bytes], bytes], kept: int
) -> None:
    text = b"".join(b"%d," % (n * n) for n in range(20_000))
    with pytest.raises(ProtocolError, match=r"the body (ends before its|is no)"):
        decoded(coding, encode(text)[:kept])


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@given(garbage=st.binary(min_size=1, max_size=100))
def test_garbage_is_refused_or_a_text(coding: str, garbage: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decoded(coding, garbage)


def test_what_follows_a_stream_is_refused() -> None:
    with pytest.raises(ProtocolError, match="3 bytes follow"):
        decoded("deflate", zlib.compress(b"text") + b"xyz")
    with pytest.raises(ProtocolError, match="no gzip"):
        decoded("gzip", gzip.compress(b"text") + b"xyz")


@pytest.mark.parametrize(("coding", "encode"), ENCODERS)
def test_no_more_is_undone_than_may_be(coding: str, encode: Callable[[bytes], bytes]) -> None:
    assert len(decoded(coding, encode(bytes(LIMIT)))) == LIMIT
    decode = decoder(coding)
    assert decode is not None
    work = decode(encode(bytes(100 * LIMIT)), LIMIT)
    for _ in range(LIMIT // PIECE):
        next(work)
    with pytest.raises(BodyTooLarge, match=r"1048576 bytes once decompressed.*max-body-bytes"):
        next(work)


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip", "deflate,gzip", "gzip;q=1", "\xff"])
def test_other_codings_are_refused_by_name(coding: str) -> None:
    with pytest.raises(UnknownEncoding, match="send one of gzip, deflate, or none"):
        decoder(coding)


@pytest.mark.parametrize("coding", ["", "identity", " Identity,, "])
def test_nothing_is_to_be_undone_of_what_is_as_it_is(coding: str) -> None:
    assert decoder(coding) is None
