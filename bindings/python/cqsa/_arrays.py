# SPDX-License-Identifier: Apache-2.0
"""Names of types, small operands and amounts of memory."""

from __future__ import annotations

import operator
import re
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Sequence, Union

import numpy as np

from . import _ffi
from ._errors import ERROR_DTYPE, ERROR_INDEX, ERROR_INVALID_ARGUMENT, error_for
from ._sources import device_of, dtype_name, view_of
from ._views import BITS_16, BITS_8, View, of_numpy, type_name

if TYPE_CHECKING:
    from ._queue import Queue

# A name, or a dtype of numpy, ml_dtypes or torch; or several of them.
DtypeName = Any

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

_FLOATS = frozenset(_BY_NAME.values())
INTEGERS = (_ffi.DTYPE_I32, _ffi.DTYPE_I64)


class Names(NamedTuple):
    """What `dtype=` says: the meaning of the bits in uint16 and in uint8 arrays."""

    uint16: Optional[str] = None
    uint8: Optional[str] = None


NO_NAMES = Names()


def code_of(name: str) -> int:
    """CQSA_DTYPE_* of a name of an operand's type."""
    return _BY_NAME[name]


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
    return [dtype_name(name) for name in given]


def float_code(view: View, name: str, names: Names) -> int:
    """CQSA_DTYPE_* of an operand that holds numbers; uint16 and uint8 are what `dtype=` says."""
    code = view.code
    return code if code in _FLOATS else _named_code(code, name, names)


def _named_code(code: int, name: str, names: Names) -> int:
    if code in (BITS_16, BITS_8):
        meaning = names.uint16 if code == BITS_16 else names.uint8
        if meaning is None:
            example = "bfloat16" if code == BITS_16 else "float8_e4m3fn"
            raise error_for(ERROR_DTYPE, f"{name} is {type_name(code)}: say what its bits are, as in dtype={example!r}")
        return _BY_NAME[meaning]
    raise error_for(ERROR_DTYPE, f"{name} is {type_name(code)}, wanted float32, float16, bfloat16 or float64; k and v also "
                    "int8, float8_e4m3fn or float8_e5m2")


def mask_code(mask: View) -> int:
    if mask.code in (_ffi.DTYPE_BOOL, _ffi.DTYPE_U8):
        return mask.code
    raise error_for(ERROR_DTYPE, f"mask is {type_name(mask.code)}, wanted bool or uint8; an additive mask goes into bias")


# ---------------------------------------------------------------------------------------------------------------------
# Small operands, the only ones that may be converted
# ---------------------------------------------------------------------------------------------------------------------


def small_floats(values: Any, name: str, side: Optional[Queue] = None) -> View:
    """A small operand as f32: lists and numbers are taken, other real types are converted. side: the queue of the device that
    it belongs on, None for host memory."""
    if side is not None and device_of(values) is not None:
        view = view_of(values, name, side)
        return view if view.code == _ffi.DTYPE_F32 else view_of(side.converted(values, "float32", name), name, side)
    view = view_of(values, name)
    if view.code != _ffi.DTYPE_F32:
        array = view.array(name)
        if array.dtype.kind not in "fiu":
            raise error_for(ERROR_DTYPE, f"{name} is {array.dtype.name}, wanted float32")
        view = of_numpy(array.astype(np.float32), name)
    return _put(view, name, side)


def small_integers(values: Any, name: str, side: Optional[Queue] = None) -> View:
    """A small operand as contiguous i32 or i64: lists are taken, other integer types are converted."""
    if side is not None and device_of(values) is not None:
        view = view_of(values, name, side)
        if view.code in INTEGERS and view.strides is None:
            return view
        wanted = "int32" if view.code == _ffi.DTYPE_I32 else "int64"
        return view_of(side.converted(values, wanted, name), name, side)
    view = view_of(values, name)
    if view.code not in INTEGERS or view.strides is not None:
        array = view.array(name)
        if array.dtype.kind not in "iu" and array.size != 0:
            raise error_for(ERROR_DTYPE, f"{name} is {array.dtype.name}, wanted int32 or int64")
        view = of_numpy(array.astype(array.dtype if view.code in INTEGERS else np.int64, "C"), name)
    return _put(view, name, side)


def as_int64(view: View, name: str, side: Optional[Queue] = None) -> View:
    if side is not None:
        return view_of(side.converted(view.owner, "int64", name), name, side)
    return of_numpy(view.array(name).astype(np.int64), name)


def page_ids(values: Any, side: Optional[Queue] = None) -> View:
    """page_table as i32; wider integers are converted when every id fits, which is not looked at on a device."""
    if side is not None and device_of(values) is not None:
        view = view_of(values, "page_table", side)
        return view if view.code == _ffi.DTYPE_I32 else view_of(side.converted(values, "int32", "page_table"), "page_table", side)
    view = small_integers(values, "page_table")
    if view.code != _ffi.DTYPE_I32:
        array = view.array("page_table")
        if array.size and (array.min() < -1 or array.max() >= 1 << 31):
            raise error_for(ERROR_INDEX, f"page_table has the id {array.min() if array.min() < -1 else array.max()}, "
                            "wanted -1 or the number of a page")
        view = of_numpy(array.astype(np.int32), "page_table")
    return _put(view, "page_table", side)


def _put(view: View, name: str, side: Optional[Queue]) -> View:
    """A converted small operand where it belongs."""
    if side is None:
        return view
    array = np.array(view.array(name), order="C")
    return view_of(side.converted(array, array.dtype.name, name), name, side)


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
        amount = int(number) * unit if number.isdigit() else int(min(float(number) * unit, float(1 << 63)))
    else:
        amount = integer(limit, name)
    if not 0 < amount < 1 << 63:
        raise error_for(ERROR_INVALID_ARGUMENT, f"{name} is {str(limit)[:60]!r}, wanted 1 byte to 2**63 - 1; None is no limit")
    return amount


def integer(value: Any, name: str) -> int:
    """`value` as an int of 64 bits, when it is one (numpy's too). ctypes would wrap a larger one silently."""
    try:
        result = operator.index(value)
    except TypeError:
        raise error_for(ERROR_INVALID_ARGUMENT, f"{name} is {value!r}, wanted an integer") from None
    if not -(1 << 63) <= result < 1 << 63:
        raise error_for(ERROR_INVALID_ARGUMENT, f"{name} is about {'-' * (result < 0)}2**{result.bit_length() - 1}, "
                        "wanted an integer of 64 bits")
    return result


def number(value: Any, name: str) -> float:
    """`value` as a float."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise error_for(ERROR_INVALID_ARGUMENT, f"{name} is {str(value)[:60]!r}, wanted a number") from None
