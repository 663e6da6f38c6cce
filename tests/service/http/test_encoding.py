"""Compressed bodies are undone within the limit, or refused in clear words."""

import contextlib
import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.errors import BodyTooLarge, ProtocolError, UnknownEncoding
from rollout_dispatcher.service.http.bodies import PIECE, WINDOW, gunzipped, is_gzipped
from tests.support.bodies import finish

LIMIT = 2**20


#: Well compressible, and not at all; around the sizes of the pieces.
texts = st.builds(
    lambda unit, times: (unit * (times // max(1, len(unit)) + 1))[:times],
    st.binary(min_size=1, max_size=300),
    st.integers(0, 3 * PIECE),
)


def decoded(body: bytes, limit: int = LIMIT) -> bytes:
    return finish(gunzipped(body, limit))


@given(text=texts)
def test_what_was_compressed_is_undone(text: bytes) -> None:
    assert decoded(gzip.compress(text)) == text


@given(parts=st.lists(texts, min_size=1, max_size=4))
def test_gzip_may_be_of_several_members(parts: list[bytes]) -> None:
    assert decoded(b"".join(map(gzip.compress, parts))) == b"".join(parts)


def test_members_without_end_are_refused() -> None:
    with pytest.raises(ProtocolError, match="more than 1024 gzip members"):
        decoded(gzip.compress(b"") * 2000)


@pytest.mark.parametrize("kept", [0, 1, 5, WINDOW, -5, -1])
def test_a_stream_that_is_cut_off_is_refused(kept: int) -> None:
    text = b"".join(b"%d," % (n * n) for n in range(20_000))
    with pytest.raises(ProtocolError, match=r"the body (ends before its|is no)"):
        decoded(gzip.compress(text)[:kept])


@given(garbage=st.binary(min_size=1, max_size=100))
def test_garbage_is_refused_or_a_text(garbage: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decoded(garbage)


def test_what_follows_a_stream_is_refused() -> None:
    with pytest.raises(ProtocolError, match="no gzip"):
        decoded(gzip.compress(b"text") + b"xyz")


def test_no_more_is_undone_than_may_be() -> None:
    assert len(decoded(gzip.compress(bytes(LIMIT)))) == LIMIT
    work = gunzipped(gzip.compress(bytes(100 * LIMIT)), LIMIT)
    for _ in range(LIMIT // PIECE):
        next(work)
    with pytest.raises(BodyTooLarge, match=r"1048576 bytes once decompressed.*max-body-bytes"):
        next(work)


@pytest.mark.parametrize(
    "coding", ["br", "deflate", "gzip, gzip", "deflate,gzip", "gzip;q=1", "\xff"]
)
def test_other_codings_are_refused_by_name(coding: str) -> None:
    with pytest.raises(UnknownEncoding, match="send gzip, or none"):
        is_gzipped(coding)


@pytest.mark.parametrize(
    ("coding", "gzipped"),
    [("", False), ("identity", False), (" Identity,, ", False), (" identity , GZIP", True)],
)
def test_what_is_as_it_is_is_told_from_gzip(coding: str, gzipped: bool) -> None:
    assert is_gzipped(coding) is gzipped
