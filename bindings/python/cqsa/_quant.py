# SPDX-License-Identifier: Apache-2.0
"""Quantized matrices: QuantTensor, quantize_rows(), dequantize_rows(), and GGUF files as Gguf."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from . import _arrays, _cupy, _ffi, _torch
from ._errors import ERROR_DEVICE, ERROR_DTYPE, ERROR_INVALID_ARGUMENT, ERROR_SHAPE, CqsaValueError, error_for
from ._jax import DeviceMemory
from ._queue import choose_in_place
from ._sources import new_like, output_of, view_of
from ._views import BITS_8, CPU, Records, View, compact, device_name, type_name

if TYPE_CHECKING:
    from ._sources import Operand


class QuantFormat(NamedTuple):
    """A format of blocks."""

    name: str
    id: int  # CQSA_QUANT_*
    ggml_type: int  # its id in a GGUF file
    block_elements: int
    block_bytes: int
    can_quantize: bool


_formats: Dict[str, QuantFormat] = {}


def quant_formats() -> Dict[str, QuantFormat]:
    """The formats that this library reads, by name."""
    if not _formats:
        library, info = _ffi.library(), _ffi.QuantFormatInfo(ctypes.sizeof(_ffi.QuantFormatInfo))
        found: Dict[str, QuantFormat] = {}
        while library.cqsa_quant_format_query(len(found) + 1, ctypes.byref(info)) == _ffi.OK:
            name = info.name.decode()
            found[name] = QuantFormat(name, len(found) + 1, info.ggml_type, info.block_elements, info.block_bytes, bool(info.can_quantize))
        _formats.update(found)
    return dict(_formats)


def _format_of(name: Any) -> QuantFormat:
    found = (_formats or quant_formats()).get(name) if isinstance(name, str) else None
    if found is None:
        raise error_for(ERROR_INVALID_ARGUMENT, f"format is {name!r}, wanted one of {', '.join(_formats)}")
    return found


class QuantTensor:
    """A matrix of quantized blocks, or one for each of several experts, in memory that somebody owns: nothing is copied. On a device too.

    data: uint8 (or bytes). Two axes: rows of blocks, any stride between them; one axis: the rows one after the other; three axes:
        `[experts, rows, bytes of a row]`.
    format: "Q4_K", "IQ2_XXS", ..: see quant_formats().
    rows, cols: sizes in elements. Where they are left out they follow from the shape of data.
    """

    __slots__ = ("_view", "_format", "_experts", "_rows", "_cols")

    def __init__(self, data: Any, format: str = "", rows: Optional[int] = None, cols: Optional[int] = None) -> None:
        self._format = _format_of(format)
        view = _bytes_of(data)
        self._cols = _columns(view, self._format, rows, cols)
        own = self._cols // self._format.block_elements * self._format.block_bytes
        self._view = _rows_of(view, own, rows, self._format.name)
        self._experts = self._view.shape[0] if len(self._view.shape) == 3 else None
        self._rows = self._view.shape[-2]
        if rows is not None and _arrays.integer(rows, "rows") != self._rows:
            raise error_for(ERROR_SHAPE, f"data has shape {list(view.shape)}, which is {self._rows} rows, but rows is {rows}")

    @property
    def format(self) -> str:
        """Name of the format."""
        return self._format.name

    @property
    def rows(self) -> int:
        """Rows of an expert."""
        return self._rows

    @property
    def cols(self) -> int:
        """Elements of a row."""
        return self._cols

    @property
    def experts(self) -> Optional[int]:
        """How many matrices there are, None without an axis of experts."""
        return self._experts

    @property
    def shape(self) -> Tuple[int, ...]:
        """In elements: (rows, cols) or (experts, rows, cols)."""
        return self._view.shape[:-1] + (self._cols,)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        sizes = self._view.shape
        return int(np.prod(sizes, dtype=np.int64))

    @property
    def data(self) -> np.ndarray[Any, Any]:
        """The blocks as a read-only uint8 array in the same memory; only for host memory."""
        if not self._view.on_host():
            raise error_for(ERROR_DEVICE, f"data is on {device_name(self._view.device)}, wanted host memory")
        return np.asarray(_Bytes(self._view)) if self.nbytes else np.empty(self._view.shape, np.uint8)

    def __len__(self) -> int:
        return self._view.shape[0]

    def __getitem__(self, expert: int) -> QuantTensor:
        """One of the experts."""
        if self._experts is None:
            raise error_for(ERROR_SHAPE, "this QuantTensor has no axis of experts")
        index = _arrays.integer(expert, "expert")
        if not -self._experts <= index < self._experts:
            raise IndexError(f"expert is {index}, and there are {self._experts}")
        strides = _strides(self._view)
        made: QuantTensor = object.__new__(QuantTensor)
        made._format, made._cols, made._rows, made._experts = self._format, self._cols, self._rows, None
        made._view = _sub_view(self._view, self._view.address + index % self._experts * strides[0], self._view.shape[1:], strides[1:])
        return made

    def __iter__(self) -> Iterator[QuantTensor]:
        return (self[expert] for expert in range(self._experts or 0))

    def dequantize(self, dtype: Any = "float32", *, backend: str = "auto", stream: Any = None) -> Any:
        """All values, of shape `shape`. dtype: "float32", "float16" or "bfloat16"."""
        if self._experts is None:
            return dequantize_rows(self, dtype=dtype, backend=backend, stream=stream)
        out = new_like(self._view, self.shape, _code_of(dtype))
        for expert in range(self._experts):
            dequantize_rows(self[expert], out=out[expert], dtype=dtype, backend=backend, stream=stream)
        return out

    def _record(self) -> _ffi.QuantTensor:
        """cqsa_quant_tensor of a matrix without an axis of experts."""
        view = self._view
        return _ffi.QuantTensor(ctypes.sizeof(_ffi.QuantTensor), 0, self._format.id, view.device[0], view.device[1], 0, view.address, self._rows,
                                self._cols, _strides(view)[0], 0)

    def __repr__(self) -> str:
        return f"<cqsa.QuantTensor {self.format} {list(self.shape)}>"


def dequantize_rows(w: QuantTensor, rows: Union[None, slice, Operand] = None, *, dtype: Any = "float32", out: Any = None,
                    backend: str = "auto", stream: Any = None) -> Any:
    """The values of rows of a matrix: `[n, cols]`.

    rows: None for all, a slice of step 1, or a list or array of row numbers, in any order. dtype: "float32", "float16" or "bfloat16", of
    a new result; with `out` what the bits of a uint16 array are. out: array to write, any strides.
    """
    if w.experts is not None:
        raise error_for(ERROR_SHAPE, f"w has {w.experts} experts: dequantize_rows(w[expert], ..)")
    target = choose_in_place(backend, stream, ("w", _lender(w._view)), ("out", out))
    view = view_of(w._view, "w", target.queue)
    first, count, ids = _wanted_rows(rows, w.rows, target.queue)
    records = Records()
    code = _code_of(dtype)
    made = new_like(view, (count, w.cols), code) if out is None else out
    to = output_of(made, "out", target.queue)
    to_record = records.add(to, code if out is None else _arrays.float_code(to, "out", _arrays.dtype_names(None if dtype == "float32" else dtype)))
    try:
        _ffi.check(_ffi.library().cqsa_dequantize_rows(target.context.handle, w._record(), first, records.add(ids, ids.code) if ids is not None else None,
                                                       to_record, target.stream))
    finally:
        if target.queue is not None:
            target.queue.finish()
    if out is not None and _torch.is_tensor(out):
        _torch.was_written(out)
    return made.to_jax() if type(made) is DeviceMemory else made


def quantize_rows(array: Operand, format: str, *, dtype: Any = None, backend: str = "auto", stream: Any = None) -> QuantTensor:
    """A QuantTensor of float32, float16 or bfloat16 `[rows, cols]`, or `[experts, rows, cols]`.

    format: "Q8_0", "Q4_0", "Q2_0", "IQ4_NL", "MXFP4", "F32", "F16", "BF16". dtype: what the bits of a uint16 array are, as in attention().
    """
    chosen = _format_of(format)
    target = choose_in_place(backend, stream, ("array", array))
    view = view_of(array, "array", target.queue)
    code = _arrays.float_code(view, "array", _arrays.dtype_names(dtype))
    if len(view.shape) not in (2, 3):
        raise error_for(ERROR_SHAPE, f"array has shape {list(view.shape)}, wanted [rows, cols] or [experts, rows, cols]")
    if view.shape[-1] % chosen.block_elements:
        raise error_for(ERROR_SHAPE, f"array has {view.shape[-1]} columns, wanted a multiple of {chosen.block_elements}, the block of {format}")
    own = view.shape[-1] // chosen.block_elements * chosen.block_bytes
    blocks = QuantTensor(new_like(view, view.shape[:-1] + (own,), _ffi.DTYPE_U8), format, cols=view.shape[-1])
    strides, records = _strides(view), Records()
    try:
        for expert in range(blocks.experts if blocks.experts is not None else 1):
            one, matrix = (view, blocks) if blocks.experts is None else (
                _sub_view(view, view.address + expert * strides[0] * view.itemsize, view.shape[1:], strides[1:]), blocks[expert])
            _ffi.check(_ffi.library().cqsa_quantize_rows(target.context.handle, records.add(one, code), matrix._record(), target.stream))
    finally:
        if target.queue is not None:
            target.queue.finish()
    return blocks


# ---------------------------------------------------------------------------------------------------------------------
# Shapes
# ---------------------------------------------------------------------------------------------------------------------


def _bytes_of(data: Any) -> View:
    view = view_of(np.frombuffer(data, np.uint8) if isinstance(data, (bytes, bytearray)) else data, "data")
    if view.code != BITS_8:
        raise error_for(ERROR_DTYPE, f"data is {type_name(view.code)}, wanted uint8")
    if not 1 <= len(view.shape) <= 3:
        raise error_for(ERROR_SHAPE, f"data has shape {list(view.shape)}, wanted 1, 2 or 3 axes of bytes")
    return view


def _columns(view: View, format: QuantFormat, rows: Any, cols: Any) -> int:
    """Elements of a row: as stated, or as many as the bytes of a row hold."""
    if cols is not None:
        count = _arrays.integer(cols, "cols")
        if count < 0 or count % format.block_elements:
            raise error_for(ERROR_SHAPE, f"cols is {count}, wanted a multiple of {format.block_elements}, the block of {format.name}")
        return count
    own = view.shape[-1]
    if len(view.shape) == 1:
        if rows is None:
            raise error_for(ERROR_INVALID_ARGUMENT, "data has one axis: rows or cols must be given")
        count = _arrays.integer(rows, "rows")
        if count < 1 or own % count:
            raise error_for(ERROR_SHAPE, f"data has {own} bytes, which is not {count} rows")
        own //= count
    if own % format.block_bytes:
        raise error_for(ERROR_SHAPE, f"data has rows of {own} bytes, wanted a multiple of {format.block_bytes}, the block of {format.name}")
    return own // format.block_bytes * format.block_elements


def _rows_of(view: View, own: int, rows: Any, format: str) -> View:
    """The same memory as [rows, own] or [experts, rows, own], rows compact."""
    if len(view.shape) == 1:
        count = _arrays.integer(rows, "rows") if rows is not None else view.shape[0] // own if own else 0
        if count < 0 or view.shape[0] != count * own:
            raise error_for(ERROR_SHAPE, f"data has {view.shape[0]} bytes, wanted {max(count, 0) * own}: {count} rows of {own} bytes of {format}")
        return _sub_view(view, view.address, (count, own), (own, 1)) if view.strides is None else _not_compact(view)
    if view.shape[-1] != own:
        raise error_for(ERROR_SHAPE, f"data has rows of {view.shape[-1]} bytes, wanted {own} bytes of {format}")
    if view.strides is None or 0 in view.shape:
        return _sub_view(view, view.address, view.shape, compact(view.shape))
    return view if view.strides[-1] == 1 and view.strides[-2] >= own else _not_compact(view)


def _lender(view: View) -> Any:
    """Whose current stream is meant."""
    return view.owner if _torch.is_tensor(view.owner) or _cupy.is_array(view.owner) else view


def _not_compact(view: View) -> View:
    raise error_for(ERROR_SHAPE, f"data has strides {list(view.strides or ())}, wanted rows whose bytes lie one after the other")


def _strides(view: View) -> Tuple[int, ...]:
    return view.strides if view.strides is not None else compact(view.shape)


def _sub_view(view: View, address: int, shape: Tuple[int, ...], strides: Sequence[int]) -> View:
    return View(address, tuple(shape), tuple(strides), view.code, view.itemsize, view.writable, view.owner, view.device, view.borrowed)


class _Bytes:
    """Host memory of a view, for numpy."""

    def __init__(self, view: View) -> None:
        self.owner = view.owner
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": view.shape, "strides": _strides(view), "data": (view.address, True)}


def _code_of(dtype: Any) -> int:
    names = _arrays.named_types(dtype)
    if len(names) != 1 or names[0] not in ("float32", "float16", "bfloat16"):
        raise error_for(ERROR_DTYPE, f"dtype is {dtype!r}, wanted 'float32', 'float16' or 'bfloat16'")
    return _arrays.code_of(names[0])


def _wanted_rows(rows: Any, total: int, side: Any) -> Tuple[int, int, Optional[View]]:
    """First row and how many, or the numbers of rows."""
    if rows is None:
        return 0, total, None
    if isinstance(rows, slice):
        first, stop, step = rows.indices(total)
        if step != 1:
            raise error_for(ERROR_INVALID_ARGUMENT, f"rows has the step {step}, wanted 1: give the numbers of the rows as an array")
        return first, max(0, stop - first), None
    ids = _arrays.small_integers(rows, "rows", side)
    if len(ids.shape) != 1:
        raise error_for(ERROR_SHAPE, f"rows has shape {list(ids.shape)}, wanted one axis")
    return 0, ids.shape[0], ids


# ---------------------------------------------------------------------------------------------------------------------
# GGUF
# ---------------------------------------------------------------------------------------------------------------------


class GgufTensor(NamedTuple):
    """What a GGUF file says of a tensor."""

    name: str
    shape: Tuple[int, ...]  # slowest axis first
    format: Optional[str]  # None: a type that this version does not know
    ggml_type: int
    nbytes: int
    file_offset: int


class _File:
    """The mapped file, as long as somebody sees a part of it."""

    def __init__(self, path: str) -> None:
        handle = ctypes.c_void_p()
        self._close = _ffi.library().cqsa_gguf_close
        _ffi.check(_ffi.library().cqsa_gguf_open(os.fsencode(path), ctypes.byref(handle)))
        self.handle = handle

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._close(self.handle)


class Gguf:
    """A GGUF file, mapped and checked; its tensors are views of it, and keep it open.

    names: of its tensors, in the order of the file. tensors: {name: GgufTensor}. metadata: {key: int, float or text}; arrays are left out.
    """

    def __init__(self, path: Union[str, "os.PathLike[str]"]) -> None:
        self._file = _File(os.fspath(path))
        self.tensors: Dict[str, GgufTensor] = {}
        library, names = _ffi.library(), [format.name for format in quant_formats().values()]
        info = _ffi.GgufTensorInfo(ctypes.sizeof(_ffi.GgufTensorInfo))
        for index in range(library.cqsa_gguf_tensor_count(self._file.handle)):
            _ffi.check(library.cqsa_gguf_tensor(self._file.handle, index, ctypes.byref(info)))
            name = info.name.decode("utf-8", "replace")
            self.tensors[name] = GgufTensor(name, tuple(info.shape[:info.ndim]), names[info.format - 1] if info.format else None, info.ggml_type,
                                            info.bytes, info.file_offset)
        self.metadata = self._metadata()

    @property
    def names(self) -> List[str]:
        """Names of the tensors, in the order of the file."""
        return list(self.tensors)

    def tensor(self, name: str) -> QuantTensor:
        """A tensor where it is in the file: of one axis as one row; of three axes with an axis of experts."""
        return self._matrices(name)[0]

    def experts(self, name: str) -> List[QuantTensor]:
        """The experts of a tensor of three axes, "blk.0.ffn_gate_exps.weight", each a view of the file."""
        return self._matrices(name)[1]

    def _matrices(self, name: str) -> Tuple[QuantTensor, List[QuantTensor]]:
        library, index, record = _ffi.library(), ctypes.c_int64(), _ffi.QuantTensor(ctypes.sizeof(_ffi.QuantTensor))
        _ffi.check(library.cqsa_gguf_find(self._file.handle, name.encode(), ctypes.byref(index)))
        shape = self.tensors[name].shape
        if len(shape) == 3 and shape[0] == 0:
            raise error_for(ERROR_SHAPE, f"{name} has no experts")
        _ffi.check(library.cqsa_gguf_matrix(self._file.handle, index, 0, ctypes.byref(record)))
        format = self.tensors[name].format or ""
        one = record.data_bytes // record.rows if record.rows else 0
        sizes: Tuple[int, ...] = (record.rows, one) if len(shape) < 3 else (shape[0], record.rows, one)
        whole = QuantTensor(View(record.data or 0, sizes, None, BITS_8, 1, False, self._file, CPU), format, cols=record.row_elements)
        return whole, list(whole) if whole.experts is not None else [whole]

    def _metadata(self) -> Dict[str, Union[int, float, str]]:
        library, file = _ffi.library(), self._file.handle
        found: Dict[str, Union[int, float, str]] = {}
        for index in range(library.cqsa_gguf_key_count(file)):
            key = library.cqsa_gguf_key(file, index)
            value = _value_of(library, file, key)
            if value is not None:
                found[key.decode("utf-8", "replace")] = value
        return found

    def __enter__(self) -> Gguf:
        return self

    def __exit__(self, *_error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the file, which stays mapped as long as a tensor of it is held."""
        self.tensors, self.metadata = {}, {}
        del self._file

    def __repr__(self) -> str:
        return f"<cqsa.Gguf of {len(self.tensors)} tensors>"


def _value_of(library: Any, file: Any, key: bytes) -> Union[int, float, str, None]:
    whole, number = ctypes.c_int64(), ctypes.c_double()
    if library.cqsa_gguf_integer(file, key, ctypes.byref(whole)) == _ffi.OK:
        return whole.value
    if library.cqsa_gguf_number(file, key, ctypes.byref(number)) == _ffi.OK:
        return number.value
    try:
        return _ffi.text_of(library.cqsa_gguf_text, file, key)
    except CqsaValueError:
        return None
