# SPDX-License-Identifier: Apache-2.0
"""Arrays of the caller as cqsa_tensor records, without a copy; names of types and amounts of memory."""

from __future__ import annotations

import ctypes
import operator
import re
import struct
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from . import _ffi
from ._errors import ERROR_DTYPE, ERROR_INDEX, ERROR_INVALID_ARGUMENT, ERROR_SHAPE, ERROR_STRIDES, error_for

DtypeName = Union[str, type, np.dtype, None, Sequence[Union[str, type, np.dtype]]]

# ---------------------------------------------------------------------------------------------------------------------
# Element types
# ---------------------------------------------------------------------------------------------------------------------

_BY_NAME: Dict[str, int] = {
    "float64": _ffi.DTYPE_F64,
    "float32": _ffi.DTYPE_F32,
    "float16": _ffi.DTYPE_F16,
    "bfloat16": _ffi.DTYPE_BF16,
    "int8": _ffi.DTYPE_I8,
    "float8_e4m3fn": _ffi.DTYPE_E4M3FN,
    "float8_e5m2": _ffi.DTYPE_E5M2,
}
_BITS_16 = ("float16", "bfloat16")
_BITS_8 = ("float8_e4m3fn", "float8_e5m2", "int8")
_UINT16, _UINT8 = np.dtype(np.uint16), np.dtype(np.uint8)

# dtype object -> code. bfloat16 and float8 of ml_dtypes are added when first seen, so ml_dtypes is never imported here.
_codes: Dict[np.dtype, int] = {
    np.dtype(name): _BY_NAME[name] for name in ("float64", "float32", "float16", "int8")
}
INTEGERS: Dict[np.dtype, int] = {np.dtype(np.int32): _ffi.DTYPE_I32, np.dtype(np.int64): _ffi.DTYPE_I64}


class Names(NamedTuple):
    """What `dtype=` says: the meaning of the bits in uint16 and in uint8 arrays."""

    uint16: Optional[str] = None
    uint8: Optional[str] = None


NO_NAMES = Names()


def dtype_names(dtype: DtypeName) -> Names:
    """Reads the keyword `dtype`: None, one name or several ("bfloat16", ("bfloat16", "float8_e4m3fn"))."""
    if dtype is None:
        return NO_NAMES
    names = named_types(dtype)
    for name in names:
        if name not in _BY_NAME:
            raise error_for(ERROR_DTYPE, f"dtype is {name!r}, wanted one of {', '.join(_BY_NAME)}")
    wide = [name for name in names if name in _BITS_16]
    narrow = [name for name in names if name in _BITS_8]
    if len(wide) > 1 or len(narrow) > 1:
        raise error_for(ERROR_DTYPE, f"dtype is {dtype!r}, wanted one name for uint16 and one for uint8 arrays at most")
    return Names(wide[0] if wide else None, narrow[0] if narrow else None)


def named_types(dtype: DtypeName) -> List[str]:
    """The names in `dtype`, unchecked."""
    given: Sequence[Any] = dtype if isinstance(dtype, (list, tuple)) else [] if dtype is None else [dtype]
    return [name if isinstance(name, str) else str(np.dtype(name).name) for name in given]


def float_code(array: np.ndarray, name: str, names: Names) -> int:
    """CQSA_DTYPE_* of an operand that holds numbers; uint16 and uint8 are what `dtype=` says."""
    code = _codes.get(array.dtype)
    return code if code is not None else _rare_code(array.dtype, name, names)


def _rare_code(dtype: np.dtype, name: str, names: Names) -> int:
    if dtype in (_UINT16, _UINT8):
        meaning = names.uint16 if dtype == _UINT16 else names.uint8
        if meaning is None:
            example = "bfloat16" if dtype == _UINT16 else "float8_e4m3fn"
            raise error_for(ERROR_DTYPE, f"{name} is {dtype.name}: say what its bits are, as in dtype={example!r}")
        return _BY_NAME[meaning]
    code = _BY_NAME.get(dtype.name)
    if code is None or not dtype.isnative:
        raise error_for(ERROR_DTYPE, f"{name} is {dtype.str if dtype.kind in 'iufc' else dtype.name}, wanted "
                        "float32, float16, bfloat16 or float64; k and v also int8, float8_e4m3fn or float8_e5m2")
    _codes[dtype] = code
    return code


def mask_code(mask: np.ndarray) -> int:
    if mask.dtype == np.bool_:
        return _ffi.DTYPE_BOOL
    if mask.dtype == np.uint8:
        return _ffi.DTYPE_U8
    raise error_for(ERROR_DTYPE, f"mask is {mask.dtype.name}, wanted bool or uint8; an additive mask goes into bias")


# ---------------------------------------------------------------------------------------------------------------------
# cqsa_tensor records
# ---------------------------------------------------------------------------------------------------------------------

_TENSOR_BYTES = ctypes.sizeof(_ffi.Tensor)


def _layout(ndim: int) -> Tuple[struct.Struct, Any, int]:
    """cqsa_tensor with its shape and strides behind it: packer, buffer type, offset of the strides."""
    packer = struct.Struct(f"@PiiiiPPQ{2 * ndim}q")
    return packer, ctypes.c_char * packer.size, _TENSOR_BYTES + 8 * ndim


_layouts = [_layout(ndim) for ndim in range(6)]


def tensor(array: np.ndarray, code: int, name: str, keep: List[Any]) -> int:
    """Address of a cqsa_tensor that views `array`. `keep` holds the record and must outlive the use."""
    shape = array.shape
    ndim = len(shape)
    packer, buffer, strides_at = _layouts[ndim] if ndim < len(_layouts) else _layout(ndim)
    itemsize = array.itemsize
    strides = array.strides
    if itemsize > 1:
        strides = tuple([stride // itemsize for stride in strides])
        if tuple([stride * itemsize for stride in strides]) != array.strides:
            strides = _whole_strides(array, name)
    record = buffer()
    address = ctypes.addressof(record)
    packer.pack_into(record, 0, array.ctypes.data, _ffi.DEVICE_CPU, 0, ndim, code, address + _TENSOR_BYTES,
                     address + strides_at, 0, *shape, *strides)
    keep.append(record)
    keep.append(array)
    return address


def _whole_strides(array: np.ndarray, name: str) -> Tuple[int, ...]:
    strides = []
    for size, stride in zip(array.shape, array.strides):
        whole, rest = divmod(stride, array.itemsize)
        if rest and size > 1:
            raise error_for(ERROR_STRIDES, f"{name} has the byte strides {list(array.strides)}, wanted multiples of its "
                            f"{array.itemsize}-byte elements (a field of a record array must be copied first)")
        strides.append(0 if rest else whole)
    return tuple(strides)


# ---------------------------------------------------------------------------------------------------------------------
# Operands
# ---------------------------------------------------------------------------------------------------------------------


def output(array: Any, name: str) -> np.ndarray:
    """A writable view of the caller's output, or an error: never a copy."""
    view = np.asarray(array)
    if not isinstance(array, np.ndarray) and not hasattr(array, "__array_interface__"):
        try:
            memoryview(array)
        except TypeError:
            raise error_for(ERROR_INVALID_ARGUMENT,
                            f"{name} is {type(array).__name__}, wanted an array that can be written in place") from None
    if not view.flags.writeable:
        raise error_for(ERROR_INVALID_ARGUMENT, f"{name} is read-only, wanted a writable array")
    return view


def bhsd(array: np.ndarray, bshd: bool) -> np.ndarray:
    """The [batch, heads, seq, ..] view of a 4-axis operand given as [batch, seq, heads, ..]."""
    return array.swapaxes(1, 2) if bshd and array.ndim >= 3 else array


def four_axes(array: np.ndarray) -> np.ndarray:
    """Leading axes of size 1 until there are four, as numpy broadcasts."""
    return array[(None,) * (4 - array.ndim)] if array.ndim < 4 else array


def small_floats(values: Any, name: str) -> np.ndarray:
    """A small operand as f32: lists and numbers are taken, other real types are converted."""
    array = np.asarray(values)
    if array.dtype == np.float32:
        return array
    if array.dtype.kind in "fiu":
        return array.astype(np.float32)
    raise error_for(ERROR_DTYPE, f"{name} is {array.dtype.name}, wanted float32")


def small_integers(values: Any, name: str) -> np.ndarray:
    """A small operand as contiguous i32 or i64: lists are taken, other integer types are converted."""
    array = np.asarray(values)
    if array.dtype in INTEGERS:
        return np.ascontiguousarray(array) if array.ndim else array
    if array.dtype.kind in "iu" or array.size == 0:
        return array.astype(np.int64)
    raise error_for(ERROR_DTYPE, f"{name} is {array.dtype.name}, wanted int32 or int64")


def page_ids(values: Any) -> np.ndarray:
    """page_table as i32; wider integers are converted when every id fits."""
    array = small_integers(values, "page_table")
    if array.dtype == np.int32:
        return array
    if array.size and (array.min() < -1 or array.max() >= 1 << 31):
        raise error_for(ERROR_INDEX, f"page_table has the id {array.min() if array.min() < -1 else array.max()}, "
                        "wanted -1 or the number of a page")
    return array.astype(np.int32)


class _StandIn:
    """Something numpy sees as an array of a shape, on an address that must not be read."""

    def __init__(self, interface: Dict[str, Any]) -> None:
        self.__array_interface__ = interface


def storage(dtype_name: str) -> np.dtype:
    """The numpy type that holds the bits of a type that numpy may not know."""
    return np.dtype({"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}.get(dtype_name, dtype_name))


def stand_in(shape: Tuple[int, ...], name: str, dtype: np.dtype, slot: int) -> np.ndarray:
    """An array of which only shape and type exist, for planning. Slots are 8 TiB apart and start at 1."""
    if any(size < 0 for size in shape):
        raise error_for(ERROR_SHAPE, f"{name} has the shape {list(shape)}, wanted sizes of at least 0")
    interface = {"shape": shape, "typestr": f"|V{dtype.itemsize}", "data": (slot << 43, False), "version": 3}
    try:
        return np.asarray(_StandIn(interface)).view(dtype)
    except ValueError as error:
        raise error_for(ERROR_SHAPE, f"{name} has the shape {list(shape)}: {error}") from None


# ---------------------------------------------------------------------------------------------------------------------
# Amounts of memory
# ---------------------------------------------------------------------------------------------------------------------

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b|)\s*", re.IGNORECASE)


def memory_bytes(limit: Union[int, str, None], name: str) -> int:
    """Bytes of `limit`: a positive integer, or text such as "512MiB", "1.5 GiB", "2GB". None is 0, no limit."""
    if limit is None:
        return 0
    if isinstance(limit, str):
        match = _AMOUNT.fullmatch(limit)
        unit = _UNITS.get(match.group(2).lower()) if match else None
        if match is None or unit is None:
            raise error_for(ERROR_INVALID_ARGUMENT, f"{name} is {limit!r}, wanted bytes or text like '512MiB'")
        number = match.group(1)
        amount = int(number) * unit if number.isdigit() else int(float(number) * unit)
    else:
        amount = integer(limit, name)
    if not 0 < amount < 1 << 63:
        raise error_for(ERROR_INVALID_ARGUMENT, f"{name} is {limit!r}, wanted at least 1 byte; None is no limit")
    return amount


def integer(value: Any, name: str) -> int:
    """`value` as an int, when it is one (numpy's too)."""
    try:
        return operator.index(value)
    except TypeError:
        raise error_for(ERROR_INVALID_ARGUMENT, f"{name} is {value!r}, wanted an integer") from None
