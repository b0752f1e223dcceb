# SPDX-License-Identifier: Apache-2.0
"""attention(), attention_merge() and what attention_plan() shares with them."""

from __future__ import annotations

import ctypes
from math import prod
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple, Union

from . import _arrays, _call, _driver, _ffi, _repeat, _torch
from ._context import context_for
from ._errors import ERROR_DEVICE, ERROR_INVALID_ARGUMENT, error_for
from ._jax import DeviceMemory
from ._plan import plan_handle, plan_line, plan_numbers, run_numbers
from ._queue import Queue, Target, choose, choose_in_place
from ._sources import new_like, output_of, view_of
from ._views import Records, View, device_name

if TYPE_CHECKING:
    from ._arrays import DtypeName
    from ._call import Progress
    from ._sources import Operand

_ARGS_BYTES = ctypes.sizeof(_ffi.AttentionArgs)
_PARAMS_BYTES = ctypes.sizeof(_ffi.AttentionParams)
_DEVICE_TYPE_AT = _ffi.Tensor.device_type.offset

# Operands that the library takes from one place, the one of the first: on the device, or all in host memory.
_GROUPS = (
    ("q", "mask", "bias", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table"),
    ("k", "v", "k_scale", "v_scale"),
    ("out", "lse"),
)
# How many times as much a device computes in the time of a thread that keeps Ctrl-C alive.
_DEVICE_SPEED = 1 << 10


def attention(
    q: Operand,
    k: Operand,
    v: Operand,
    *,
    causal: str = "none",
    softmax_scale: Optional[float] = None,
    window: Optional[Tuple[int, int]] = None,
    softcap: float = 0.0,
    mask: Optional[Operand] = None,
    bias: Optional[Operand] = None,
    alibi_slopes: Optional[Operand] = None,
    sinks: Optional[Operand] = None,
    cu_seqlens_q: Optional[Operand] = None,
    cu_seqlens_k: Optional[Operand] = None,
    seqused_k: Optional[Operand] = None,
    page_table: Optional[Operand] = None,
    k_scale: Optional[Operand] = None,
    v_scale: Optional[Operand] = None,
    kv_group: Optional[int] = None,
    layout: str = "bhsd",
    memory_limit: Union[int, str, None] = None,
    host_memory_limit: Union[int, str, None] = None,
    pinned_memory_limit: Union[int, str, None] = None,
    backend: str = "auto",
    schedule: str = "auto",
    cqs: Optional[Tuple[int, int]] = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    precision: str = "default",
    dtype: DtypeName = None,
    out: Any = None,
    return_lse: bool = False,
    return_info: bool = False,
    progress: Optional[Progress] = None,
    stream: Any = None,
) -> Any:
    """Exact softmax attention within a memory budget: ``softmax(softmax_scale * q @ k.T + ..) @ v``.

    Operands and outputs are used where they are, whatever their strides; nothing is copied or converted but the small
    operands (slopes, sinks, per-tensor and per-head scales, sequence lengths, page ids). They may be numpy arrays, torch
    tensors that autograd does not follow, arrays of cupy and jax, DLPack producers, objects with a buffer (mmap,
    memoryview, ..), with ``__array_interface__`` or ``__cuda_array_interface__``, and cqsa.Tensor for raw addresses
    (docs/python.md, which also says what happens on GPUs).

    Operands
        q: ``[batch, num_heads, seqlen_q, head_dim]`` of float32, float16, bfloat16 or float64.
        k, v: ``[batch, num_kv_heads, seqlen_k, head_dim | head_dim_v]`` of q's type, int8, float8_e4m3fn or float8_e5m2;
            num_kv_heads divides num_heads.
        layout: "bshd" when q, k, v, out and 8-bit scales are ``[batch, seq, heads, ..]``. mask, bias and lse never change.
        dtype: what the bits of uint16 and uint8 arrays mean, whichever operands have these types: "bfloat16" (or
            "float16"), "float8_e4m3fn" or "float8_e5m2"; both as ``("bfloat16", "float8_e4m3fn")``. Arrays of ml_dtypes
            need no name. Masks of uint8 stay masks.

    Varying lengths
        cu_seqlens_q, cu_seqlens_k: ``[batch + 1]`` first rows of the segments of q ``[total_q, num_heads, head_dim]`` and
            k, v ``[total_k, num_kv_heads, ..]`` (layout does not matter).
        seqused_k: ``[batch]`` keys in use of each sequence.
        page_table: ``[batch, pages per sequence]`` page ids, -1 for none; k and v are pools
            ``[num_pages, page_size, num_kv_heads, ..]``.

    Logits
        softmax_scale: None is ``1/sqrt(head_dim)``. softcap: ``softcap * tanh(s / softcap)``, 0 for none.
        causal: "none", "top_left" (j <= i) or "bottom_right" (j <= i + seqlen_k - seqlen_q).
        window: ``(left, right)`` keys visible on either side of the diagonal, both inclusive, -1 for no limit.
        mask: bool or uint8, False hides the key; bias: added to the scaled, capped logit. Both broadcast to
            ``[batch, num_heads, seqlen_q, seqlen_k]`` as numpy does.
        alibi_slopes: ``[num_heads]`` or ``[batch, num_heads]``. sinks: ``[num_heads]``, one extra logit per head.
        k_scale, v_scale: for float8 one number, ``[num_kv_heads]``, or one per token with k's axes but the last; for int8
            float16 with k's axes but the last, then one per kv_group channels.
        kv_group: 32, 64 or 128; None finds it from the scales.

    Memory and method
        memory_limit: what the library may allocate in the memory of the backend (host memory on "cpu", device memory
            otherwise), in bytes or as text, "512MiB". host_memory_limit, pinned_memory_limit: likewise for pageable and
            pinned host memory. None: no limit. Any limit gives the same answer; one that is too small raises
            MemoryError, whose message states the least that works.
        backend: "auto" (the GPU that operands are on; else the first GPU that is ready, else "cpu"), "cpu", "cuda",
            "cuda:1", .. - see ``backends()``.
        schedule: "auto", "direct", "stream" or "cqs"; cqs: ``(c, itr)``, and with it "cqs"; None lets the planner choose.
        deterministic: always the case; accepted. batch_invariant: a row's bits do not depend on its batch.
        precision: "default", "fast", "split" or "f32", the least that is wanted of the products (``CQSA_PRECISION_*`` of cqsa.h).

    Results
        out: array to write, or ``(out, lse)`` with return_lse; its type may be float32, float16 or bfloat16. None makes one
            of q's type, of torch or cupy if q is, of jax if q is and on a device, else of numpy.
        return_lse: also return ``ln(sum(exp(s)))``, float32 ``[batch, num_heads, seqlen_q]`` (varlen
            ``[num_heads, total_q]``; float64 for float64 q).
        return_info: also return a dict: ``line`` (the plan and what the run did, one line), ``plan`` and ``run`` (numbers).
        progress: called as ``progress(done, total)`` between tiles on this thread; returning False (exactly) stops the
            run, as does an exception, which is raised when the run has ended.
        stream: the stream of a device to queue the work on: a native handle, or a stream of torch or cupy. None: the current
            stream of the framework of the first operand on the device. With everything on the device the call returns
            before the work is done, if the plan is one direct pass.

    Returns out, or a tuple of out, lse and info as asked. Raises a CqsaError with ``.status`` that is also a ValueError,
    NotImplementedError, MemoryError or RuntimeError; a call refused before it ran leaves ``out`` untouched.
    """
    key = None
    if type(q) is _torch.tensor_type and (
            mask is bias is alibi_slopes is sinks is cu_seqlens_q is cu_seqlens_k is seqused_k is page_table is k_scale is v_scale
            is kv_group is dtype is progress is stream is None and host_memory_limit is pinned_memory_limit is None and cqs is None
            and schedule == "auto" and precision == "default" and not (deterministic or batch_invariant or return_info)):
        made, lse = out if return_lse and type(out) is tuple and len(out) == 2 else (out, None)
        key = _repeat.key_of(q, k, v, made, lse, causal, softmax_scale, softcap, layout, backend, bool(return_lse), window, memory_limit)
        form = _repeat.find(key)
        if form is not None:
            done = form.run(q, k, v, made, lse)
            if done is not None:
                return done
    first = out[0] if isinstance(out, tuple) and out else out
    target = choose(backend, stream, ("q", q), ("k", k), ("v", v), ("out", first))
    call = Call(
        target, q, k, v, causal=causal, softmax_scale=softmax_scale, window=window, softcap=softcap, mask=mask,
        bias=bias, alibi_slopes=alibi_slopes, sinks=sinks, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k, page_table=page_table, k_scale=k_scale, v_scale=v_scale, kv_group=kv_group, layout=layout,
        memory_limit=memory_limit, host_memory_limit=host_memory_limit, pinned_memory_limit=pinned_memory_limit,
        schedule=schedule, cqs=cqs, deterministic=deterministic, batch_invariant=batch_invariant,
        precision=precision, dtype=dtype, out=out, return_lse=return_lse)
    info = _run(target, call, progress, return_info)
    if key is not None:
        _repeat.after(key, target, call, backend, q)
    if out is not None:
        call.tell_written()
    results = [_result(call.out)]
    if return_lse:
        results.append(_result(call.lse))
    if return_info:
        results.append(info)
    return tuple(results) if len(results) > 1 else results[0]


def _result(made: Any) -> Any:
    return made.to_jax() if type(made) is DeviceMemory else made


def _run(target: Target, call: Call, progress: Optional[Progress], with_info: bool) -> Optional[Dict[str, Any]]:
    queue = target.queue
    captured = queue is not None and queue.is_captured()
    try:
        if with_info or captured:
            return _run_planned(target, call, progress, captured)
        function, handle, params, args = _ffi.library().cqsa_attention, target.context.handle, call.params, call.args

        def start() -> int:
            status: int = function(handle, params, args, target.stream)
            return status

        _call.run(start, args, progress, call.flops())
        return None
    finally:
        if queue is not None:
            queue.finish()


def _run_planned(target: Target, call: Call, progress: Optional[Progress], captured: bool) -> Dict[str, Any]:
    """The same in steps, which is how the plan can be told, and how a capture gets its workspace."""
    library, args = _ffi.library(), call.args
    _ffi.check(library.cqsa_attention_params_of(target.context.handle, args, call.params))
    with plan_handle(library.cqsa_attention_plan_create, target.context.handle, call.params) as plan:
        done = _ffi.RunInfo(ctypes.sizeof(_ffi.RunInfo))
        args.info = ctypes.addressof(done)
        workspace = _give_workspace(target.queue, plan, args) if captured and target.queue is not None else None

        def start() -> int:
            status: int = library.cqsa_attention_execute(plan, args, target.stream)
            return status

        _call.run(start, args, progress, 0 if captured else call.flops())
        del workspace  # queued work may still use it, and in stream order so may whoever gets the memory next
        if captured:  # describing a plan may measure the device, which a capture does not allow
            return {"line": "", "plan": {}, "run": run_numbers(done)}
        return {"line": plan_line(plan, done), "plan": plan_numbers(plan), "run": run_numbers(done)}


def _give_workspace(queue: Queue, plan: int, args: _ffi.AttentionArgs) -> Any:
    """While a graph is captured the library allocates nothing; the memory must be the graph's own."""
    library, size = _ffi.library(), ctypes.c_uint64(0)
    _ffi.check(library.cqsa_workspace_query(plan, ctypes.byref(size)))
    workspace = queue.new_workspace(size.value) if size.value else None
    if workspace is not None:
        args.workspace, args.workspace_bytes = workspace.data_ptr(), size.value
        _ffi.check(library.cqsa_workspace_init(plan, args.workspace, size.value))
    return workspace


class Call:
    """The keywords of attention() as params and args, with everything they point to."""

    __slots__ = ("params", "args", "out", "lse", "records", "_q", "_k", "_keys_axis", "_queue", "_is_host", "_views")

    def __init__(
        self, target: Target, q: Any, k: Any, v: Any, *, causal: str = "none", softmax_scale: Optional[float] = None,
        window: Optional[Tuple[int, int]] = None, softcap: float = 0.0, mask: Any = None, bias: Any = None,
        alibi_slopes: Any = None, sinks: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
        seqused_k: Any = None, page_table: Any = None, k_scale: Any = None, v_scale: Any = None,
        kv_group: Optional[int] = None, layout: str = "bhsd", memory_limit: Union[int, str, None] = None,
        host_memory_limit: Union[int, str, None] = None, pinned_memory_limit: Union[int, str, None] = None,
        schedule: str = "auto", cqs: Optional[Tuple[int, int]] = None, deterministic: bool = False,
        batch_invariant: bool = False, precision: str = "default", dtype: DtypeName = None, out: Any = None, return_lse: bool = False,
    ) -> None:
        self.params = params = _ffi.AttentionParams(_PARAMS_BYTES)
        self.args = _ffi.AttentionArgs(_ARGS_BYTES)
        self.records = Records()
        self._queue = queue = target.queue
        self._is_host = target.context.is_host
        self._views: Optional[Dict[str, View]] = None if self._is_host else {}
        if layout not in ("bhsd", "bshd"):
            raise error_for(ERROR_INVALID_ARGUMENT, f"layout is {layout!r}, wanted 'bhsd' or 'bshd'")
        names = _arrays.NO_NAMES if dtype is None else _arrays.dtype_names(dtype)
        varlen, paged = cu_seqlens_q is not None, page_table is not None
        bshd = layout == "bshd" and not varlen
        kv_bshd = layout == "bshd" and not varlen and not paged

        self._q = q = view_of(q, "q", queue)
        self._k = k = view_of(k, "k", queue)
        v = view_of(v, "v", queue)
        self._keys_axis = 0 if varlen or paged else 1 if bshd else 2
        args, add, float_code = self.args, self.records.add, _arrays.float_code
        args.q = add(q.swapped() if bshd else q, float_code(q, "q", names))
        args.k = add(k.swapped() if kv_bshd else k, float_code(k, "k", names))
        args.v = add(v.swapped() if kv_bshd else v, float_code(v, "v", names))
        if self._views is not None:
            self._views.update(q=q, k=k, v=v)
        self._set_outputs(q, v, names, out, return_lse, varlen, bshd)
        if k_scale is not None or v_scale is not None or kv_group is not None:
            self._set_scales(k, k_scale, v_scale, kv_group, names, kv_bshd)
        if mask is not None or bias is not None or alibi_slopes is not None or sinks is not None:
            self._set_logit_terms(mask, bias, alibi_slopes, sinks, names)
        if varlen or paged or cu_seqlens_k is not None or seqused_k is not None:
            self._set_lengths(cu_seqlens_q, cu_seqlens_k, seqused_k, page_table)

        if causal != "none":
            params.causal = _choice(causal, _ffi.CAUSAL, "causal")
        if softmax_scale is not None:
            params.softmax_scale = _scale(softmax_scale)
        if softcap:
            params.softcap = _arrays.number(softcap, "softcap")
        if window is not None:
            self._set_window(window)
        if schedule != "auto" or cqs is not None:
            self._set_schedule(schedule, cqs)
        if precision != "default":
            params.precision = _choice(precision, _ffi.PRECISIONS, "precision")
        if batch_invariant:
            params.flags |= _ffi.ATTENTION_BATCH_INVARIANT
        if deterministic:
            params.flags |= _ffi.ATTENTION_DETERMINISTIC
        if memory_limit is not None or host_memory_limit is not None or pinned_memory_limit is not None:
            self._set_budget(self._is_host, memory_limit, host_memory_limit, pinned_memory_limit)
        if self._views is not None and any(view.device[0] in _ffi.HOST_DEVICES for view in self._views.values()):
            self._check_places(self._views)
            self._mark_pinned(self._views, target.context.backend)

    def _add(self, name: str, view: View, code: int) -> None:
        setattr(self.args, name, self.records.add(view, code))
        if self._views is not None:
            self._views[name] = view

    @staticmethod
    def _check_places(views: Dict[str, View]) -> None:
        """Host memory among device memory: the library says it with its own numbers, this with names."""
        for group in _GROUPS:
            first = views.get(group[0])
            for name in group[1:]:
                view = views.get(name)
                if view is not None and first is not None and view.on_host() != first.on_host():
                    raise error_for(ERROR_DEVICE, f"{name} is on {device_name(view.device)}, but {group[0]} is on "
                                    f"{device_name(first.device)}: move one of them, so that both are on the same side")

    def _mark_pinned(self, views: Dict[str, View], backend: str) -> None:
        """numpy and torch do not say of host memory that it is pinned; what is, is copied faster."""
        if backend != "cuda":
            return
        for group in _GROUPS:
            names = [name for name in group if name in views]
            if names and all(_is_pinned(views[name]) for name in names):
                for name in names:
                    kind = ctypes.c_int32.from_address(getattr(self.args, name) + _DEVICE_TYPE_AT)
                    kind.value = _ffi.DEVICE_CUDA_HOST

    def operand_views(self) -> List[View]:
        """Of every operand and output."""
        return self.records.views()

    def flops(self) -> int:
        """About how much arithmetic this is, as a CPU counts it; an upper bound unless keys are shared between sequences."""
        shape = self._k.shape
        keys = shape[self._keys_axis] if len(shape) > self._keys_axis else 0
        flops = 4 * prod(self._q.shape) * keys
        return flops if self._is_host else flops // _DEVICE_SPEED

    def tell_written(self) -> None:
        """Torch's outputs have a version that counts writes."""
        for written in (self.out, self.lse):
            if _torch.is_tensor(written):
                _torch.was_written(written)

    def _set_outputs(self, q: View, v: View, names: _arrays.Names, out: Any, return_lse: bool, varlen: bool,
                     bshd: bool) -> None:
        lse = None
        if return_lse and isinstance(out, tuple):
            if len(out) != 2:
                raise error_for(ERROR_INVALID_ARGUMENT, f"out has {len(out)} arrays, wanted out or (out, lse)")
            out, lse = out
        if out is None:
            out = new_like(q, q.shape[:-1] + v.shape[-1:])
            view, code = output_of(out, "out", self._queue), _arrays.float_code(q, "q", names)
        else:
            view = output_of(out, "out", self._queue)
            code = _arrays.float_code(view, "out", names)
        self.out = out
        self.args.out = self.records.add(view.swapped() if bshd else view, code)
        if self._views is not None:
            self._views["out"] = view
        self.lse = None
        if not return_lse:
            return
        if lse is None:
            rows = (q.swapped() if bshd else q).shape[:-1]
            lse = new_like(q, rows[::-1] if varlen else rows, _ffi.DTYPE_F64 if q.code == _ffi.DTYPE_F64 else _ffi.DTYPE_F32)
        view = output_of(lse, "lse", self._queue)
        self.lse = lse
        self._add("lse", view, _arrays.float_code(view, "lse", names))

    def _set_scales(self, k: View, k_scale: Any, v_scale: Any, kv_group: Optional[int], names: _arrays.Names,
                    kv_bshd: bool) -> None:
        grouped = _arrays.float_code(k, "k", names) == _ffi.DTYPE_I8
        side = None if k.on_host() else self._queue
        for name, values in (("k_scale", k_scale), ("v_scale", v_scale)):
            if values is None:
                continue
            view = view_of(values, name, self._queue) if grouped else _arrays.small_floats(values, name, side)
            code = _arrays.float_code(view, name, names)
            self._add(name, view.swapped() if kv_bshd else view, code)
        if kv_group is not None:
            if not grouped:
                raise error_for(ERROR_INVALID_ARGUMENT, f"kv_group is {kv_group!r}, wanted None unless k and v are int8")
            self.params.kv_group = _arrays.integer(kv_group, "kv_group")

    def _set_logit_terms(self, mask: Any, bias: Any, alibi_slopes: Any, sinks: Any, names: _arrays.Names) -> None:
        if mask is not None:
            view = view_of(mask, "mask", self._queue)
            self._add("mask", view.four_axes(), _arrays.mask_code(view))
        if bias is not None:
            view = view_of(bias, "bias", self._queue)
            self._add("bias", view.four_axes(), _arrays.float_code(view, "bias", names))
        for name, values in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
            if values is not None:
                self._add(name, _arrays.small_floats(values, name, self._side()), _ffi.DTYPE_F32)

    def _side(self) -> Optional[Queue]:
        """Where the small operands of q belong: the device, or None for host memory."""
        return None if self._q.on_host() else self._queue

    def _set_lengths(self, cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_k: Any, page_table: Any) -> None:
        given = (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k), ("seqused_k", seqused_k))
        side = self._side()
        views = {name: _arrays.small_integers(values, name, side) for name, values in given if values is not None}
        starts = [name for name in ("cu_seqlens_q", "cu_seqlens_k") if name in views]
        if len({views[name].code for name in starts}) > 1:  # the library wants one type
            views.update((name, _arrays.as_int64(views[name], name, side)) for name in starts)
        if page_table is not None:
            views["page_table"] = _arrays.page_ids(page_table, side)
        for name, view in views.items():
            self._add(name, view, view.code)

    def _set_window(self, window: Tuple[int, int]) -> None:
        try:
            left, right = window
        except (TypeError, ValueError):
            raise error_for(ERROR_INVALID_ARGUMENT, f"window is {window!r}, wanted (left, right)") from None
        self.params.window_left = _arrays.integer(left, "window[0]")
        self.params.window_right = _arrays.integer(right, "window[1]")
        self.params.flags |= _ffi.ATTENTION_WINDOW

    def _set_schedule(self, schedule: str, cqs: Optional[Tuple[int, int]]) -> None:
        if cqs is not None and schedule == "auto":
            schedule = "cqs"
        self.params.schedule = _choice(schedule, _ffi.SCHEDULES, "schedule")
        if cqs is None:
            return
        if schedule != "cqs":
            raise error_for(ERROR_INVALID_ARGUMENT, f"cqs is {cqs!r} with schedule {schedule!r}, wanted 'cqs' or 'auto'")
        try:
            c, itr = cqs
        except (TypeError, ValueError):
            raise error_for(ERROR_INVALID_ARGUMENT, f"cqs is {cqs!r}, wanted (c, itr)") from None
        self.params.cqs_c, self.params.cqs_itr = _int32(c, "cqs[0]"), _int32(itr, "cqs[1]")

    def _set_budget(self, is_host: bool, memory: Union[int, str, None], host: Union[int, str, None],
                    pinned: Union[int, str, None]) -> None:
        own = _arrays.memory_bytes(memory, "memory_limit")
        pageable = _arrays.memory_bytes(host, "host_memory_limit")
        self.params.max_pinned_bytes = _arrays.memory_bytes(pinned, "pinned_memory_limit")
        if is_host:
            self.params.max_host_bytes = min(own, pageable) if own and pageable else own or pageable
        else:
            self.params.max_device_bytes, self.params.max_host_bytes = own, pageable


def _choice(value: Any, choices: Any, name: str) -> int:
    if not isinstance(value, str) or value not in choices:
        raise error_for(ERROR_INVALID_ARGUMENT, f"{name} is {value!r}, wanted one of {', '.join(map(repr, choices))}")
    return int(choices[value] if isinstance(choices, dict) else choices.index(value))


def _scale(value: Any) -> float:
    scale = _arrays.number(value, "softmax_scale")
    if scale == 0:
        raise error_for(ERROR_INVALID_ARGUMENT, "softmax_scale is 0, wanted another number; None is 1/sqrt(head_dim)")
    return scale


def _int32(value: Any, name: str) -> int:
    number = _arrays.integer(value, name)
    if not -(1 << 31) <= number < 1 << 31:
        raise error_for(ERROR_INVALID_ARGUMENT, f"{name} is {number}, wanted a smaller number")
    return number


def _is_pinned(view: View) -> bool:
    if view.device[0] == _ffi.DEVICE_CUDA_HOST:
        return True
    return view.device[0] == _ffi.DEVICE_CPU and 0 not in view.shape and _driver.is_pinned(*view.span())


def attention_merge(out_a: Operand, lse_a: Operand, out_b: Operand, lse_b: Operand) -> Tuple[Any, Any]:
    """Merges attention over two disjoint sets of keys into attention over both.

    out_a, out_b: float32 ``[.., head_dim_v]`` with 1 to 4 axes before the last; lse_a, lse_b: float32 ``[..]``.
    Returns ``(out, lse)`` as new arrays, of the framework and on the device of out_a. A side whose lse is -inf, +inf or NaN is
    empty: the other one is returned as it is.
    """
    given = (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b))
    target = choose_in_place("auto", None, *given)
    views = [view_of(array, name, target.queue) for name, array in given]
    out, lse = (new_like(views[0], view.shape, _ffi.DTYPE_F32) for view in views[:2])
    views += [output_of(out, "out", target.queue), output_of(lse, "lse", target.queue)]
    args = _ffi.MergeArgs(ctypes.sizeof(_ffi.MergeArgs))
    records = Records()
    for name, view in zip(("out_a", "lse_a", "out_b", "lse_b", "out", "lse"), views):
        setattr(args, name, records.add(view, _arrays.float_code(view, name, _arrays.NO_NAMES)))
    try:
        _ffi.check(_ffi.library().cqsa_attention_merge(target.context.handle, args, target.stream))
    finally:
        if target.queue is not None:
            target.queue.finish()
    return _result(out), _result(lse)
