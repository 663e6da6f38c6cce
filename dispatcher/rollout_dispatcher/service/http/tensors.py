"""Tensors that are built from pieces of a JSON array, and then written into a sample's span.

A field's type is the first of these that applies:

    text, for a string and nothing else
    the type of the run's samples, once it is known
    the declared type                       {"dtype": "int64", "data": [...]}
    that of numbers, by the field's name    `values.py:type_of_numbers`

float32 and narrower floats round; any other value that the type does not hold exactly is refused.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.sample import DType, Field, Schema
from rollout_dispatcher.service.http.bodies import Work
from rollout_dispatcher.values import NUMPY_DTYPES, Place, first_changed, place_of, type_of_numbers

#: numpy's object for the memory of each type on the wire; bfloat16 is not written as numbers.
ELEMENTS: Final[dict[DType, np.dtype[Any]]] = {
    **{item: dtype.newbyteorder("<") for item, dtype in NUMPY_DTYPES.items()},
    DType.STR: np.dtype(np.uint8),
}
#: Values that are written at once, in less than a millisecond.
VALUES_AT_ONCE: Final = 16 * 1024


class FieldRefused(ProtocolError):
    """A field of a sample is refused; the message lacks its place in the text."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Options of parsing samples.

    group_size: default of samples without one. schema: of the run's samples; None: not known yet.
    allow_non_finite: whether NaN and infinities are accepted.
    """

    group_size: int | None = None
    schema: Schema | None = None
    allow_non_finite: bool = False

    def known(self, name: str) -> Field | None:
        """Return the run's field of this name, if it is known."""
        return None if self.schema is None else self.schema.by_name.get(name)


@dataclass(frozen=True, slots=True)
class ElementType:
    """An element type, and the reason for it."""

    dtype: DType
    why: str


class Tensor:
    """Rows of one shape, as they are added; a number is a row of shape ().

    pieces: flat arrays of all values in order, each of the type that it was parsed in. ragged: its
    rows are declared to be its own. is_text: the values are bytes of UTF-8.
    """

    def __init__(self) -> None:
        self.ragged = self.is_text = False
        self.pieces: list[NDArray[Any]] = []
        self._rows = 0
        self._row: tuple[int, ...] | None = None

    @classmethod
    def scalar(cls, value: object) -> "Tensor":
        """Return a tensor without dimensions. Raises ValueError for anything but a number."""
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise ValueError("no number or boolean")
        found = cls()
        found.pieces, found._rows = [array.reshape(1)], -1
        return found

    @classmethod
    def text(cls, value: str) -> "Tensor":
        """Return the bytes of a text."""
        found = cls()
        found.add(np.frombuffer(value.encode(), ELEMENTS[DType.STR]))
        found.ragged = found.is_text = True
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows, and the shape of each."""
        return () if self._rows < 0 else (self._rows, *(self._row or ()))

    @property
    def kind(self) -> str:
        """The `kind` of the numpy type that holds all values."""
        return np.result_type(*(piece.dtype for piece in self.pieces)).kind

    def add(self, rows: NDArray[Any]) -> None:
        """Add rows. Raises ValueError if their shape is another."""
        self._extend(len(rows), rows.shape[1:])
        self.pieces.append(rows.reshape(-1))

    def add_row(self, row: "Tensor") -> None:
        """Add a row. Raises ValueError if its shape is another."""
        self._extend(1, row.shape)
        self.pieces += row.pieces

    def roll(self) -> None:
        """Move each value of a flat tensor one place up, and the last one to the front."""
        if self.pieces:
            last = self.pieces[-1]
            self.pieces[-1:] = [last[:-1]]
            self.pieces.insert(0, last[-1:])

    def _extend(self, rows: int, shape: tuple[int, ...]) -> None:
        if self._row not in (None, shape):
            raise ValueError(f"a row has shape {shape}, those before it {self._row}")
        self._rows, self._row = self._rows + rows, shape

    def written(self, name: str, element: ElementType, place: memoryview) -> Work[None]:
        """Write all values to memory, a piece at a time, and release the pieces.

        Raises FieldRefused for a value that the type does not hold.
        """
        dtype = ELEMENTS[element.dtype]
        target, rounds, at, since = np.frombuffer(place, dtype), self.kind == "f", 0, 0
        self.pieces.reverse()
        while self.pieces:
            piece = self.pieces.pop()
            with np.errstate(all="ignore"):
                cast = piece.astype(dtype)
            # JSON has one kind of number, so rounding to the requested floats is no loss.
            if cast.dtype != piece.dtype:
                self._check(name, element, piece, first_changed(piece, cast, rounds=rounds), at)
            target[at : at + len(cast)] = cast
            at, since = at + len(cast), since + len(cast)
            if since > VALUES_AT_ONCE:
                since = 0
                yield

    def _check(
        self, name: str, element: ElementType, piece: NDArray[Any], changed: Place | None, at: int
    ) -> None:
        if changed is None:
            return
        (within,) = changed
        index = tuple(map(int, np.unravel_index(at + within, self.shape)))
        raise FieldRefused(
            f"fields.{name}{place_of(index)} is {piece[within]}, which {element.dtype} "
            f'({element.why}) does not hold; {{"dtype": ..., "data": ...}} gives it another type, '
            "--fields one to all samples"
        )


def element_type(name: str, tensor: Tensor, given: DType | None, reading: Reading) -> ElementType:
    """Return the type that a field is written in. Raises FieldRefused: text is no number."""
    known = reading.known(name)
    if tensor.is_text and (known is None or known.is_text):
        return ElementType(DType.STR, "as it is")
    if tensor.is_text:
        raise FieldRefused(f"fields.{name} is a string, and the run's samples have it as {known}")
    if given is DType.STR or (known is not None and known.is_text):
        raise FieldRefused(f"fields.{name} is no string, and has to be")
    if known is not None and known.dtype is not DType.BFLOAT16:
        return ElementType(known.dtype, "as the run's samples have it")
    if given is not None:
        return ElementType(given, "as it says itself")
    if tensor.kind == "b":
        return ElementType(DType.BOOL, "as it is")
    return ElementType(type_of_numbers(name), "as numbers of that name are")
