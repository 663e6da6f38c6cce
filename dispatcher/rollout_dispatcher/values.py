"""Values of tensors: the type of untyped numbers, and whether another type can hold them.

The type of untyped numbers (Python's, JSON's) follows from their field's name and never from their
values, as the same field may have `[1, 0]` in one sample and `[0.5, 1]` in another:

    booleans                                bool
    input_ids, labels, *_ids                int64
    *_mask                                  bool
    others                                  float32

Only clients and the HTTP plane assign types; on the sample plane the dispatcher reads no value.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_dispatcher.sample import DType

#: numpy's own object of each type on the wire; it has none for bfloat16 and for a byte of text.
NUMPY_DTYPES: dict[DType, np.dtype[Any]] = {
    item: np.dtype(str(item)) for item in DType if item not in (DType.BFLOAT16, DType.STR)
}

#: Where a value stands: its index in each dimension.
Place = tuple[Any, ...]


def type_of_numbers(name: str) -> DType:
    """Return the type of untyped numbers in the field of this name, unless they are booleans."""
    if name in ("input_ids", "labels") or name.endswith("_ids"):
        return DType.INT64
    return DType.BOOL if name.endswith("_mask") else DType.FLOAT32


def first_changed(array: NDArray[Any], cast: NDArray[Any], *, rounds: bool) -> Place | None:
    """Return the index of the first value that `cast` changed; None if there is none.

    rounds: rounding to the nearest float is no change, as long as a finite number stays finite.
    """
    if rounds and cast.dtype.kind == "f":
        same = np.isfinite(cast) == np.isfinite(array)
    elif array.dtype.kind == "f" or cast.dtype.kind == "f":
        same = _same_number(array, cast)
    else:
        same = cast == array
    if np.all(same):
        return None
    return tuple(int(at) for at in np.unravel_index(int(np.argmin(same)), array.shape))


def _same_number(array: NDArray[Any], cast: NDArray[Any]) -> NDArray[np.bool_]:
    """Compare value by value; integers as integers, since floats round them."""
    with np.errstate(all="ignore"):
        back = cast.astype(array.dtype)
        same = back == array
        if array.dtype.kind == cast.dtype.kind == "f":
            same |= np.isnan(cast) & np.isnan(array)
        if array.dtype.kind != "f":  # 2**63 - 1 becomes 2**63, whose cast back is undefined
            same &= np.abs(cast.astype(np.float64)) < 2.0**63
        if cast.dtype.kind != "f":
            same &= cast.astype(np.float64) == array
    return np.asarray(same, np.bool_)


def negative_id(place: str, value: int) -> str:
    """Return the error text on a negative token id."""
    return (
        f"{place} is {value}, and token ids are never negative; -100, say, leaves a token out of "
        "the loss in labels: push its real id, and 0 for it in loss_mask"
    )


def place_of(at: Place) -> str:
    """Return an index as Python writes it: `[3]`, `[3, 1]`; empty for a scalar."""
    return f"[{', '.join(map(str, at))}]" if at else ""
