"""Tensors that are built from pieces of an array, and then written where they belong."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.sample import DType
from rollout_dispatcher.service.http.bodies.pieces import Work

#: Element type of a tensor that does not say, by numpy's kind of what JSON held.
_UNTYPED: Final = {"b": DType.BOOL, "i": DType.INT64, "u": DType.INT64, "f": DType.FLOAT32}


#: Values that are written at once, in much less than a millisecond.
VALUES_AT_ONCE: Final = 16 * 1024


class FieldRefused(ProtocolError):
    """A field of a sample is not what it has to be; the message has no place in the text yet."""


class Tensor:
    """Rows of one shape, as they are added; of numbers alone the shape of a row is ().

    pieces: flat arrays, one after the other all values, each of the type that it was found in.
    """

    def __init__(self) -> None:
        self.pieces: list[NDArray[Any]] = []
        self._rows = 0
        self._row: tuple[int, ...] | None = None

    @classmethod
    def scalar(cls, value: object) -> "Tensor":
        """A tensor without dimensions. Raises ValueError for what is no number."""
        array = np.asarray(value)
        if array.dtype.kind not in _UNTYPED:
            raise ValueError("no number or boolean")
        found = cls()
        found.pieces, found._rows = [array.reshape(1)], -1
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows, and the shape of each."""
        return () if self._rows < 0 else (self._rows, *(self._row or ()))

    @property
    def kind(self) -> str:
        """The type that holds all values, as numpy's `kind`."""
        return np.result_type(*(piece.dtype for piece in self.pieces)).kind

    def add(self, rows: NDArray[Any]) -> None:
        """More rows. Raises ValueError if their shape is another."""
        self._extend(len(rows), rows.shape[1:])
        self.pieces.append(rows.reshape(-1))

    def add_row(self, row: "Tensor") -> None:
        """One row more. Raises ValueError if its shape is another."""
        self._extend(1, row.shape)
        self.pieces += row.pieces

    def _extend(self, rows: int, shape: tuple[int, ...]) -> None:
        if self._row not in (None, shape):
            raise ValueError(f"a row has shape {shape}, those before it {self._row}")
        self._rows, self._row = self._rows + rows, shape

    def written(self, name: str, dtype: DType, place: memoryview) -> Work[None]:
        """Write all values to a place, a piece at a time; the pieces are let go.

        Raises FieldRefused for values that `dtype` cannot hold.
        """
        target, at, since = np.frombuffer(place, str(dtype)), 0, 0
        self.pieces.reverse()
        while self.pieces:
            piece = self.pieces.pop()
            with np.errstate(all="ignore"):
                cast = piece.astype(str(dtype))
            held = np.isfinite(cast).all() if cast.dtype.kind == "f" else (cast == piece).all()
            if not held:
                raise FieldRefused(f"fields.{name} has values that {dtype} cannot hold")
            target[at : at + len(cast)] = cast
            at, since = at + len(cast), since + len(cast)
            if since > VALUES_AT_ONCE:
                since = 0
                yield


def untyped(tensor: Tensor) -> DType:
    """The element type of a tensor that does not say."""
    return _UNTYPED[tensor.kind]
