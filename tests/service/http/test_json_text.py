"""JSON read in pieces is what it would be read as at once, and no piece is too long."""

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.service.http import json_text
from rollout_dispatcher.service.http.bodies import PIECE
from rollout_dispatcher.service.http.json_text import JsonText
from rollout_dispatcher.service.http.samples import read_samples
from rollout_dispatcher.service.http.tensors import Reading, Tensor
from tests.support.bodies import finish


@pytest.fixture(params=[16, 64, PIECE], ids=lambda nbytes: f"piece-{nbytes}")
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of a piece; with few, short texts have many."""
    nbytes: int = request.param
    monkeypatch.setattr(json_text, "PIECE", nbytes)
    monkeypatch.setattr(json_text, "WINDOWS", (nbytes // 4, nbytes))
    return nbytes


def read(text: bytes) -> Any:
    return finish(JsonText(text).value())


def values(tensor: Tensor) -> Any:
    """As one array."""
    return np.concatenate(tensor.pieces).reshape(tensor.shape)


numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """Nested lists of one shape."""
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    element = draw(st.sampled_from([st.booleans(), st.integers(0, 2**20), numbers]))

    def rows(shape: list[int]) -> Any:
        return [rows(shape[1:]) for _ in range(shape[0])] if shape else draw(element)

    return rows([draw(st.integers(0, 12)), *shape])


@pytest.mark.parametrize("nbytes", [16, 64, PIECE])
@given(array=arrays(), indent=st.sampled_from([None, 0, 1]))
def test_an_array_is_read_as_if_at_once(nbytes: int, array: Any, indent: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "PIECE", nbytes + 40)  # room for the longest number
        patch.setattr(json_text, "WINDOWS", (nbytes, nbytes + 40))
        found = values(read(json.dumps(array, indent=indent).encode()))
    expected = np.asarray(array)
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "text",
    [b"[", b"[1", b"[1,", b"[1,]", b"[,1]", b"[1 2]", b"[[1],]", b"[[1]", b"[[1],[2]", b"[1]]",
     b"[[1,2],[3]]", b"[[1],2]", b"[1,[2]]", b"[01]", b"[+1]", b"[.5]", b"[NaN]", b"[Infinity]",
     b"[1e999]", b'["1"]', b'[1,"]"]', b"[{}]", b"[null]", b"[nul]", b"[tru]", b"[-]", b"[1}",
     b"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[["],
)  # fmt: skip
def test_what_is_no_array_of_numbers_is_refused_with_the_place(text: bytes, piece: int) -> None:
    padded = b"[" + b"7," * piece + text[1:] if text != b"[1]]" else text
    for given_text in (text, padded):
        reading = JsonText(b'{"x":' + given_text + b"}")
        with pytest.raises(ProtocolError, match=r"\(line 1 column \d+\)$"):
            finish(reading.object())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"a": 1, "a": 2}', "a is given twice (line 1 column 10)"),
        (b'{"a":\n {"b": 1,\n  "b": 2}}', "a.b is given twice (line 3 column 3)"),
        (b'{"a": "\xff"}', "a is no JSON: invalid unicode"),
        (b'{"a": "\\ud800"}', "a is no JSON: "),
        (b'{"a\\u0000": 1}', "a string holds a NUL (line 1 column 2)"),
        (b'{"a": NaN}', "a holds nan; NaN and infinities are taken with --set allow"),
        (b'{"a": 1e999}', "--set allow-non-finite=on (line 1 column 7)"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a is no JSON: number out of range"),
        (b'{"a": [1,\n2,\n3x]}', "a is no JSON: expected `,` or `]` (line 3 column 2)"),
        (b'{"a" 1}', "a colon is expected, and '1' comes (line 1 column 6)"),
        (b'{"a": 1 "b"}', "a comma or '}' is expected, and '\"' comes"),
        (b'{"a": }', "a value is expected, and '}' comes"),
        (b"{a: 1}", "a name in quotes is expected, and 'a' comes"),
        (b'{"a": "b', "a string does not end"),
        (b'{"a":' * 9, "nests its braces too deeply"),
        (b'{"a": ' + b"[" * 10**6, "nests its brackets too deeply"),
        (b'{"a": [' + b"1" * 10**6 + b"]}", "a has a number of more than 32768 digits"),
        (b'{"a": [' + b"[" * 150 + b"]" * 150 + b"]}", "a "),
        (b"{" + b",".join(b'"%d": 1' % n for n in range(300)) + b"}", "more than 256 members"),
    ],
    ids=lambda value: repr(value)[:24],
)  # fmt: skip
def test_what_is_no_object_is_refused_with_the_place(text: bytes, words: str) -> None:
    with pytest.raises(ProtocolError) as raised:
        finish(JsonText(text).object())
    assert words in str(raised.value)


def test_strings_may_be_escaped_and_hold_brackets() -> None:
    assert read(b' {"a\\"]" : "\\u00e9[{\\\\", "b": null, "c": -2.5e1}\n') == {
        'a"]': "é[{\\", "b": None, "c": -25.0,
    }  # fmt: skip


def large_bodies() -> Iterator[bytes]:
    """Some of each kind, all of a mebibyte or so."""
    nbytes = 2**20
    yield b'{"fields": {"input_ids": [' + b"1," * (nbytes // 2) + b"1]}}"
    yield b'{"fields": {"input_ids": [1], "x": [' + b"[1,2]," * (nbytes // 6) + b"[1,2]]}}"
    yield b'{"fields": {"input_ids": [1], "x": [[' + b"[1]," * (nbytes // 4) + b"[1]]]}}"
    line = b'{"fields": {"input_ids": [1, 2, 3]}}\n'
    yield line * 4_000
    yield b"[" + b",".join([line] * 4_000) + b"]"
    yield b'{"fields": {"input_ids": [' + b"1 , \n" * (nbytes // 5) + b"1]}}"


@pytest.mark.parametrize("body", list(large_bodies()), ids=lambda body: repr(body[:44]))
def test_no_piece_is_longer_than_it_may_be(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the text is made; most that is read takes many times as long as to skip it."""
    made: list[JsonText] = []

    class Watched(JsonText):
        def __init__(self, text: bytes, *, finite: bool) -> None:
            super().__init__(text, finite=finite)
            made.append(self)

    monkeypatch.setattr("rollout_dispatcher.service.http.samples.JsonText", Watched)
    places = [0, *(made[0].at for _ in read_samples(body, Reading()))]
    assert max(after - before for before, after in pairwise(places)) <= 2 * PIECE
    assert places[-1] > len(body) - 2 * PIECE


def test_more_samples_than_a_request_may_have_are_refused() -> None:
    line = b'{"fields": {"input_ids": [1]}}\n'
    with pytest.raises(ProtocolError, match=r"more than 4096 samples.*\(line 4097 column 1\)"):
        finish(read_samples(line * 4097, Reading()))
