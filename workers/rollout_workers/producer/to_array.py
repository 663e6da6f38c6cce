"""What a rollout worker holds (a tensor, an array, a list) as an array whose memory can travel.

torch tensors are recognised without importing torch. Memory is copied only where it has to be: out
of lists, off a GPU, into C order and little endian.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_dispatcher.errors import SampleRefused
from rollout_dispatcher.sample import DType

#: A tensor, an array, or nested lists of numbers.
ArrayLike = Any
Array = NDArray[Any]

#: numpy's own object of each type on the wire; it has none for bfloat16.
NUMPY_DTYPES: dict[DType, np.dtype[Any]] = {
    item: np.dtype(str(item)) for item in DType if item is not DType.BFLOAT16
}
#: Arrays of these types travel as they are.
_AS_IS = {dtype.newbyteorder("<"): item for item, dtype in NUMPY_DTYPES.items()}
_NAMES = tuple(map(str, DType))


def to_array(name: str, value: ArrayLike) -> tuple[Array, DType]:
    """The field `name` as a C-contiguous little-endian array, and its type on the wire.

    A bfloat16 tensor becomes an array of int16. Raises SampleRefused that names the field.
    """
    if type(value) is np.ndarray and value.flags.c_contiguous:
        known = _AS_IS.get(value.dtype)
        if known is not None:
            return value, known
    if type(value).__module__.partition(".")[0] == "torch":
        return _from_torch(name, value)
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise SampleRefused("bad-field", f"{name} is no array: {error}") from error
    if not isinstance(value, (np.ndarray, np.generic)) and array.dtype == np.float64:
        # Python floats: trainers hold them in float32, and nobody asked for twice the bytes.
        array = array.astype(np.float32)
    if array.dtype.name not in _NAMES:
        raise SampleRefused(
            "bad-dtype", f"{name} is {array.dtype.name}; accepted are {', '.join(_NAMES)}"
        )
    # order="C", not ascontiguousarray: that one makes a dimension out of none.
    array = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
    return array, DType(array.dtype.name)


def _from_torch(name: str, tensor: Any) -> tuple[Array, DType]:
    dtype = _torch_dtype(name, tensor.dtype)
    tensor = tensor.contiguous()
    if dtype is DType.BFLOAT16:
        import torch  # noqa: PLC0415  the caller has it, or there would be no tensor

        tensor = tensor.view(torch.int16)
    return tensor.numpy(force=True), dtype  # detached and on the CPU


@lru_cache(maxsize=256)
def _torch_dtype(name: str, dtype: object) -> DType:
    """The type on the wire of a torch.dtype; raises SampleRefused that names the field."""
    word = str(dtype).removeprefix("torch.")
    if word not in _NAMES:
        raise SampleRefused("bad-dtype", f"{name} is {word}; accepted are {', '.join(_NAMES)}")
    return DType(word)
