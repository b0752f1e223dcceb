# SPDX-License-Identifier: Apache-2.0
"""Views: memory that somebody else owns, with shape, strides and type, and their cqsa_tensor records."""

from __future__ import annotations

import ctypes
import struct
import sys
from ctypes import c_void_p
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from . import _ffi
from ._errors import ERROR_DTYPE, ERROR_SHAPE, ERROR_STRIDES, error_for

CPU: Tuple[int, int] = (_ffi.DEVICE_CPU, 0)

# Types that only say how wide an element is; the keyword `dtype` says what its bits are.
BITS_8, BITS_16 = _ffi.DTYPE_U8, 0x00011001

# DLPack's {code, bits, lanes} of every type that may come in, whether the library takes it or not: its name is for messages.
CODES: Dict[str, int] = {
    "bool": _ffi.DTYPE_BOOL, "int8": _ffi.DTYPE_I8, "int16": 0x00011000, "int32": _ffi.DTYPE_I32, "int64": _ffi.DTYPE_I64,
    "uint8": BITS_8, "uint16": BITS_16, "uint32": 0x00012001, "uint64": 0x00014001,
    "float16": _ffi.DTYPE_F16, "float32": _ffi.DTYPE_F32, "float64": _ffi.DTYPE_F64, "bfloat16": _ffi.DTYPE_BF16,
    "float8_e4m3fn": _ffi.DTYPE_E4M3FN, "float8_e5m2": _ffi.DTYPE_E5M2, "float8_e4m3fnuz": _ffi.DTYPE_E4M3FNUZ,
    "float8_e5m2fnuz": _ffi.DTYPE_E5M2FNUZ, "float8_e8m0fnu": _ffi.DTYPE_E8M0FNU,
}
_NAMES = {code: name for name, code in CODES.items()}
_NUMPY_HAS = {code for name, code in CODES.items() if name != "bfloat16" and not name.startswith("float8")}


def type_name(code: int) -> str:
    """ "float32"; for a type that has no name here its DLPack numbers."""
    name = _NAMES.get(code)
    return name if name is not None else f"DLPack type {code & 255} of {code >> 8 & 255} bits, {code >> 16} lanes"


_DEVICE_NAMES = {
    _ffi.DEVICE_CPU: "cpu", _ffi.DEVICE_CUDA: "cuda", _ffi.DEVICE_CUDA_HOST: "cuda_host", _ffi.DEVICE_ROCM: "rocm",
    _ffi.DEVICE_ROCM_HOST: "rocm_host", _ffi.DEVICE_EXT: "ext"}


def device_name(device: Tuple[int, int]) -> str:
    """ "cuda:1"; "cpu" and the like for host memory."""
    name = _DEVICE_NAMES.get(device[0], f"device type {device[0]}")
    return name if device[0] in _ffi.HOST_DEVICES else f"{name}:{device[1]}"


class View:
    """Memory as cqsa_tensor describes it. `owner` keeps it alive as long as the view is."""

    __slots__ = ("address", "shape", "strides", "code", "itemsize", "writable", "owner", "device", "borrowed")

    def __init__(self, address: int, shape: Tuple[int, ...], strides: Optional[Tuple[int, ...]], code: int, itemsize: int,
                 writable: bool, owner: Any, device: Tuple[int, int] = CPU, borrowed: bool = False) -> None:
        self.address = address
        self.shape = shape
        self.strides = strides  # in elements; None: compact row-major
        self.code = code  # DLPack's type
        self.itemsize = itemsize
        self.writable = writable
        self.owner = owner
        self.device = device  # DLPack's kind of device and its index
        self.borrowed = borrowed  # of somebody who may give the memory away once he has it back, whatever is queued on it

    def on_host(self) -> bool:
        return self.device[0] in _ffi.HOST_DEVICES

    def pinned(self, device_type: int) -> View:
        """The same host memory, which a driver has page-locked."""
        view = self._with(self.shape, self.strides)
        view.device = (device_type, 0)
        return view

    def span(self) -> Tuple[int, int]:
        """First byte and number of bytes from there to the last element's end; there must be elements."""
        strides = self.strides if self.strides is not None else compact(self.shape)
        reach = [(size - 1) * stride for size, stride in zip(self.shape, strides)]
        first = sum(step for step in reach if step < 0)
        last = sum(step for step in reach if step > 0)
        return self.address + first * self.itemsize, (last - first + 1) * self.itemsize

    def swapped(self) -> View:
        """[batch, seq, heads, ..] as [batch, heads, seq, ..]; fewer than three axes stay."""
        shape = self.shape
        if len(shape) < 3:
            return self
        strides = self.strides
        if strides is None:
            if len(shape) == 4:
                batch, rows, heads, dim = shape
                return self._with((batch, heads, rows, dim), (rows * heads * dim, dim, heads * dim, 1))
            strides = compact(shape)
        return self._with((shape[0], shape[2], shape[1]) + shape[3:], (strides[0], strides[2], strides[1]) + strides[3:])

    def four_axes(self) -> View:
        """Leading axes of size 1 until there are four, as numpy broadcasts."""
        more = 4 - len(self.shape)
        if more <= 0:
            return self
        strides = None if self.strides is None else (0,) * more + self.strides
        return self._with((1,) * more + self.shape, strides)

    def with_axes(self, shape: Tuple[int, ...], strides: Optional[Tuple[int, ...]]) -> View:
        """The same memory with other axes."""
        return self._with(shape, strides)

    def _with(self, shape: Tuple[int, ...], strides: Optional[Tuple[int, ...]]) -> View:
        return View(self.address, shape, strides, self.code, self.itemsize, self.writable, self.owner, self.device, self.borrowed)

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """The same memory as a numpy array; only for host memory of a type that numpy has."""
        if isinstance(self.owner, np.ndarray):
            return self.owner
        if not self.on_host() or self.code not in _NUMPY_HAS:
            raise error_for(ERROR_DTYPE, f"{name} is {type_name(self.code)} on {device_name(self.device)}, which is not "
                            "converted: give the type that the library wants")
        dtype = np.dtype(type_name(self.code))
        if 0 in self.shape:
            return np.empty(self.shape, dtype)
        strides = None if self.strides is None else tuple(stride * self.itemsize for stride in self.strides)
        return np.asarray(_Interface({"shape": self.shape, "typestr": dtype.str, "strides": strides,
                                      "data": (self.address, not self.writable), "version": 3}, self.owner))


class _Interface:
    def __init__(self, interface: Dict[str, Any], owner: Any) -> None:
        self.__array_interface__ = interface
        self.owner = owner


def compact(shape: Sequence[int]) -> Tuple[int, ...]:
    """Strides in elements of a compact row-major array."""
    strides: List[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


# ---------------------------------------------------------------------------------------------------------------------
# numpy
# ---------------------------------------------------------------------------------------------------------------------

# dtype object -> code. Types of ml_dtypes are known by their names when first seen, so ml_dtypes is never imported here.
_numpy_codes: Dict[Any, int] = {
    np.dtype(name): code for name, code in CODES.items() if code in _NUMPY_HAS}
_new_types = {code: dtype for dtype, code in _numpy_codes.items()}
# Two ways to the address that are five to ten times faster than array.ctypes.data: the buffer of an ordinary array, and the
# `data` member (byte 40) of numpy's PyArrayInterface.
_start_of: Any = (ctypes.c_char * 0).from_buffer
_addressof = ctypes.addressof
capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
capsule_pointer.restype, capsule_pointer.argtypes = c_void_p, [ctypes.py_object, ctypes.c_char_p]
_word_at = c_void_p.from_address


def of_numpy(array: np.ndarray[Any, Any], name: str) -> View:
    """A numpy array where it is, whatever its strides."""
    dtype = array.dtype
    code = _numpy_codes.get(dtype)
    if code is None:
        code = _rare_code(dtype, name)
    flags = array.flags
    if flags.carray and code in _NUMPY_HAS:  # compact, aligned, writable, and of a type that buffers have
        return View(_addressof(_start_of(array)), array.shape, None, code, array.itemsize, True, array)
    interface = array.__array_struct__  # holds the struct while it is read
    address = _word_at(capsule_pointer(interface, None) + 40).value or 0
    strides = None if flags.c_contiguous else whole_strides(array.shape, array.strides, array.itemsize, name)
    return View(address, array.shape, strides, code, array.itemsize, flags.writeable, array)


def _rare_code(dtype: Any, name: str) -> int:
    code = CODES.get(dtype.name)
    if code is None or not dtype.isnative:
        raise error_for(ERROR_DTYPE, f"{name} is {dtype.str if dtype.kind in 'iufc' else dtype.name}, wanted "
                        "float32, float16, bfloat16 or float64; k and v also int8, float8_e4m3fn or float8_e5m2")
    _numpy_codes[dtype] = code
    return code


def numpy_type(code: int) -> Any:
    """The dtype of new arrays of a type: ml_dtypes' for bfloat16 and float8 where it is imported, else their bits."""
    known = _new_types.get(code)
    if known is not None:
        return known
    own = getattr(sys.modules.get("ml_dtypes"), type_name(code), None)
    return np.dtype(own if own is not None else np.uint16 if code == _ffi.DTYPE_BF16 else np.uint8)


def whole_strides(shape: Tuple[int, ...], byte_strides: Tuple[int, ...], itemsize: int, name: str) -> Tuple[int, ...]:
    """Strides in elements."""
    strides = []
    for size, stride in zip(shape, byte_strides):
        whole, rest = divmod(stride, itemsize)
        if rest and size > 1:
            raise error_for(ERROR_STRIDES, f"{name} has the byte strides {list(byte_strides)}, wanted multiples of its "
                            f"{itemsize}-byte elements (a field of a record array must be copied first)")
        strides.append(0 if rest else whole)
    return tuple(strides)


def stand_in(shape: Tuple[int, ...], name: str, code: int, slot: int, device: Tuple[int, int] = CPU) -> View:
    """A view of which only shape and type exist, for planning: its memory must not be read. Slots are 8 TiB apart."""
    for size in shape:
        if not 0 <= size < 1 << 63:
            raise error_for(ERROR_SHAPE, f"{name} has the shape {list(shape)}, wanted sizes of at least 0 that fit 63 bits")
    return View(slot << 43, shape, None, code, code >> 11 & 31, True, None, device)


# ---------------------------------------------------------------------------------------------------------------------
# cqsa_tensor records
# ---------------------------------------------------------------------------------------------------------------------

_TENSOR_BYTES = ctypes.sizeof(_ffi.Tensor)
_CHUNK = 2048  # bytes: the records of all operands of a call, if none has more than five axes
_Chunk = ctypes.c_char * _CHUNK


def _layouts(axes: int) -> Tuple[Any, Any, int]:
    """Packers of cqsa_tensor with its shape, and with its shape and strides, behind it; offset of the strides."""
    compact_into, strided_into = (struct.Struct(f"@PiiiiPPQ{count}q").pack_into for count in (axes, 2 * axes))
    return compact_into, strided_into, _TENSOR_BYTES + 8 * axes


_by_axes = [_layouts(axes) for axes in range(6)]


class Records:
    """cqsa_tensor records of one call, and what they point to."""

    __slots__ = ("_chunk", "_address", "_used", "_keep")

    def __init__(self) -> None:
        self._chunk = chunk = _Chunk()
        self._address = _addressof(chunk)
        self._used = 0
        self._keep: List[Any] = []

    def add(self, view: View, code: int) -> int:
        """Address of a cqsa_tensor of `view`, valid as long as this object is."""
        shape, strides, device = view.shape, view.strides, view.device
        axes = len(shape)
        compact_into, strided_into, strides_at = _by_axes[axes] if axes < 6 else _layouts(axes)
        at = self._used
        if at + strides_at + 8 * axes > _CHUNK:
            self._next_chunk(strides_at + 8 * axes)
            at = 0
        address = self._address + at
        if strides is None:
            compact_into(self._chunk, at, view.address, device[0], device[1], axes, code, address + _TENSOR_BYTES, 0, 0, *shape)
            self._used = at + strides_at
        else:
            strided_into(self._chunk, at, view.address, device[0], device[1], axes, code, address + _TENSOR_BYTES,
                         address + strides_at, 0, *shape, *strides)
            self._used = at + strides_at + 8 * axes
        self._keep.append(view)
        return address

    def views(self) -> List[View]:
        return [kept for kept in self._keep if type(kept) is View]

    def release(self) -> Any:
        """Lets go of the memory that the records describe. Their own, or None when it is in several pieces."""
        pieces = len(self._keep) - len(self.views())
        self._keep = self._keep if pieces else []
        return None if pieces else self._chunk

    def _next_chunk(self, least: int) -> None:
        self._keep.append(self._chunk)
        self._chunk = (ctypes.c_char * max(_CHUNK, least))()
        self._address, self._used = _addressof(self._chunk), 0
