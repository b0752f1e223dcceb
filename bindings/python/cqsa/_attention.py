# SPDX-License-Identifier: Apache-2.0
"""attention(), attention_merge() and what attention_plan() shares with them."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple, Union

import numpy as np

from . import _arrays, _call, _ffi
from ._context import Context, context_for
from ._errors import ERROR_INVALID_ARGUMENT, error_for
from ._plan import plan_handle, plan_line, plan_numbers, run_numbers

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from ._arrays import DtypeName
    from ._call import Progress

_ARGS_BYTES = ctypes.sizeof(_ffi.AttentionArgs)
_PARAMS_BYTES = ctypes.sizeof(_ffi.AttentionParams)


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: str = "none",
    softmax_scale: Optional[float] = None,
    window: Optional[Tuple[int, int]] = None,
    softcap: float = 0.0,
    mask: Optional[ArrayLike] = None,
    bias: Optional[ArrayLike] = None,
    alibi_slopes: Optional[ArrayLike] = None,
    sinks: Optional[ArrayLike] = None,
    cu_seqlens_q: Optional[ArrayLike] = None,
    cu_seqlens_k: Optional[ArrayLike] = None,
    seqused_k: Optional[ArrayLike] = None,
    page_table: Optional[ArrayLike] = None,
    k_scale: Optional[ArrayLike] = None,
    v_scale: Optional[ArrayLike] = None,
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
    dtype: DtypeName = None,
    out: Any = None,
    return_lse: bool = False,
    return_info: bool = False,
    progress: Optional[Progress] = None,
    stream: Optional[int] = None,
) -> Any:
    """Exact softmax attention within a memory budget: ``softmax(softmax_scale * q @ k.T + ..) @ v``.

    Arrays are used where they are, whatever their strides; nothing is copied or converted but the small operands
    (slopes, sinks, per-tensor and per-head scales, sequence lengths, page ids).

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
        backend: "auto" (the first GPU that is ready, else "cpu"), "cpu", "cuda", .. - see ``backends()``.
        schedule: "auto", "direct", "stream" or "cqs"; cqs: ``(c, itr)``, and with it "cqs"; None lets the planner choose.
        deterministic: always the case; accepted. batch_invariant: a row's bits do not depend on its batch.

    Results
        out: array to write, or ``(out, lse)`` with return_lse; its type may be float32, float16 or bfloat16. None makes one
            of q's type.
        return_lse: also return ``ln(sum(exp(s)))``, float32 ``[batch, num_heads, seqlen_q]`` (varlen
            ``[num_heads, total_q]``; float64 for float64 q).
        return_info: also return a dict: ``line`` (the plan and what the run did, one line), ``plan`` and ``run`` (numbers).
        progress: called as ``progress(done, total)`` between tiles on this thread; returning False (exactly) stops the
            run, as does an exception, which is raised when the run has ended.
        stream: the backend's native stream handle.

    Returns out, or a tuple of out, lse and info as asked. Raises a CqsaError with ``.status`` that is also a ValueError,
    NotImplementedError, MemoryError or RuntimeError; a call refused before it ran leaves ``out`` untouched.
    """
    context = context_for(backend)
    call = Call(
        context.is_host, q, k, v, causal=causal, softmax_scale=softmax_scale, window=window, softcap=softcap, mask=mask,
        bias=bias, alibi_slopes=alibi_slopes, sinks=sinks, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k, page_table=page_table, k_scale=k_scale, v_scale=v_scale, kv_group=kv_group, layout=layout,
        memory_limit=memory_limit, host_memory_limit=host_memory_limit, pinned_memory_limit=pinned_memory_limit,
        schedule=schedule, cqs=cqs, deterministic=deterministic, batch_invariant=batch_invariant, dtype=dtype, out=out,
        return_lse=return_lse)
    results = [call.out]
    if return_lse:
        results.append(call.lse)
    if return_info:
        results.append(_run_planned(context, call, progress, stream))
    else:
        _run(context, call, progress, stream)
    return tuple(results) if len(results) > 1 else call.out


def _run(context: Context, call: Call, progress: Optional[Progress], stream: Optional[int]) -> None:
    function, handle, params, args = _ffi.library().cqsa_attention, context.handle, call.params, call.args

    def start() -> int:
        status: int = function(handle, params, args, stream)
        return status

    _call.run(start, args, progress, call.flops())


def _run_planned(context: Context, call: Call, progress: Optional[Progress], stream: Optional[int]) -> Dict[str, Any]:
    """The same in steps, which is how the plan can be told."""
    library, args = _ffi.library(), call.args
    _ffi.check(library.cqsa_attention_params_of(context.handle, args, call.params))
    with plan_handle(library.cqsa_attention_plan_create, context.handle, call.params) as plan:
        done = _ffi.RunInfo(ctypes.sizeof(_ffi.RunInfo))
        args.info = ctypes.addressof(done)

        def start() -> int:
            status: int = library.cqsa_attention_execute(plan, args, stream)
            return status

        _call.run(start, args, progress, call.flops())
        return {"line": plan_line(plan, done), "plan": plan_numbers(plan), "run": run_numbers(done)}


class Call:
    """The keywords of attention() as params and args, with everything they point to."""

    __slots__ = ("params", "args", "out", "lse", "keep", "_q", "_k", "_keys_axis")

    def __init__(
        self, is_host: bool, q: Any, k: Any, v: Any, *, causal: str = "none", softmax_scale: Optional[float] = None,
        window: Optional[Tuple[int, int]] = None, softcap: float = 0.0, mask: Any = None, bias: Any = None,
        alibi_slopes: Any = None, sinks: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
        seqused_k: Any = None, page_table: Any = None, k_scale: Any = None, v_scale: Any = None,
        kv_group: Optional[int] = None, layout: str = "bhsd", memory_limit: Union[int, str, None] = None,
        host_memory_limit: Union[int, str, None] = None, pinned_memory_limit: Union[int, str, None] = None,
        schedule: str = "auto", cqs: Optional[Tuple[int, int]] = None, deterministic: bool = False,
        batch_invariant: bool = False, dtype: DtypeName = None, out: Any = None, return_lse: bool = False,
    ) -> None:
        self.params = params = _ffi.AttentionParams(_PARAMS_BYTES)
        self.args = _ffi.AttentionArgs(_ARGS_BYTES)
        self.keep: List[Any] = []
        if layout not in ("bhsd", "bshd"):
            raise error_for(ERROR_INVALID_ARGUMENT, f"layout is {layout!r}, wanted 'bhsd' or 'bshd'")
        names = _arrays.NO_NAMES if dtype is None else _arrays.dtype_names(dtype)
        varlen, paged = cu_seqlens_q is not None, page_table is not None
        bshd = layout == "bshd" and not varlen
        kv_bshd = layout == "bshd" and not varlen and not paged

        q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
        self._q, self._k = q, k
        self._keys_axis = 0 if varlen or paged else 1 if bshd else 2
        self._set_qkv(q, k, v, names, bshd, kv_bshd)
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
            params.softcap = _number(softcap, "softcap")
        if window is not None:
            self._set_window(window)
        if schedule != "auto" or cqs is not None:
            self._set_schedule(schedule, cqs)
        if batch_invariant:
            params.flags |= _ffi.ATTENTION_BATCH_INVARIANT
        if deterministic:
            params.flags |= _ffi.ATTENTION_DETERMINISTIC
        if memory_limit is not None or host_memory_limit is not None or pinned_memory_limit is not None:
            self._set_budget(is_host, memory_limit, host_memory_limit, pinned_memory_limit)

    def flops(self) -> int:
        """About how much arithmetic this is; an upper bound unless keys are shared between sequences."""
        shape = self._k.shape
        keys = shape[self._keys_axis] if len(shape) > self._keys_axis else 0
        return 4 * int(self._q.size) * int(keys)

    def _set_outputs(self, q: np.ndarray, v: np.ndarray, names: _arrays.Names, out: Any, return_lse: bool, varlen: bool,
                     bshd: bool) -> None:
        lse = None
        if return_lse and isinstance(out, tuple):
            if len(out) != 2:
                raise error_for(ERROR_INVALID_ARGUMENT, f"out has {len(out)} arrays, wanted out or (out, lse)")
            out, lse = out
        if out is None:
            out = view = np.empty(q.shape[:-1] + v.shape[-1:], q.dtype)
        else:
            view = _arrays.output(out, "out")
        self.out = out
        code = _arrays.float_code(view, "out", names)
        self.args.out = _arrays.tensor(_arrays.bhsd(view, bshd), code, "out", self.keep)
        self.lse = None
        if not return_lse:
            return
        if lse is None:
            rows = _arrays.bhsd(q, bshd).shape[:-1]
            lse = view = np.empty(rows[::-1] if varlen else rows, np.float64 if q.dtype == np.float64 else np.float32)
        else:
            view = _arrays.output(lse, "lse")
        self.lse = lse
        self.args.lse = _arrays.tensor(view, _arrays.float_code(view, "lse", names), "lse", self.keep)

    def _set_qkv(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, names: _arrays.Names, bshd: bool,
                 kv_bshd: bool) -> None:
        args, keep = self.args, self.keep
        args.q = _arrays.tensor(_arrays.bhsd(q, bshd), _arrays.float_code(q, "q", names), "q", keep)
        args.k = _arrays.tensor(_arrays.bhsd(k, kv_bshd), _arrays.float_code(k, "k", names), "k", keep)
        args.v = _arrays.tensor(_arrays.bhsd(v, kv_bshd), _arrays.float_code(v, "v", names), "v", keep)

    def _set_scales(self, k: np.ndarray, k_scale: Any, v_scale: Any, kv_group: Optional[int], names: _arrays.Names,
                    kv_bshd: bool) -> None:
        grouped = _arrays.float_code(k, "k", names) == _ffi.DTYPE_I8
        for name, values in (("k_scale", k_scale), ("v_scale", v_scale)):
            if values is None:
                continue
            array = np.asarray(values) if grouped else _arrays.small_floats(values, name)
            code = _arrays.float_code(array, name, names)
            setattr(self.args, name, _arrays.tensor(_arrays.bhsd(array, kv_bshd), code, name, self.keep))
        if kv_group is not None:
            if not grouped:
                raise error_for(ERROR_INVALID_ARGUMENT, f"kv_group is {kv_group!r}, wanted None unless k and v are int8")
            self.params.kv_group = _arrays.integer(kv_group, "kv_group")

    def _set_logit_terms(self, mask: Any, bias: Any, alibi_slopes: Any, sinks: Any, names: _arrays.Names) -> None:
        args, keep = self.args, self.keep
        if mask is not None:
            mask = np.asarray(mask)
            args.mask = _arrays.tensor(_arrays.four_axes(mask), _arrays.mask_code(mask), "mask", keep)
        if bias is not None:
            bias = np.asarray(bias)
            code = _arrays.float_code(bias, "bias", names)
            args.bias = _arrays.tensor(_arrays.four_axes(bias), code, "bias", keep)
        if alibi_slopes is not None:
            slopes = _arrays.small_floats(alibi_slopes, "alibi_slopes")
            args.alibi_slopes = _arrays.tensor(slopes, _ffi.DTYPE_F32, "alibi_slopes", keep)
        if sinks is not None:
            args.sinks = _arrays.tensor(_arrays.small_floats(sinks, "sinks"), _ffi.DTYPE_F32, "sinks", keep)

    def _set_lengths(self, cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_k: Any, page_table: Any) -> None:
        starts = [None if values is None else _arrays.small_integers(values, name)
                  for name, values in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))]
        if starts[0] is not None and starts[1] is not None and starts[0].dtype != starts[1].dtype:
            starts = [array.astype(np.int64) for array in starts if array is not None]  # the library wants one type
        used = None if seqused_k is None else _arrays.small_integers(seqused_k, "seqused_k")
        pages = None if page_table is None else _arrays.page_ids(page_table)
        operands = (("cu_seqlens_q", starts[0]), ("cu_seqlens_k", starts[1]), ("seqused_k", used), ("page_table", pages))
        for name, array in operands:
            if array is not None:
                setattr(self.args, name, _arrays.tensor(array, _arrays.INTEGERS[array.dtype], name, self.keep))

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


def _number(value: Any, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise error_for(ERROR_INVALID_ARGUMENT, f"{name} is {value!r}, wanted a number") from None


def _scale(value: Any) -> float:
    scale = _number(value, "softmax_scale")
    if scale == 0:
        raise error_for(ERROR_INVALID_ARGUMENT, "softmax_scale is 0, wanted another number; None is 1/sqrt(head_dim)")
    return scale


def _int32(value: Any, name: str) -> int:
    number = _arrays.integer(value, name)
    if not -(1 << 31) <= number < 1 << 31:
        raise error_for(ERROR_INVALID_ARGUMENT, f"{name} is {number}, wanted a smaller number")
    return number


def attention_merge(out_a: ArrayLike, lse_a: ArrayLike, out_b: ArrayLike,
                    lse_b: ArrayLike) -> Tuple[np.ndarray, np.ndarray]:
    """Merges attention over two disjoint sets of keys into attention over both.

    out_a, out_b: float32 ``[.., head_dim_v]`` with 1 to 4 axes before the last; lse_a, lse_b: float32 ``[..]``.
    Returns ``(out, lse)`` as new arrays. A side whose lse is -inf, +inf or NaN is empty: the other one is returned as it is.
    """
    outs = np.asarray(out_a), np.asarray(out_b)
    sums = np.asarray(lse_a), np.asarray(lse_b)
    out, lse = np.empty(outs[0].shape, np.float32), np.empty(sums[0].shape, np.float32)
    args = _ffi.MergeArgs(ctypes.sizeof(_ffi.MergeArgs))
    keep: List[Any] = []
    operands = (("out_a", outs[0]), ("lse_a", sums[0]), ("out_b", outs[1]), ("lse_b", sums[1]), ("out", out), ("lse", lse))
    for name, array in operands:
        setattr(args, name, _arrays.tensor(array, _arrays.float_code(array, name, _arrays.NO_NAMES), name, keep))
    _ffi.check(_ffi.library().cqsa_attention_merge(context_for("cpu").handle, args, None))
    return out, lse
