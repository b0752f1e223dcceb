# SPDX-License-Identifier: Apache-2.0
"""fp8_gemm(): products of matrices of FP8."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Optional, Tuple

from . import _arrays, _ffi, _fp8_parts as parts
from ._errors import ERROR_DTYPE, ERROR_INVALID_ARGUMENT, ERROR_SHAPE, error_for
from ._fp8 import Quantized, _plain_scales, inferred_block
from ._fp8_parts import Block, given, tell_written
from ._queue import Target, choose_in_place
from ._sources import new_like, output_of, view_of
from ._views import Records, View

if TYPE_CHECKING:
    from ._sources import Operand


def fp8_gemm(
    a: Any,
    b: Any,
    *,
    scale_inv_a: Any = None,
    scale_inv_b: Any = None,
    bias: Optional[Operand] = None,
    out_dtype: Any = "bfloat16",
    accumulate: str = "promote",
    c: Optional[Operand] = None,
    alpha: float = 1.0,
    beta: Optional[float] = None,
    format_a: Any = None,
    format_b: Any = None,
    granularity_a: Any = None,
    granularity_b: Any = None,
    scale_out: Any = None,
    return_amax: bool = False,
    provider: str = "auto",
    out: Any = None,
    backend: str = "auto",
    stream: Any = None,
) -> Any:
    """``alpha * (a * scale_inv_a) @ (b * scale_inv_b).T + beta * c + bias``, sums in float32.

    a: codes ``[M, K]`` or ``[batch, M, K]``, b: ``[N, K]`` or ``[batch, N, K]``, any strides, fastest along K; each of its own format. A batch of
    1 counts for all. Or a Quantized, whose `data`, `scale_inv`, format and granularity are taken: ``fp8_gemm(x, w)``, ``fp8_gemm(dy.t, x.t)``.
    scale_inv_a, scale_inv_b: float32, None: 1: one, each row ``[M, 1]``, 1x128 ``[M, ceil(K / 128)]``, of b also 128x128. granularity_a, granularity_b: which
        of these; None: by the shape. format_a, format_b: of uint8 arrays, "e4m3fn", "e5m2", ..
    bias: float32, float16 or bfloat16 ``[N]``. c: of the result's shape, beta: None is 1 with c. alpha: a number, not 0.
    out_dtype: "bfloat16", "float16", "float32", or a format: codes of the result times scale_out (float32, one; None: 1), in uint8.
    return_amax: also return the largest magnitude of the result, before scale_out: ``(out, amax)``.
    accumulate: "promote", into float32 every 128 of K, or "fast", as the matrix units do it (some 14 bits on Hopper).
    provider: "auto", "own" (this library's kernels) or "vendor" (cuBLASLt). out: array to write. backend, stream: as in attention().
    """
    product = _Product(a, b, scale_inv_a, scale_inv_b, format_a, format_b, granularity_a, granularity_b, c, out, backend, stream)
    product.numbers(alpha, beta, accumulate, provider)
    made, amax = product.results(out, out_dtype, scale_out, return_amax, bias)
    target, args = product.target, product.args
    library, handle = _ffi.library(), target.context.handle

    def launch(workspace: Optional[int], size: int) -> int:
        args.workspace, args.workspace_bytes = workspace, size
        status: int = library.cqsa_fp8_gemm(handle, args, target.stream)
        return status

    parts.run(target, "gemm", launch, product.workspace)
    tell_written(out)
    return (given(made), given(amax)) if return_amax else given(made)


def fp8_gemm_explain(a: Any, b: Any, *, scale_inv_a: Any = None, scale_inv_b: Any = None, bias: Optional[Operand] = None, out_dtype: Any = "bfloat16",
                     accumulate: str = "promote", c: Optional[Operand] = None, alpha: float = 1.0, beta: Optional[float] = None, format_a: Any = None,
                     format_b: Any = None, granularity_a: Any = None, granularity_b: Any = None, scale_out: Any = None, return_amax: bool = False,
                     provider: str = "auto", out: Any = None, backend: str = "auto", stream: Any = None) -> str:
    """Which implementation fp8_gemm() runs with these arguments, and why each one before it declined: text whose first line is "impl=NAME"."""
    product = _Product(a, b, scale_inv_a, scale_inv_b, format_a, format_b, granularity_a, granularity_b, c, out, backend, stream)
    product.numbers(alpha, beta, accumulate, provider)
    made = product.results(out, out_dtype, scale_out, return_amax, bias)
    text = _ffi.text_of(_ffi.library().cqsa_fp8_gemm_explain, product.target.context.handle, product.args)
    del made
    return text


class _Product:
    """The cqsa_fp8_gemm_args of one call."""

    def __init__(self, a: Any, b: Any, scale_inv_a: Any, scale_inv_b: Any, format_a: Any, format_b: Any, granularity_a: Any, granularity_b: Any,
                 c: Any, out: Any, backend: str, stream: Any) -> None:
        a, scale_inv_a, format_a, granularity_a = _taken(a, scale_inv_a, format_a, granularity_a, backend, stream)
        b, scale_inv_b, format_b, granularity_b = _taken(b, scale_inv_b, format_b, granularity_b, backend, stream)
        self.target: Target = choose_in_place(backend, stream, ("a", a), ("b", b), ("out", out))
        self._queue, self._records = self.target.queue, Records()
        self.args = _ffi.Fp8GemmArgs(ctypes.sizeof(_ffi.Fp8GemmArgs))
        self._a = view_of(a, "a", self._queue)
        self._b = view_of(b, "b", self._queue)
        for view, name in ((self._a, "a"), (self._b, "b")):
            parts.matrix_size(view, name)
        self.args.a = self._records.add(self._a, parts.codes_of(self._a, format_a, "a"))
        self.args.b = self._records.add(self._b, parts.codes_of(self._b, format_b, "b"))
        self._scales("a", self._a, scale_inv_a, granularity_a)
        self._scales("b", self._b, scale_inv_b, granularity_b)
        self._c = c

    def _scales(self, which: str, view: View, scale: Any, granularity: Any) -> None:
        name = "scale_inv_" + which
        size = (view.shape[-2], view.shape[-1])
        block: Block = inferred_block(scale, size, name, self._queue) if granularity is None else parts.block_of(granularity, "granularity_" + which)
        pair = self.args.block_a if which == "a" else self.args.block_b
        pair[0], pair[1] = block
        if scale is not None:
            setattr(self.args, name, parts.add(self._records, parts.scales_view(scale, name, self._queue)))

    def numbers(self, alpha: Any, beta: Any, accumulate: str, provider: str) -> None:
        args = self.args
        args.alpha = _arrays.number(alpha, "alpha")
        if args.alpha == 0:
            raise error_for(ERROR_INVALID_ARGUMENT, "alpha is 0, wanted another number")
        args.beta = (0.0 if self._c is None else 1.0) if beta is None else _arrays.number(beta, "beta")
        args.accumulate = _ffi.FP8_ACCUMULATE[parts.one_of(accumulate, "accumulate", _ffi.FP8_ACCUMULATE)]
        args.provider = _ffi.FP8_PROVIDERS.index(parts.one_of(provider, "provider", _ffi.FP8_PROVIDERS))

    def results(self, out: Any, out_dtype: Any, scale_out: Any, return_amax: bool, bias: Any) -> Tuple[Any, Any]:
        """The result's array, and its amax if that is wanted."""
        args, queue = self.args, self._queue
        code = _result_code(out_dtype)
        made = new_like(self._a, self._shape(), _ffi.DTYPE_U8 if code in parts.FORMAT_NAMES else code) if out is None else out
        view = output_of(made, "out", queue)
        args.d = self._records.add(view, code if out is None else _code_of_out(view, code))
        for name, operand in (("c", self._c), ("bias", bias)):
            if operand is not None:
                given_view = view_of(operand, name, queue)
                setattr(args, name, self._records.add(given_view, _arrays.float_code(given_view, name, _arrays.Names("bfloat16", None))))
        if scale_out is not None:
            args.d_scale = parts.add(self._records, _arrays.small_floats(scale_out, "scale_out", queue))
        amax = new_like(self._a, (), _ffi.DTYPE_F32) if return_amax else None
        if amax is not None:
            args.d_amax = parts.add(self._records, output_of(amax, "amax", queue))
        return made, amax

    def _shape(self) -> Tuple[int, ...]:
        a, b = self._a.shape, self._b.shape
        if len(a) == len(b) == 2:
            return a[0], b[0]
        sizes = {shape[0] for shape in (a, b) if len(shape) == 3 and shape[0] != 1}
        if len(sizes) > 1:
            raise error_for(ERROR_SHAPE, f"a has a batch of {a[0]} and b of {b[0]}, wanted the same, or 1")
        return sizes.pop() if sizes else 1, a[-2], b[-2]

    def workspace(self) -> int:
        self.args.workspace, self.args.workspace_bytes = None, 0
        return parts.queried(_ffi.library().cqsa_fp8_gemm_workspace, self.target.context.handle, self.args)


def _taken(operand: Any, scale_inv: Any, format: Any, granularity: Any, backend: str, stream: Any) -> Tuple[Any, Any, Any, Any]:
    """What a Quantized says of itself, where the caller says nothing else."""
    if not isinstance(operand, Quantized):
        return operand, scale_inv, format, granularity
    q = operand if operand.data is not None else operand.t
    own = scale_inv is None
    if own:
        needs_floats = q.scale_layout in ("packed", "tiled") or q.granularity == "mx"
        scale_inv = _plain_scales(q, backend, stream) if needs_floats else q.scale_inv
    return q.data, scale_inv, format or q.format, granularity or (q.granularity if own else None)


def _result_code(dtype: Any) -> int:
    names = _arrays.named_types(dtype)
    name = names[0] if len(names) == 1 else ""
    if name in ("float32", "float16", "bfloat16"):
        return _arrays.code_of(name)
    try:
        return parts.FORMATS[parts.format_name(name)]
    except ValueError:
        raise error_for(ERROR_DTYPE, f"out_dtype is {dtype!r}, wanted 'bfloat16', 'float16', 'float32' or a format") from None


def _code_of_out(view: View, code: int) -> int:
    """An array of the caller's says its type itself; bare bits are what out_dtype says."""
    if view.code == _ffi.DTYPE_U8:
        return code
    return _arrays.float_code(view, "out", _arrays.Names("bfloat16", None)) if view.code not in parts.FORMAT_NAMES else view.code
