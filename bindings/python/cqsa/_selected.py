# SPDX-License-Identifier: Apache-2.0
"""attention_selected(): each query attends to the cells of a paged cache that its list names."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Optional

import numpy as np

from . import _arrays, _ffi, _torch
from ._errors import ERROR_DTYPE, ERROR_INDEX, ERROR_INVALID_ARGUMENT, ERROR_SHAPE, error_for
from ._jax import DeviceMemory
from ._queue import Queue, Target, choose_in_place
from ._sources import device_of, new_like, output_of, view_of
from ._views import Records, View, of_numpy, type_name

if TYPE_CHECKING:
    from ._arrays import DtypeName
    from ._sources import Operand


def attention_selected(
    q: Operand,
    k: Operand,
    v: Operand,
    page_table: Operand,
    cells: Operand,
    counts: Operand,
    *,
    softmax_scale: Optional[float] = None,
    precision: str = "default",
    k_scale: Optional[Operand] = None,
    v_scale: Optional[Operand] = None,
    kv_group: Optional[int] = None,
    check: bool = False,
    dtype: DtypeName = None,
    out: Any = None,
    return_lse: bool = False,
    backend: str = "auto",
    stream: Any = None,
) -> Any:
    """Exact attention of each query over the cells ``cells[i, :counts[i]]`` of its sequence, and over nothing else.

    q: float32, float16 or bfloat16 ``[total_q, num_heads, head_dim]``.
    k, v: pools ``[num_pages, page_size, num_kv_heads, head_dim | head_dim_v]`` of q's type, float16 or int8, any strides.
    page_table: int32 ``[pages]`` for all queries, or ``[total_q, pages]``: page ids, -1 for a page that is not there.
    cells: int32 ``[total_q, capacity]``, ascending: cell c lies in row ``c % page_size`` of page ``page_table[.., c // page_size]``.
    counts: int32 ``[total_q]``. All three may be lists or other integers, which are converted.
    softmax_scale: None is ``1/sqrt(head_dim)``.
    precision: "default", "fast", "split" or "f32", the least that is wanted of the products; see docs/selected.md.
    k_scale, v_scale: int8: float16 ``[num_pages, page_size, num_kv_heads, ceil(head_dim / kv_group)]``.
    kv_group: int8: channels that share a scale, 32, 64 (None) or 128.
    check: raise for lists that are wrong, instead of skipping what is wrong in them; on a device this waits.
    dtype: what the bits of uint16 arrays are, as in attention().
    out: array to write, or ``(out, lse)`` with return_lse; None makes one of q's type. return_lse: also return ``ln(sum(exp(s)))``,
        float32 ``[num_heads, total_q]``; a query without cells has out 0 and lse -inf.
    stream: as in attention(); on a device the work is queued.
    """
    if return_lse and out is not None and not (isinstance(out, tuple) and len(out) == 2):
        raise error_for(ERROR_INVALID_ARGUMENT, "out is one array, wanted (out, lse) because of return_lse")
    given, given_lse = out if return_lse and out is not None else (out, None)
    target = choose_in_place(backend, stream, ("q", q), ("k", k), ("v", v), ("cells", cells), ("counts", counts), ("page_table", page_table),
                    ("out", given))
    call = _Call(target, _arrays.dtype_names(dtype))
    call.numbers(softmax_scale, precision, kv_group, check)
    rows, values = call.input("q", q), call.input("v", v)
    call.input("k", k)
    if k_scale is not None:
        call.input("k_scale", k_scale)
    if v_scale is not None:
        call.input("v_scale", v_scale)
    call.lists(page_table, cells, counts)
    if len(rows.shape) != 3 or len(values.shape) != 4:
        raise error_for(ERROR_SHAPE, f"q has shape {list(rows.shape)} and v {list(values.shape)}, wanted three axes and four")
    made = new_like(rows, (*rows.shape[:2], values.shape[3])) if given is None else given
    call.output("out", made, call.code_of_q if given is None else None)
    lse = given_lse
    if return_lse:
        lse = new_like(rows, (rows.shape[1], rows.shape[0]), _ffi.DTYPE_F32) if given_lse is None else given_lse
        call.output("lse", lse, None)
    call.run()
    for written in (given, given_lse):
        if _torch.is_tensor(written):
            _torch.was_written(written)
    results = tuple(one.to_jax() if type(one) is DeviceMemory else one for one in (made, lse))
    return results if return_lse else results[0]


class _Call:
    """The cqsa_attention_selected_args of one call."""

    def __init__(self, target: Target, names: _arrays.Names) -> None:
        self._target, self._names, self._records = target, names, Records()
        self._args = _ffi.SelectedArgs(ctypes.sizeof(_ffi.SelectedArgs))
        self.code_of_q = 0

    def numbers(self, softmax_scale: Optional[float], precision: str, kv_group: Optional[int], check: bool) -> None:
        if precision not in _ffi.PRECISIONS:
            raise error_for(ERROR_INVALID_ARGUMENT, f"precision is {precision!r}, wanted one of {', '.join(map(repr, _ffi.PRECISIONS))}")
        self._args.precision = _ffi.PRECISIONS.index(precision)
        self._args.softmax_scale = 0.0 if softmax_scale is None else _scale(softmax_scale)
        self._args.flags = _ffi.SELECTED_CHECK if check else 0
        if kv_group is not None:
            group = _arrays.integer(kv_group, "kv_group")
            if group not in (32, 64, 128):
                raise error_for(ERROR_INVALID_ARGUMENT, f"kv_group is {group}, wanted 32, 64 or 128")
            self._args.kv_group = group

    def input(self, name: str, operand: Any) -> View:
        view = view_of(operand, name, self._target.queue)
        code = _arrays.float_code(view, name, self._names)
        if name == "q":
            self.code_of_q = code
        setattr(self._args, name, self._records.add(view, code))
        return view

    def lists(self, page_table: Any, cells: Any, counts: Any) -> None:
        side = self._target.queue
        for name, values in (("page_table", page_table), ("cells", cells), ("counts", counts)):
            view = _int32(values, name, side)
            setattr(self._args, name, self._records.add(view, view.code))

    def output(self, name: str, array: Any, code: Optional[int]) -> None:
        view = output_of(array, name, self._target.queue)
        setattr(self._args, name, self._records.add(view, _arrays.float_code(view, name, self._names) if code is None else code))

    def run(self) -> None:
        queue = self._target.queue
        try:
            memory = self._memory_of_graph(queue) if queue is not None and queue.is_captured() else None
            _ffi.check(_ffi.library().cqsa_attention_selected(self._target.context.handle, self._args, self._target.stream))
            del memory
        finally:
            if queue is not None:
                queue.finish()

    def _memory_of_graph(self, queue: Queue) -> Any:
        """While a graph is captured the library allocates nothing; the memory must be the graph's own."""
        size = ctypes.c_uint64(0)
        _ffi.check(_ffi.library().cqsa_attention_selected_workspace(self._target.context.handle, self._args, ctypes.byref(size)))
        memory = queue.new_workspace(size.value) if size.value else None
        if memory is not None:
            self._args.workspace, self._args.workspace_bytes = memory.data_ptr(), size.value
        return memory


def _scale(value: Any) -> float:
    scale = _arrays.number(value, "softmax_scale")
    if scale == 0:
        raise error_for(ERROR_INVALID_ARGUMENT, "softmax_scale is 0, wanted another number, or None for 1/sqrt(head_dim)")
    return scale


def _int32(values: Any, name: str, side: Optional[Queue]) -> View:
    """A list as i32; wider integers are converted when they fit, which is not looked at on a device."""
    if side is not None and device_of(values) is not None:
        view = view_of(values, name, side)
        return view if view.code == _ffi.DTYPE_I32 else view_of(side.converted(values, "int32", name), name, side)
    view = view_of(values, name)
    if view.code != _ffi.DTYPE_I32:
        array = view.array(name)
        if array.dtype.kind not in "iu" and array.size != 0:
            raise error_for(ERROR_DTYPE, f"{name} is {type_name(view.code)}, wanted int32")
        if array.size and (array.min() < -1 << 31 or array.max() >= 1 << 31):
            raise error_for(ERROR_INDEX, f"{name} has {array.min() if array.min() < -1 << 31 else array.max()}, which is no int32")
        view = of_numpy(array.astype(np.int32), name)
    if side is None:
        return view
    return view_of(side.converted(np.array(view.array(name), order="C"), "int32", name), name, side)
