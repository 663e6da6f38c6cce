"""JSON read in bounded pieces: numbers go into arrays as they are met.

Python's own readers, and pydantic's, hold the interpreter's lock from the first byte to the last,
and make an object of each number before the first becomes part of a tensor. Here the structure is
followed by hand, which is little as a sample has few members, and of arrays, which are nearly all
of the text, as many whole elements as a piece holds are read at once:

    {"fields": {"input_ids": [5, 6, 7, ... , 8, 9, ... , 10]}}
                             |----piece---|--------|-------|    each from_json, then an array

The text is checked as it is read: UTF-8, no name given twice, nesting bounded, and, unless they
are allowed, no NaN, no infinity and no number that becomes one.
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

#: Nested objects: a sample, its fields, a field with its dtype, and one for good measure.
MAX_OBJECTS: Final = 4
#: Nested arrays of which each is larger than a piece; those within a piece are numpy's to bound.
MAX_ARRAYS: Final = 16
#: Members of one object; a sample has at most 64 fields.
MAX_MEMBERS: Final = 256
#: What it takes to follow the structure by a step, in bytes of text that are read meanwhile.
STEP: Final = 256
#: Bytes among which the end of nested elements is looked for, as few as will do.
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
    """A text and how far it was read. Its methods raise ProtocolError, with the place.

    finite: whether all numbers have to be. path: the names of the members that it stands within.
    """

    def __init__(self, text: bytes, *, finite: bool = True) -> None:
        self.text, self.at = text, 0
        self._finite = finite
        self.path: list[str] = []
        self._since = 0

    # -- where it stands

    def peek(self) -> int:
        """The next byte that is no white space, which is skipped; or END."""
        text, at = self.text, self.at
        while True:
            stop = min(at + PIECE, len(text))
            at = _SPACE.match(text, at, stop).end()  # type: ignore[union-attr]  # matches anything
            if at < stop or at == len(text):
                break
        self.at = at
        return text[at] if at < len(text) else END

    def take(self, byte: int) -> bool:
        """Whether this byte comes next; then it is read."""
        found = self.peek() == byte
        self.at += found
        return found

    def goes_on(self, end: int) -> bool:
        """Whether a comma comes next, and not the `end` of what is listed; one of them is read."""
        if self.take(COMMA):
            return True
        if not self.take(end):
            self.fail(f"a comma or '{chr(end)}' is expected, and {self._found()} comes")
        return False

    def begins_line(self) -> bool:
        """Whether something follows, which then has to be on a line of its own."""
        end = self.at
        if self.peek() == END:
            return False
        if self.text.find(b"\n", end, self.at) < 0:
            self.fail(f"the line's end is expected, and {self._found()} comes")
        return True

    def fail(self, what: str, at: int | None = None) -> NoReturn:
        """Raise ProtocolError for what stands `at` a place, or here."""
        at = self.at if at is None else at
        line = self.text.count(b"\n", 0, at) + 1
        column = at - self.text.rfind(b"\n", 0, at)
        raise ProtocolError(f"{what} (line {line} column {column})")

    def worked(self, nbytes: int = 0) -> bool:
        """Count a step, and what it read; returns whether others are to be let in."""
        self._since += STEP + nbytes
        if self._since < PIECE:
            return False
        self._since = 0
        return True

    # -- values

    def value(self, depth: int = 0) -> Work[Any]:
        """Whatever comes: a dict, a Tensor for an array, a str, a number, a bool or None.

        A list of strings for the array `per_sample`.
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
        """The object that begins here."""
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
        """The array of strings that begins here."""
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
        """The array that begins here, of numbers, or of arrays that hold as much each."""
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
        """Where the row begins that comes next."""
        if self.peek() != OPEN:
            if self.peek() in (QUOTE, OPEN_OBJECT):
                self._fail_in_array()
            if len(self.text) - self.at <= PIECE:
                self.fail("the body ends within an array", len(self.text))
            self.fail(f"{self._where()} has a number of more than {PIECE} digits")
        return self.at

    def _end_of_elements(self) -> int:
        """Where the whole elements of a piece end: at a comma, or at the array's end.

        Less than 0 if there is not one.
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
        """Numbers, or rows of them. Shape (elements, ...)."""
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
        content = self.text[start:stop]
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


def _end_of_nested(text: bytes, start: int, window: int) -> int:
    """`_end_of_elements` among brackets, of which it follows the depth."""
    seen = np.frombuffer(text, np.uint8, count=min(window, len(text) - start), offset=start)
    steps = (seen == OPEN).astype(np.int8) - (seen == CLOSE).astype(np.int8)
    depth = np.cumsum(steps, dtype=np.int32)
    ended = np.flatnonzero(depth < 0)
    if len(ended):
        return start + int(ended[0])
    commas = np.flatnonzero((seen == COMMA) & (depth == 0))
    return start + int(commas[-1]) if len(commas) else -1
