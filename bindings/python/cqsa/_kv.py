# SPDX-License-Identifier: Apache-2.0
"""Key-value caches: kv_append(), kv_gather(), and the rotation hadamard()."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Optional, Tuple

from . import _arrays, _ffi, _torch
from ._errors import ERROR_DTYPE, ERROR_INVALID_ARGUMENT, ERROR_SHAPE, error_for
from ._jax import DeviceMemory
from ._queue import Target, choose_in_place
from ._sources import new_like, output_of, view_of
from ._views import Records, View, type_name

if TYPE_CHECKING:
    from ._arrays import DtypeName
    from ._sources import Operand

_BLOCK, _BLOCK_BYTES = 32, 18  # of q4_0


def kv_append(
    x: Operand,
    pool: Any,
    page_table: Operand,
    cells: Operand,
    *,
    scale: Any = None,
    format: str = "elements",
    kv_group: Optional[int] = None,
    dtype: DtypeName = None,
    backend: str = "auto",
    stream: Any = None,
) -> None:
    """Writes rows of keys or values into a paged cache, in place.

    x: float32, float16 or bfloat16 ``[rows, num_kv_heads, head_dim]``.
    pool: ``[num_pages, page_size, num_kv_heads, head_dim]``, float32, float16, bfloat16, or int8 with `scale`; with format="q4_0"
        uint8 ``[num_pages, page_size, num_kv_heads, head_dim // 32 * 18]``, of rotated rows. Any strides.
    page_table: ``[pages]`` for all rows, or ``[rows, pages]``: page ids, -1 for none.
    cells: ``[rows]``: row n goes to cell cells[n] of its sequence, row ``cells[n] % page_size`` of page
        ``page_table[.., cells[n] // page_size]``. Rows whose cell has no place in the pool are left out.
    scale: int8: float16 ``[num_pages, page_size, num_kv_heads, ceil(head_dim / kv_group)]``, written too.
    kv_group: int8: channels that share a scale, 32, 64 (None) or 128.
    dtype: what the bits of uint16 arrays are, as in attention().
    stream: as in attention(); on a device the work is queued.
    """
    target = choose_in_place(backend, stream, ("pool", pool), ("x", x), ("cells", cells), ("page_table", page_table))
    names = _arrays.dtype_names(dtype)
    rows = view_of(x, "x", target.queue)
    call = _Call(target, names, format, kv_group)
    call.operand("x", rows)
    call.pool(output_of(pool, "pool", target.queue))
    if scale is not None:
        call.operand("scale", output_of(scale, "scale", target.queue))
    call.places(page_table, cells)
    call.run(_ffi.library().cqsa_kv_append)
    _tell_written(pool, scale)


def kv_gather(
    pool: Operand,
    page_table: Operand,
    cells: Operand,
    *,
    scale: Optional[Operand] = None,
    format: str = "elements",
    kv_group: Optional[int] = None,
    dtype: DtypeName = None,
    out: Any = None,
    backend: str = "auto",
    stream: Any = None,
) -> Any:
    """Reads rows back from a paged cache: ``[rows, num_kv_heads, head_dim]``, zeros where a cell has no place in the pool.

    Arguments as in kv_append(). out: array to write, float32, float16 or bfloat16; None makes one of the pool's type, float32 for
    int8 and q4_0. Rows of a q4_0 cache come back rotated: hadamard() turns them.
    """
    target = choose_in_place(backend, stream, ("pool", pool), ("out", out), ("cells", cells), ("page_table", page_table))
    call = _Call(target, _arrays.dtype_names(dtype), format, kv_group)
    cache = view_of(pool, "pool", target.queue)
    call.pool(cache)
    if scale is not None:
        call.operand("scale", view_of(scale, "scale", target.queue))
    rows = call.places(page_table, cells)
    made = new_like(cache, call.shape_of(cache, rows), call.result_code) if out is None else out
    call.operand("x", output_of(made, "out", target.queue), _arrays.code_of("bfloat16") if out is None and call.is_named_bfloat16 else None)
    call.run(_ffi.library().cqsa_kv_gather)
    if out is not None:
        _tell_written(out)
    return made.to_jax() if type(made) is DeviceMemory else made


def hadamard(x: Operand, *, out: Any = None, dtype: DtypeName = None, backend: str = "auto", stream: Any = None) -> Any:
    """``x @ H`` along the last axis, ``H[a, b] = (-1)**popcount(a & b) / sqrt(n)``: orthonormal, and its own inverse.

    x: float32, float16 or bfloat16, 1 to 4 axes, the last of a power of two up to 4096. out: array to write, which may be x itself; None
    makes one like x. Sums in float32.
    """
    target = choose_in_place(backend, stream, ("x", x), ("out", out))
    names = _arrays.dtype_names(dtype)
    view = view_of(x, "x", target.queue)
    made = new_like(view, view.shape) if out is None else out
    to = output_of(made, "out", target.queue)
    records = Records()
    operands = [records.add(one, _arrays.float_code(one, name, names)) for one, name in ((view, "x"), (to, "out"))]
    try:
        _ffi.check(_ffi.library().cqsa_hadamard(target.context.handle, *operands, target.stream))
    finally:
        if target.queue is not None:
            target.queue.finish()
    if out is not None:
        _tell_written(out)
    return made.to_jax() if type(made) is DeviceMemory else made


class _Call:
    """The cqsa_kv_args of one call."""

    def __init__(self, target: Target, names: _arrays.Names, format: str, kv_group: Optional[int]) -> None:
        if format not in _ffi.KV_FORMATS:
            raise error_for(ERROR_INVALID_ARGUMENT, f"format is {format!r}, wanted one of {', '.join(map(repr, _ffi.KV_FORMATS))}")
        self._target, self._names, self._records = target, names, Records()
        self._args = _ffi.KvArgs(ctypes.sizeof(_ffi.KvArgs))
        self._args.format = _ffi.KV_FORMATS.index(format)
        if kv_group is not None:
            group = _arrays.integer(kv_group, "kv_group")
            if group not in (32, 64, 128):
                raise error_for(ERROR_INVALID_ARGUMENT, f"kv_group is {group}, wanted 32, 64 or 128")
            self._args.kv_group = group
        self.result_code: Optional[int] = None  # None: the pool's own
        self.is_named_bfloat16 = False

    @property
    def is_q4(self) -> bool:
        return bool(self._args.format)

    def operand(self, name: str, view: View, code: Optional[int] = None) -> None:
        if code is None:
            code = _arrays.float_code(view, name, self._names)
        setattr(self._args, name, self._records.add(view, code))

    def pool(self, view: View) -> None:
        if self.is_q4:
            if view.code != _ffi.DTYPE_U8:
                raise error_for(ERROR_DTYPE, f"pool is {type_name(view.code)}, wanted uint8 for format='q4_0'")
            self.result_code = _ffi.DTYPE_F32
            self.operand("pool", view, view.code)
            return
        code = _arrays.float_code(view, "pool", self._names)
        self.is_named_bfloat16 = code == _ffi.DTYPE_BF16 and view.code != code
        self.result_code = _ffi.DTYPE_F32 if code == _ffi.DTYPE_I8 else None
        self.operand("pool", view, code)

    def places(self, page_table: Any, cells: Any) -> View:
        """page_table and cells, which are converted where they are lists or of other integer types. Returns cells."""
        side = self._target.queue
        table, places = _arrays.page_ids(page_table, side), _arrays.small_integers(cells, "cells", side)
        self.operand("page_table", table, table.code)
        self.operand("cells", places, places.code)
        return places

    def shape_of(self, cache: View, cells: View) -> Tuple[int, ...]:
        if len(cache.shape) != 4 or len(cells.shape) != 1:
            raise error_for(ERROR_SHAPE, f"pool has shape {list(cache.shape)} and cells {list(cells.shape)}, wanted four axes and one")
        last = cache.shape[3] // _BLOCK_BYTES * _BLOCK if self.is_q4 else cache.shape[3]
        return cells.shape[0], cache.shape[2], last

    def run(self, function: Any) -> None:
        try:
            _ffi.check(function(self._target.context.handle, self._args, self._target.stream))
        finally:
            if self._target.queue is not None:
                self._target.queue.finish()


def _tell_written(*arrays: Any) -> None:
    for written in arrays:
        if _torch.is_tensor(written):
            _torch.was_written(written)
