# SPDX-License-Identifier: Apache-2.0
"""Arrays of cupy as views. cupy is never imported here: an array can only come from a cupy that is there already."""

from __future__ import annotations

import sys
from typing import Any, Optional, Tuple

import numpy as np

from . import _ffi
from ._errors import ERROR_DTYPE, error_for
from ._views import CODES, View, numpy_type, whole_strides


def is_array(value: Any) -> bool:
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(value, getattr(cupy, "ndarray", ()))


def device_of(array: Any) -> Tuple[int, int]:
    return (_device_type(), array.device.id)


def _device_type() -> int:
    runtime = getattr(getattr(sys.modules["cupy"], "cuda", None), "runtime", None)
    return _ffi.DEVICE_ROCM if getattr(runtime, "is_hip", False) else _ffi.DEVICE_CUDA


def view(array: Any, name: str) -> View:
    """An array where it is, whatever its strides."""
    dtype = array.dtype
    code = CODES.get(dtype.name)
    if code is None:
        raise error_for(ERROR_DTYPE, f"{name} is {dtype.name}, wanted float32, float16, bfloat16 or float64; k and v also "
                        "int8, float8_e4m3fn or float8_e5m2")
    shape = tuple(array.shape)
    strides = None if array.flags.c_contiguous else whole_strides(shape, tuple(array.strides), dtype.itemsize, name)
    return View(int(array.data.ptr), shape, strides, code, dtype.itemsize, True, array, device_of(array))


def current_stream(device: int) -> int:
    return int(sys.modules["cupy"].cuda.get_current_stream(device).ptr)


def empty_like(array: Any, shape: Tuple[int, ...], code: Optional[int]) -> Any:
    """A new array on the same device, of the same type or of float32 or float64."""
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(array.device.id):
        return cupy.empty(shape, array.dtype if code is None else numpy_type(code))


def converted(array: Any, dtype: Any, device: int) -> Any:
    """A compact array of another type, from the host or the device."""
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(device):
        return cupy.ascontiguousarray(cupy.asarray(array, dtype=np.dtype(dtype)))
