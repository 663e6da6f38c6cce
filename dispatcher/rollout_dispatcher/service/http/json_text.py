"""A JSON parser that works in bounded pieces, and parses numbers into arrays.

Python's parser and pydantic's hold the interpreter's lock to the end of the text, and make an
object of each number. This one follows the structure itself, as a sample has few members; of
arrays, which are nearly all of the text, it has all whole elements of a piece parsed at once:

    {"fields": {"input_ids": [5, 6, 7, ... , 8, 9, ... , 10]}}
                             |----piece---|--------|-------|    each from_json, then an array

It checks UTF-8, unique names, bounded nesting, and, unless they are allowed, that no number is or
becomes NaN or infinite.
"""

import re
from collections.abc import Callable
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.service.http.bodies import PIECE, Work
from rollout_dispatcher.service.http.tensors import Tensor

#: Nested objects: a sample, its fields, a field with its dtype, and one more.
MAX_OBJECTS: Final = 4
#: Nested arrays of which each is larger than a piece; those within a piece are numpy's to bound.
MAX_ARRAYS: Final = 16
#: Members of one object; a sample has at most 64 fields.
MAX_MEMBERS: Final = 256
#: The work of one step through the structure, in bytes of text that are parsed in the same time.
STEP: Final = 256
#: Bytes to search for the end of nested elements, tried in this order.
WINDOWS: Final = (PIECE // 32, PIECE // 4, PIECE)

END: Final = -1
OPEN, CLOSE, COMMA, COLON, QUOTE = b'[],:"'
OPEN_OBJECT, CLOSE_OBJECT = b"{}"
_SPACE = re.compile(rb"[ \t\r\n]*+")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SCALAR = re.compile(rb'[^\[\]{}",:\s]*+')
#: The member of a sample that lists strings; all other arrays are of numbers.
_NAMES = ["per_sample"]
_PLACE = re.compile(r" at line (\d+) column (\d+)$")


class JsonText:
    """A text and the position in it. The methods raise ProtocolError, with the place.

    finite: whether all numbers have to be. path: the names of the members around the position.
    """

    def __init__(self, text: bytes | bytearray, *, finite: bool = True) -> None:
        self.text, self.at = text, 0
        self._finite = finite
        self.path: list[str] = []
        self._since = 0

    # -- the position

    def peek(self) -> int:
        """Skip white space, and return the next byte, or END."""
        text, at = self.text, self.at
        while True:
            stop = min(at + PIECE, len(text))
            at = _SPACE.match(text, at, stop).end()  # type: ignore[union-attr]  # matches anything
            if at < stop or at == len(text):
                break
        self.at = at
        return text[at] if at < len(text) else END

    def take(self, byte: int) -> bool:
        """Read this byte if it comes next; returns whether it did."""
        found = self.peek() == byte
        self.at += found
        return found

    def goes_on(self, end: int) -> bool:
        """Read a comma or the `end` of a list; returns whether it was a comma."""
        if self.take(COMMA):
            return True
        if not self.take(end):
            self.fail(f"a comma or '{chr(end)}' is expected, and {self._found()} comes")
        return False

    def begins_line(self) -> bool:
        """Return whether anything follows, which has to be on a line of its own."""
        end = self.at
        if self.peek() == END:
            return False
        if self.text.find(b"\n", end, self.at) < 0:
            self.fail(f"the line's end is expected, and {self._found()} comes")
        return True

    def fail(self, what: str, at: int | None = None) -> NoReturn:
        """Raise ProtocolError for the text at `at`, or at the position."""
        at = self.at if at is None else at
        line = self.text.count(b"\n", 0, at) + 1
        column = at - self.text.rfind(b"\n", 0, at)
        raise ProtocolError(f"{what} (line {line} column {column})")

    def worked(self, nbytes: int = 0) -> bool:
        """Count a step of work; returns whether a piece is complete."""
        self._since += STEP + nbytes
        if self._since < PIECE:
            return False
        self._since = 0
        return True

    # -- values

    def value(self, depth: int = 0) -> Work[Any]:
        """Parse a value: a dict, a Tensor for an array, a str, a number, a bool or None.

        The array `per_sample` is a list of strings.
        """
        comes = self.peek()
        if comes == OPEN_OBJECT:
            return (yield from self.object(depth))
        if comes == OPEN:
            return self._strings() if self.path == _NAMES else (yield from self._array(1))
        if comes == QUOTE:
            return self._string()
        return self._scalar()

    def _scalar(self) -> Any:
        at = self.at
        self.at = _SCALAR.match(self.text, at, at + PIECE).end()  # type: ignore[union-attr]
        if self.at == at:
            self.fail(f"a value is expected, and {self._found()} comes")
        found = self._parse(at, self.at)
        if isinstance(found, float):
            self._check_finite(np.asarray(found), at)
        return found

    def object(self, depth: int = 0) -> Work[dict[str, Any]]:
        """Parse an object."""
        if not self.take(OPEN_OBJECT):
            self.fail(f"a sample, in braces, is expected, and {self._found()} comes")
        if depth == MAX_OBJECTS:
            self.fail("the body nests its braces too deeply")
        found: dict[str, Any] = {}
        if self.take(CLOSE_OBJECT):
            return found
        while True:
            name = self._name(found)
            self.path.append(name)
            found[name] = yield from self.value(depth + 1)
            self.path.pop()
            if self.worked():
                yield
            if not self.goes_on(CLOSE_OBJECT):
                return found

    def _name(self, known: dict[str, Any]) -> str:
        if self.peek() != QUOTE:
            self.fail(f"a name in quotes is expected, and {self._found()} comes")
        at = self.at
        name = self._string()
        if name in known:
            self.fail(f"{'.'.join([*self.path, name])} is given twice", at)
        if len(known) == MAX_MEMBERS:
            self.fail(f"an object has more than {MAX_MEMBERS} members", at)
        if not self.take(COLON):
            self.fail(f"a colon is expected, and {self._found()} comes")
        return name

    def _string(self) -> str:
        found = _STRING.match(self.text, self.at, self.at + PIECE)
        if found is None:
            self.fail(f"a string does not end, or not within {PIECE} bytes")
        text: str = self._parse(*found.span())
        if "\0" in text:
            self.fail("a string holds a NUL")
        self.at = found.end()
        return text

    def _strings(self) -> list[str]:
        """Parse an array of strings."""
        self.at += 1
        found: list[str] = []
        if self.take(CLOSE):
            return found
        while True:
            if self.peek() != QUOTE:
                self.fail(f"a name in quotes is expected, and {self._found()} comes")
            if len(found) == MAX_MEMBERS:
                self.fail(f"{self._where()} has more than {MAX_MEMBERS} strings")
            found.append(self._string())
            if not self.goes_on(CLOSE):
                return found

    def _array(self, depth: int) -> Work[Tensor]:
        """Parse an array of numbers, or of arrays of one shape."""
        if depth > MAX_ARRAYS:
            self.fail("the body nests its brackets too deeply")
        tensor, goes_on = Tensor(), False
        self.at += 1
        while True:
            start, stop = self.at, self._end_of_elements()
            if stop < 0:  # the next element alone is larger than a piece
                at = self._expect_row()
                self._add(tensor.add_row, (yield from self._array(depth + 1)), at)
                goes_on = self.goes_on(CLOSE)
            else:
                is_end = self.text[stop] == CLOSE
                array = self._elements(start, stop, may_be_empty=is_end and not goes_on)
                self._add(tensor.add, array, start)
                self.at, goes_on = stop + 1, not is_end
            if self.worked(self.at - start):
                yield
            if not goes_on:
                return tensor

    def _expect_row(self) -> int:
        """Return the beginning of the next row."""
        if self.peek() != OPEN:
            if self.peek() in (QUOTE, OPEN_OBJECT):
                self._fail_in_array()
            if len(self.text) - self.at <= PIECE:
                self.fail("the body ends within an array", len(self.text))
            self.fail(f"{self._where()} has a number of more than {PIECE} digits")
        return self.at

    def _end_of_elements(self) -> int:
        """Return the end of a piece's last whole element: at a comma, or at the array's end.

        Less than 0 if there is none.
        """
        text, start = self.text, self.at
        limit = min(start + PIECE, len(text))
        close = text.find(b"]", start, limit)
        if text.find(b"[", start, limit if close < 0 else close) < 0:
            return close if close >= 0 else text.rfind(b",", start, limit)
        return next(
            filter(lambda end: end >= 0, (_end_of_nested(text, start, n) for n in WINDOWS)), -1
        )

    def _elements(self, start: int, stop: int, *, may_be_empty: bool) -> NDArray[Any]:
        """Parse numbers, or rows of them. Shape (elements, ...)."""
        content = self.text[start:stop]
        if b'"' in content or b"{" in content:
            self._fail_in_array()
        values = self._parse(start, stop, in_array=True)
        if not values and not may_be_empty:
            self.fail(f"a value is expected, and '{chr(self.text[stop])}' comes", stop)
        try:
            array = np.asarray(values)
        except (ValueError, RecursionError) as error:
            self.fail(f"{self._where()} is no tensor: {error}", start)
        if array.dtype.kind not in "biuf":
            self._fail_in_array()
        if array.dtype.kind == "f":
            self._check_finite(array, start)
        return array

    def _check_finite(self, array: NDArray[Any], at: int) -> None:
        if self._finite and not (finite := np.isfinite(array)).all():
            found = array.flat[int(np.argmin(finite))]
            self.fail(
                f"{self._where()} holds {found}; NaN and infinities are taken with "
                "--set allow-non-finite=on",
                at,
            )

    def _add(self, add: Callable[[Any], None], rows: Any, at: int) -> None:
        try:
            add(rows)
        except ValueError as error:
            self.fail(f"{self._where()} is no tensor: {error}", at)

    def _parse(self, start: int, stop: int, *, in_array: bool = False) -> Any:
        content = bytes(self.text[start:stop])
        try:
            return from_json(b"[%b]" % content if in_array else content, allow_inf_nan=True)
        except ValueError as error:
            what, at = _PLACE.sub("", str(error)), start
            if (place := _PLACE.search(str(error))) is not None:
                line, column = int(place[1]), int(place[2])
                for _ in range(line - 1):
                    at = self.text.find(b"\n", at, stop) + 1
                at += max(0, column - 1 - (in_array and line == 1))
            self.fail(f"{self._where()} is no JSON: {what}", min(at, stop))

    # -- words for errors

    def _where(self) -> str:
        return ".".join(self.path) or "the body"

    def _fail_in_array(self) -> NoReturn:
        self.fail(f"{self._where()} is no tensor of numbers or booleans")

    def _found(self) -> str:
        byte = self.text[self.at] if self.at < len(self.text) else END
        if byte == END:
            return "the body's end"
        return repr(chr(byte)) if 32 < byte < 127 else f"byte {byte:#04x}"


def _end_of_nested(text: bytes | bytearray, start: int, window: int) -> int:
    """Find `_end_of_elements` among nested brackets."""
    seen = np.frombuffer(text, np.uint8, count=min(window, len(text) - start), offset=start)
    steps = (seen == OPEN).astype(np.int8) - (seen == CLOSE).astype(np.int8)
    depth = np.cumsum(steps, dtype=np.int32)
    ended = np.flatnonzero(depth < 0)
    if len(ended):
        return start + int(ended[0])
    commas = np.flatnonzero((seen == COMMA) & (depth == 0))
    return start + int(commas[-1]) if len(commas) else -1
