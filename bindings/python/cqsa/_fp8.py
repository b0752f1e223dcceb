# SPDX-License-Identifier: Apache-2.0
"""FP8: fp8_quantize() and what belongs to it."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from . import _arrays, _ffi, _fp8_parts as parts
from ._errors import ERROR_DTYPE, ERROR_INVALID_ARGUMENT, ERROR_SHAPE, error_for
from ._fp8_parts import FORMATS, Block, flipped, given, tell_written
from ._fp8_ring import Ring
from ._queue import Queue, Target, choose_in_place
from ._selected import _int32
from ._sources import new_like, output_of, view_of
from ._views import Records, View, type_name

if TYPE_CHECKING:
    from ._arrays import DtypeName
    from ._sources import Operand


class Quantized(NamedTuple):
    """Codes and their scales. Arrays are None where they were not asked for.

    `data` ``[.., rows, cols]`` as x, and `data_t` ``[cols, rows]``, contiguous along the rows of x; a batch counts as so many rows more. Both are
    uint8, or what `out` was. `scale_inv` belongs to `data` and `scale_inv_t` to `data_t`, each in the rows and columns of its array;
    one scale for all has no axes. `scale` is what multiplied x, of `data`, or of `data_t` where that is alone.
    """

    data: Any
    data_t: Any
    scale: Any
    scale_inv: Any
    scale_inv_t: Any
    amax: Any  # float32, one: the largest |x|
    flags: Any  # int64 [4]: NaN, infinities, saturated elements, refusals on the device; with nan="flag"
    format: str
    format_t: str
    granularity: str
    granularity_t: str = ""  # as granularity, unless they differ
    scale_layout: str = "rows"
    groups: Any = None
    shape: Tuple[int, ...] = ()  # of x
    groups_of: str = "rows"  # of `data`; of `t` they are "columns"

    @property
    def t(self) -> Quantized:
        """The transposed side as if it were the other one: ``fp8_gemm(dy.t, x.t)``."""
        if self.data_t is None:
            raise error_for(ERROR_INVALID_ARGUMENT, "there are no transposed codes: quantize with layout='transposed' or 'dual'")
        return Quantized(self.data_t, None, None, self.scale_inv_t, None, self.amax, self.flags, self.format_t, self.format_t,
                         self.granularity_t or self.granularity, "", self.scale_layout, self.groups, tuple(self.data_t.shape), "columns")


class _Options(NamedTuple):
    """Keywords of fp8_quantize(), one for one."""

    format: Any = "e4m3fn"
    scale: Any = None
    granularity: Any = "tensor"
    layout: str = "row"
    format_transposed: Any = None
    saturate: bool = True
    nan: str = "propagate"
    pow2: bool = False
    return_amax: bool = True
    dtype: Any = None
    margin: int = 0
    eps: float = 0.0
    amax_limit: float = 0.0
    granularity_transposed: Any = None
    scale_transposed: Any = None
    scale_layout: str = "rows"
    scale_dtype: Any = None
    stage: bool = False
    up: Any = None
    groups: Any = None
    rng: Any = None
    skip: Any = None
    column_sum: Any = None
    flags: Any = None
    x_scale_inv: Any = None
    x_format: Any = None
    x_granularity: Any = "tensor"


def fp8_quantize(
    x: Operand,
    *,
    format: Any = "e4m3fn",
    scale: Any = None,
    granularity: Any = "tensor",
    layout: str = "row",
    format_transposed: Any = None,
    saturate: bool = True,
    nan: str = "propagate",
    pow2: bool = False,
    return_amax: bool = True,
    dtype: DtypeName = None,
    backend: str = "auto",
    out: Any = None,
    stream: Any = None,
    margin: int = 0,
    eps: float = 0.0,
    amax_limit: float = 0.0,
    granularity_transposed: Any = None,
    scale_transposed: Any = None,
    scale_layout: str = "rows",
    scale_dtype: Any = None,
    stage: bool = False,
    up: Optional[Operand] = None,
    groups: Optional[Operand] = None,
    rng: Optional[Operand] = None,
    skip: Optional[Operand] = None,
    column_sum: Any = None,
    flags: Any = None,
) -> Quantized:
    """Codes of 8 bits, ``fp8(x * scale)`` rounded to nearest even, and ``scale_inv = 1 / scale``; the same bits on every device.

    x: float32, float16 or bfloat16 ``[rows, cols]`` or ``[batch, rows, cols]``, any strides; uint16 with dtype="bfloat16".
    format: "e4m3fn", "e5m2", "e4m3fnuz" or "e5m2fnuz"; format_transposed: of the transposed codes, None: the same.
    scale: None: from the amax of this call, ``fp8_max / amax``. A number or a float32 array of the shape of the scales: that. A Ring: what the
        ring has, and the amax goes into it (stage: only into its staging amax, see fp8_ring_fold()).
    granularity: what shares a scale: "tensor", "row", "col", "1x128", "128x128", "1x64" and the like, (rows, cols), or "mx": 1x32 with
        scales of one byte. It is meant in the rows and columns of each array of codes, so "1x128" of a transposed array, whose rows are the
        columns of x, is 128 rows of x. granularity_transposed: of the transposed codes, None: the same.
    layout: "row", "transposed" or "dual", both from one reading of x.
    saturate: what is too large becomes the largest code; False: NaN or infinity, as the format has it.
    nan: "propagate": NaN and infinities show in amax; "ignore": they do not; "flag": as the first, and `flags` counts them. flags: an int64 ``[4]``
        array to which is added.
    pow2: scales are powers of two. margin: further headroom, ``2**-margin``. eps, amax_limit: bounds of the amax that a scale is made from.
    scale_transposed: a given scale of the transposed codes; None: `scale`, where both have the same blocks.
    scale_layout: "rows", "columns" (columns after each other, padded to 4: TMA, DeepGEMM, cuBLASLt's 1x128), "packed" (4 bytes in an int32:
        DeepGEMM) or "tiled" (128 x 4: cuBLASLt's MX). scale_dtype: "float32", or "e8m0" for the bytes of powers of two.
    up: of x's type and shape: x counts as ``silu(x) * up``. groups: int ``[n + 1]`` rows: each group of rows has its own scale, ``[n, 1]``.
    rng: int64 ``[2]``, seed and offset: round at random. skip: int32, one: if it is not 0 everything stays as it is.
    column_sum: float32 ``[cols]`` array to write: the sums over the rows.
    dtype, backend, stream: as in attention(). out: array of codes to write, for "dual" a pair; or a Quantized, whose arrays are written.
    """
    options = _Options(format, scale, granularity, layout, format_transposed, saturate, nan, pow2, return_amax, dtype, margin, eps, amax_limit,
                       granularity_transposed, scale_transposed, scale_layout, scale_dtype, stage, up, groups, rng, skip, column_sum, flags)
    target = choose_in_place(backend, stream, ("x", x), ("out", _first_of(out)))
    return _quantized(target, x, options, out)


def _quantized(target: Target, x: Any, options: _Options, out: Any) -> Quantized:
    job = _Job(target, x, options, out)
    library, handle, args = _ffi.library(), target.context.handle, job.args

    def launch(workspace: Optional[int], size: int) -> int:
        args.workspace, args.workspace_bytes = workspace, size
        status: int = library.cqsa_fp8_quantize(handle, args, target.stream)
        return status

    parts.run(target, "quantize", launch, lambda: _size_of(target, [job]))
    return job.result()


def fp8_quantize_many(xs: Sequence[Operand], *, scale: Any = None, out: Optional[Sequence[Any]] = None, backend: str = "auto",
                      stream: Any = None, **keywords: Any) -> List[Quantized]:
    """fp8_quantize() of several tensors in as many launches as for one.

    scale: None, or a list with what fp8_quantize() takes for each: Rings, arrays, numbers. out: None, or a list with what it takes for each. All
    other keywords are those of fp8_quantize(), the same for all; but no column_sum and flags, into which only one tensor can go: `flags` of a
    Quantized in out are added to.
    """
    unknown = sorted(set(keywords) - set(_Options._fields[:24]))
    alone = sorted({"column_sum", "flags"} & set(keywords))
    if alone:
        raise error_for(ERROR_INVALID_ARGUMENT, f"{alone[0]} is one array, which several tensors cannot share: use fp8_quantize() for each")
    if unknown:
        raise error_for(ERROR_INVALID_ARGUMENT, f"{unknown[0]} is no keyword of fp8_quantize()")
    count = len(xs)
    scales = [None] * count if scale is None else list(scale)
    outs = [None] * count if out is None else list(out)
    if len(scales) != count or len(outs) != count:
        raise error_for(ERROR_SHAPE, f"scale has {len(scales)} and out {len(outs)} entries, wanted {count}, one for each of xs")
    if not count:
        return []
    target = choose_in_place(backend, stream, *((f"xs[{index}]", x) for index, x in enumerate(xs)))
    jobs = [_Job(target, x, _Options(scale=one, **keywords), to) for x, one, to in zip(xs, scales, outs)]
    pointers = _pointers(jobs)
    library, handle = _ffi.library(), target.context.handle

    def launch(workspace: Optional[int], size: int) -> int:
        jobs[0].args.workspace, jobs[0].args.workspace_bytes = workspace, size
        status: int = library.cqsa_fp8_quantize_many(handle, pointers, count, target.stream)
        return status

    parts.run(target, "quantize", launch, lambda: _size_of(target, jobs))
    return [job.result() for job in jobs]


def fp8_requantize(q: Any, *, scale_inv: Any = None, source_format: Any = None, source_granularity: Any = None, out: Any = None,
                   backend: str = "auto", stream: Any = None, **keywords: Any) -> Quantized:
    """Codes of another format, granularity or layout from codes, without numbers in between.

    q: a Quantized, whose `data` is read, or `data_t` where that is alone: the result is of x all the same, a batch as so many rows more. Or codes
    ``[rows, cols]`` with scale_inv (float32, None: 1), source_format (of uint8) and source_granularity, by the shape of scale_inv if it is None. A
    scale for each group of rows is not read: dequantize those. All other keywords are those of fp8_quantize().
    """
    codes = q
    if isinstance(q, Quantized):
        codes, scale_inv, source_format, source_granularity = _source_of(q, backend, stream)
    target = choose_in_place(backend, stream, ("q", codes), ("out", _first_of(out)))
    if source_granularity is None:
        view = view_of(codes, "q", target.queue)
        source_granularity = inferred_block(scale_inv, parts.matrix_size(view, "q"), "scale_inv", target.queue)
    options = _Options(x_scale_inv=1.0 if scale_inv is None else scale_inv, x_format=source_format, x_granularity=source_granularity, **keywords)
    return _quantized(target, codes, options, out)


def _source_of(q: Quantized, backend: str, stream: Any) -> Tuple[Any, Any, str, Block]:
    """Codes, scales, format and blocks of what is requantized, in the rows and columns of x."""
    side = q if q.data is not None else q.t
    block = parts.block_of(side.granularity)
    if side.groups is not None and block == (0, 0):
        raise error_for(ERROR_INVALID_ARGUMENT, "q has a scale for each group of rows, which are not read here: use fp8_dequantize(q) and fp8_quantize()")
    is_plain = side.scale_layout not in ("packed", "tiled") and side.granularity != "mx"
    scale_inv = side.scale_inv if is_plain else _plain_scales(side, backend, stream)
    if side is q:
        return side.data, scale_inv, side.format, block
    if not hasattr(side.data, "T") or not hasattr(scale_inv, "T"):
        raise error_for(ERROR_INVALID_ARGUMENT, f"q has transposed codes alone, which a {type(side.data).__name__} does not turn back: give q.t")
    return side.data.T, scale_inv.T, side.format, block[::-1]


def _plain_scales(q: Quantized, backend: str, stream: Any) -> Any:
    view = view_of(q.data, "q")
    grid = _grid_with(parts.matrix_size(view, "q"), parts.block_of(q.granularity), q.groups, q.groups_of == "columns")
    return fp8_scale_relayout(q.scale_inv, *grid, layout=q.scale_layout, dtype_out="float32", backend=backend, stream=stream)


def _grid_with(size: Tuple[int, int], block: Block, groups: Any, turned: bool) -> Tuple[int, int]:
    """How many rows and columns of scales there are, with groups of rows, which are columns of the transposed."""
    if groups is None or block != (0, 0):
        return parts.grid_of(*size, block)
    count = groups.shape[0] if hasattr(groups, "shape") else len(groups)
    number = max(int(count) - 1, 0)
    return (1, number) if turned else (number, 1)


def inferred_block(scale: Any, size: Tuple[int, int], name: str, side: Optional[Queue]) -> Block:
    """The blocks that an array of scales is of, by its shape: one, each row, 1x128 or 128x128."""
    shape = () if scale is None else tuple(scale.shape if hasattr(scale, "shape") else np.shape(scale))[-2:]
    count = shape[0] * shape[1] if len(shape) == 2 else shape[0] if shape else 1
    if count == 1 and size[0] != 1:
        return 0, 0
    for block in ((1, 0), (1, 128), (128, 128), (0, 0)):
        if shape == parts.grid_of(*size, block):
            return block
    if len(shape) < 2 and count == 1:
        return 0, 0
    raise error_for(ERROR_SHAPE, f"{name} has shape {list(shape)}, which is neither one for all, for each row, 1x128 nor 128x128 of {list(size)}: "
                    "say the granularity")


# ---------------------------------------------------------------------------------------------------------------------
# The cqsa_fp8_quantize_args of one tensor
# ---------------------------------------------------------------------------------------------------------------------


class _Form(NamedTuple):
    """What the plain keywords come to: the same for many calls, and so worked out once."""

    flags: int
    nan_policy: int
    margin: int
    eps: float
    amax_limit: float
    format: str
    format_t: str
    block: Block
    block_t: Block
    granularity: str
    granularity_t: str
    scale_code: int  # type of scale_inv
    is_row: bool
    is_turned: bool


_forms: Dict[Any, _Form] = {}
_MOST_FORMS = 1024


def _form_of(o: _Options) -> _Form:
    key = (o.format, o.granularity, o.layout, o.format_transposed, o.saturate, o.nan, o.pow2, o.margin, o.eps, o.amax_limit,
           o.granularity_transposed, o.scale_layout, o.scale_dtype, o.stage)
    try:
        known = _forms.get(key)
    except TypeError:  # a list
        return _new_form(o)
    if known is None:
        known = _new_form(o)
        if len(_forms) < _MOST_FORMS:
            _forms[key] = known
    return known


def _new_form(o: _Options) -> _Form:
    layout = parts.one_of(o.layout, "layout", ("row", "transposed", "dual"))
    parts.one_of(o.nan, "nan", ("propagate", "ignore", "flag"))
    parts.one_of(o.scale_layout, "scale_layout", parts.LAYOUTS)
    format, block = parts.format_name(o.format), parts.block_of(o.granularity)
    format_t = format if o.format_transposed is None else parts.format_name(o.format_transposed, "format_transposed")
    turned = o.granularity if o.granularity_transposed is None else o.granularity_transposed
    block_t = parts.block_of(turned, "granularity_transposed")
    scale_code = _scale_code(o)
    flags = 0 if o.saturate else _ffi.FP8_NO_SATURATE
    flags |= _ffi.FP8_POW2 if o.pow2 or scale_code != _ffi.DTYPE_F32 else 0
    flags |= _ffi.FP8_RING_STAGE if o.stage else 0
    return _Form(flags, 1 if o.nan == "ignore" else 0, _small(o.margin, "margin"), _arrays.number(o.eps, "eps"),
                 _arrays.number(o.amax_limit, "amax_limit"), format, format_t, block, block_t, _name(o.granularity, block), _name(turned, block_t),
                 scale_code, layout != "transposed", layout != "row")


def _scale_code(o: _Options) -> int:
    if o.scale_dtype is None:
        is_bytes = o.granularity == "mx" or o.scale_layout in ("packed", "tiled")
    else:
        is_bytes = parts.one_of(str(o.scale_dtype), "scale_dtype", ("float32", "e8m0")) == "e8m0"
    return _ffi.DTYPE_E8M0FNU if is_bytes else _ffi.DTYPE_F32


def _name(granularity: Any, block: Block) -> str:
    return "mx" if granularity == "mx" else parts.granularity_name(block)


class _Job:
    """Fills the arguments, and makes what the caller did not give."""

    def __init__(self, target: Target, x: Any, options: _Options, out: Any) -> None:
        form = _form_of(options)
        self.args = args = _ffi.Fp8QuantizeArgs(_ARGS_BYTES, form.flags | (_ffi.FP8_SILU if options.up is not None else 0))
        args.nan_policy, args.margin, args.eps, args.amax_limit = form.nan_policy, form.margin, form.eps, form.amax_limit
        self._target, self._queue, self._records, self._o, self._form = target, target.queue, Records(), options, form
        self._written: List[Any] = []
        self._later: List[Callable[[], None]] = []
        self._x = view_of(x, "x", target.queue)
        self._size = parts.matrix_size(self._x, "x")
        self._row, self._turned = form.is_row, form.is_turned
        self._out = made = _outputs(out, options.layout)
        self._input()
        self._small_operands()
        self._source()
        data = self._side(args.row, made.data, form.format, form.block, False) if self._row else _NO_SIDE
        turned = self._side(args.transposed, made.data_t, form.format_t, form.block_t, True) if self._turned else _NO_SIDE
        scale = data[1] if self._row else turned[1]
        amax, flags = self._amax(), self._flags()
        self._result = Quantized(data[0], turned[0], scale, data[2], turned[2], amax, flags, form.format, form.format_t, form.granularity,
                                 form.granularity_t, options.scale_layout, options.groups, self._x.shape)

    def result(self) -> Quantized:
        """After the call."""
        for step in self._later:
            step()
        if self._written:
            tell_written(*self._written)
        q = self._result
        return q._replace(data=given(q.data), data_t=given(q.data_t), scale=given(q.scale), scale_inv=given(q.scale_inv),
                          scale_inv_t=given(q.scale_inv_t), amax=given(q.amax), flags=given(q.flags)) if self._x.borrowed else q

    def _input(self) -> None:
        o, args = self._o, self.args
        names = _arrays.NO_NAMES if o.dtype is None else _arrays.dtype_names(o.dtype)
        if o.x_scale_inv is not None:
            block = o.x_granularity if isinstance(o.x_granularity, tuple) else parts.block_of(o.x_granularity)
            args.x = self._records.add(self._x, parts.codes_of(self._x, o.x_format, "q"))
            args.x_scale_inv = parts.add(self._records, parts.scales_view(o.x_scale_inv, "scale_inv", self._queue))
            args.x_block[0], args.x_block[1] = block
            return
        args.x = self._records.add(self._x, _arrays.float_code(self._x, "x", names))
        if o.up is not None:
            up = view_of(o.up, "up", self._queue)
            args.up = self._records.add(up, _arrays.float_code(up, "up", names))

    def _small_operands(self) -> None:
        o, args = self._o, self.args
        if o.groups is not None:
            args.groups = parts.add(self._records, _arrays.small_integers(o.groups, "groups", self._queue))
        if o.rng is not None:
            args.rng = parts.add(self._records, _int64(o.rng, "rng", self._queue))
        if o.skip is not None:
            args.skip = parts.add(self._records, _int32(o.skip, "skip", self._queue))
        if o.column_sum is not None:
            args.column_sum = parts.add(self._records, self._to(o.column_sum, "column_sum"))

    def _source(self) -> None:
        scale = self._o.scale
        if isinstance(scale, Ring):
            wanted = self._form.format if self._row else self._form.format_t
            if scale.format != wanted:
                raise error_for(ERROR_DTYPE, f"the ring is of {scale.format}, but the codes are {wanted}")
            self.args.source = _ffi.FP8_RING
            self.args.ring = ctypes.addressof(scale.struct(self._target, self._x))
        else:
            self.args.source = _ffi.FP8_CURRENT if scale is None else _ffi.FP8_STATIC

    def _side(self, side: _ffi.Fp8Side, data: Any, format: str, block: Block, turned: bool) -> Tuple[Any, Any, Any]:
        """Codes, scale and scale_inv of one output."""
        rows, columns = self._size[::-1] if turned else self._size
        name = "out" if not turned else "out (transposed)"
        if data is None:
            data = new_like(self._x, (rows, columns) if turned else self._x.shape, _ffi.DTYPE_U8)
            code = FORMATS[format]
            view = output_of(data, name, self._queue)
        else:
            view = self._to(data, name)
            code = parts.codes_of(view, format, name)
        side.out = self._records.add(view, code)
        side.block[0], side.block[1] = block[::-1] if turned else block
        grid = _grid_with((rows, columns), block, self._o.groups, turned)
        return data, self._scale(side, block, grid, turned), self._scale_inv(side, block, grid, turned)

    def _scale(self, side: _ffi.Fp8Side, block: Block, grid: Tuple[int, int], turned: bool) -> Any:
        """`scale` that is given, or made for the first side."""
        o = self._o
        if self.args.source == _ffi.FP8_STATIC:
            scale = o.scale
            if turned and self._row:
                scale = o.scale_transposed if o.scale_transposed is not None else _turned_scale(o.scale, self._form.block, block)
            view = parts.scales_view(scale, "scale", self._queue)
            side.scale_in = parts.add(self._records, flipped(view) if turned else view)
            return scale
        if turned and self._row:
            return None
        made = self._out.scale
        if made is None:
            made = parts.new_scales(self._x, grid, block, "rows", _ffi.DTYPE_F32)
            view = output_of(made, "scale", self._queue)
        else:
            view = self._to(made, "out.scale")
        side.scale = parts.add(self._records, flipped(view) if turned else view)
        return made

    def _scale_inv(self, side: _ffi.Fp8Side, block: Block, grid: Tuple[int, int], turned: bool) -> Any:
        layout = self._o.scale_layout
        made = self._out.scale_inv_t if turned else self._out.scale_inv
        name = "out.scale_inv_t" if turned else "out.scale_inv"
        written = made is not None
        if made is None:
            made = parts.new_scales(self._x, grid, block, layout, self._form.scale_code)
        view = self._to(made, name) if written else output_of(made, name, self._queue)
        code = self._form.scale_code if view.code == _ffi.DTYPE_U8 else view.code
        if not turned or layout in ("rows", "columns"):
            side.scale_layout = parts.LAYOUTS[layout]
            side.scale_inv = self._records.add(flipped(view) if turned else view, code)
            return made
        # The library lays such scales out in the rows of x, and here those of the transposed are wanted.
        plain = parts.new_scales(self._x, grid, block, "rows", self._form.scale_code)
        between = output_of(plain, name, self._queue)
        side.scale_inv = self._records.add(flipped(between), self._form.scale_code)
        self._later.append(lambda: _relayout(self._target, between, self._form.scale_code, 0, view, parts.LAYOUTS[layout], grid))
        return made

    def _amax(self) -> Any:
        made = self._out.amax
        if made is not None:
            self.args.amax = parts.add(self._records, self._to(made, "out.amax"))
        elif self._o.return_amax:
            made = new_like(self._x, (), _ffi.DTYPE_F32)
            self.args.amax = parts.add(self._records, output_of(made, "amax", self._queue))
        return made

    def _flags(self) -> Any:
        made = self._o.flags if self._o.flags is not None else self._out.flags
        if made is not None:
            self.args.counters = parts.add(self._records, self._to(made, "flags"))
        elif self._o.nan == "flag":
            made = parts.zeros_like(self._x, 4)
            self.args.counters = parts.add(self._records, output_of(made, "flags", self._queue))
        return made

    def _to(self, array: Any, name: str) -> View:
        """An array of the caller's that is written."""
        self._written.append(array)
        return output_of(array, name, self._queue)


_ARGS_BYTES = ctypes.sizeof(_ffi.Fp8QuantizeArgs)
_NO_SIDE = (None, None, None)
_NOTHING = Quantized(None, None, None, None, None, None, None, "", "", "")


def _outputs(out: Any, layout: str) -> Quantized:
    """`out` in its place."""
    if out is None:
        return _NOTHING
    if isinstance(out, Quantized):
        return out
    if layout != "dual":
        return _NOTHING._replace(data=out) if layout == "row" else _NOTHING._replace(data_t=out)
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise error_for(ERROR_INVALID_ARGUMENT, "out is one array, wanted (data, data_t) because of layout='dual', or a Quantized")
    return _NOTHING._replace(data=out[0], data_t=out[1])


def _first_of(out: Any) -> Any:
    if isinstance(out, (Quantized, tuple, list)):
        return next((one for one in out[:2] if one is not None), None)
    return out


def _turned_scale(scale: Any, block: Block, block_t: Block) -> Any:
    """A given scale in the rows and columns of the transposed."""
    if block == block_t == (0, 0):
        return scale
    if block[0] != block_t[1] or block[1] != block_t[0] or not hasattr(scale, "T"):
        raise error_for(ERROR_INVALID_ARGUMENT, "scale is given for the codes, whose blocks are not those of the transposed ones: give scale_transposed")
    return scale.T


def _small(value: Any, name: str) -> int:
    number = _arrays.integer(value, name)
    if not -1 << 31 <= number < 1 << 31:
        raise error_for(ERROR_INVALID_ARGUMENT, f"{name} is {number}, wanted an integer of 32 bits")
    return number


def _signed(value: Any, name: str) -> int:
    if isinstance(value, (int, np.integer)) and int(value) >> 63 == 1:
        return int(value) - (1 << 64)
    return _arrays.integer(value, name)


def _int64(values: Any, name: str, side: Optional[Queue]) -> View:
    """A seed and an offset: as they are, and of a list the low 64 bits, so that unsigned ones can be given."""
    if isinstance(values, (tuple, list)):
        values = np.array([_signed(value, name) for value in values], np.int64)
    view = _arrays.small_integers(values, name, side)
    return view if view.code == _ffi.DTYPE_I64 else _arrays.as_int64(view, name, side)


def _pointers(jobs: Sequence[_Job]) -> Any:
    return (ctypes.c_void_p * len(jobs))(*(ctypes.addressof(job.args) for job in jobs))


def _size_of(target: Target, jobs: Sequence[_Job]) -> int:
    jobs[0].args.workspace, jobs[0].args.workspace_bytes = None, 0
    return parts.queried(_ffi.library().cqsa_fp8_quantize_workspace, target.context.handle, _pointers(jobs), len(jobs))


# ---------------------------------------------------------------------------------------------------------------------
# Others
# ---------------------------------------------------------------------------------------------------------------------


def fp8_dequantize(q: Any, *, scale_inv: Any = None, format: Any = None, granularity: Any = None, scale_layout: str = "rows",
                   groups: Optional[Operand] = None, out_dtype: Any = "float32", out: Any = None, backend: str = "auto", stream: Any = None) -> Any:
    """Numbers back from codes, ``code * scale_inv``, rounded once.

    q: what fp8_quantize() gave, which needs nothing else: `data` is read, or `data_t` where that is alone, and the result has the shape of x. Or
    codes ``[rows, cols]`` or ``[batch, rows, cols]`` with scale_inv (None: 1), format (of uint8 arrays), granularity (None: by the shape of
    scale_inv), scale_layout and groups as in fp8_quantize().
    out_dtype: "float32", "float16" or "bfloat16". out: array to write instead.
    """
    turned = by_columns = False
    shape: Tuple[int, ...] = ()
    if isinstance(q, Quantized):
        turned = q.data is None
        side = q.t if turned else q
        groups = q.groups
        by_columns = groups is not None and side.groups_of == "columns"
        q, scale_inv, format, granularity, scale_layout, shape = (side.data, side.scale_inv, side.format, side.granularity, side.scale_layout,
                                                                  q.shape)
    target = choose_in_place(backend, stream, ("q", q), ("out", out))
    side_queue, records = target.queue, Records()
    codes = view_of(q, "q", side_queue)
    rows, columns = parts.matrix_size(codes, "q")
    block = inferred_block(scale_inv, (rows, columns), "scale_inv", side_queue) if granularity is None else parts.block_of(granularity)
    args = _ffi.Fp8DequantizeArgs(ctypes.sizeof(_ffi.Fp8DequantizeArgs))
    flips = turned or by_columns  # the library has groups of rows alone
    args.codes = records.add(flipped(codes) if flips else codes, parts.codes_of(codes, format, "q"))
    scales = parts.scales_view(1.0 if scale_inv is None else scale_inv, "scale_inv", side_queue)
    layout = parts.LAYOUTS[parts.one_of(scale_layout, "scale_layout", parts.LAYOUTS)]
    if flips and layout:
        grid = _grid_with((rows, columns), block, groups, True)
        plain = new_like(scales, grid, _ffi.DTYPE_F32)
        between = output_of(plain, "scale_inv", side_queue)
        _relayout(target, scales, scales.code, layout, between, 0, grid)
        scales, layout = between, 0
    args.scale_inv = parts.add(records, flipped(scales) if flips else scales)
    args.scale_layout = layout
    args.block[0], args.block[1] = block[::-1] if flips else block
    if groups is not None:
        args.groups = parts.add(records, _arrays.small_integers(groups, "groups", side_queue))
    made, to, code = _result(codes, out, shape or (codes.shape[::-1] if turned else codes.shape), out_dtype, side_queue)
    args.out = records.add(_as_matrix(to) if turned else flipped(to) if flips else to, code)
    try:
        _ffi.check(_ffi.library().cqsa_fp8_dequantize(target.context.handle, args, target.stream))
    finally:
        parts.finish(target)
    tell_written(out)
    return given(made)


def _as_matrix(view: View) -> View:
    """A compact batch of matrices as one."""
    if len(view.shape) != 3:
        return view
    if view.strides is not None:
        raise error_for(ERROR_SHAPE, "out has three axes and is not compact, which transposed codes cannot be written to")
    return view.with_axes((view.shape[0] * view.shape[1], view.shape[2]), None)


def _result(like: View, out: Any, shape: Tuple[int, ...], dtype: Any, side: Optional[Queue]) -> Tuple[Any, View, int]:
    """A result's array, its view, and CQSA_DTYPE_* of what goes into it."""
    if out is not None:
        view = output_of(out, "out", side)
        return out, view, _arrays.float_code(view, "out", _arrays.dtype_names(dtype if dtype in ("float16", "bfloat16") else None))
    names = _arrays.named_types(dtype)
    if len(names) != 1 or names[0] not in ("float32", "float16", "bfloat16"):
        raise error_for(ERROR_DTYPE, f"out_dtype is {dtype!r}, wanted 'float32', 'float16' or 'bfloat16'")
    code = _arrays.code_of(names[0])
    made = new_like(like, shape, code)
    return made, output_of(made, "out", side), code


def fp8_amax(x: Operand, *, granularity: Any = "tensor", nan: str = "propagate", dtype: DtypeName = None, out: Any = None, backend: str = "auto",
             stream: Any = None) -> Any:
    """The largest |x| of each block, float32 ``[block rows, block columns]``, without axes for "tensor". x, granularity, nan: as in
    fp8_quantize(), without "flag". out: array to write."""
    target = choose_in_place(backend, stream, ("x", x), ("out", out))
    parts.one_of(nan, "nan", _ffi.FP8_NAN)
    view, records = view_of(x, "x", target.queue), Records()
    block = parts.block_of(granularity)
    made = parts.new_scales(view, parts.grid_of(*parts.matrix_size(view, "x"), block), block, "rows", _ffi.DTYPE_F32) if out is None else out
    code = _arrays.float_code(view, "x", _arrays.dtype_names(dtype))
    source, to = records.add(view, code), parts.add(records, output_of(made, "out", target.queue))
    library, handle, size = _ffi.library(), target.context.handle, (ctypes.c_int64 * 2)(*block)

    def launch(workspace: Optional[int], bytes: int) -> int:
        status: int = library.cqsa_fp8_amax(handle, source, size, _ffi.FP8_NAN.index(nan), to, workspace, bytes, target.stream)
        return status

    def needed() -> int:
        args = _ffi.Fp8QuantizeArgs(ctypes.sizeof(_ffi.Fp8QuantizeArgs))
        args.x, args.amax, args.nan_policy = source, to, _ffi.FP8_NAN.index(nan)
        args.row.block = size
        pointer = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        return parts.queried(library.cqsa_fp8_quantize_workspace, handle, pointer, 1)

    parts.run(target, "quantize", launch, needed)
    tell_written(out)
    return given(made)


def fp8_scale_from_amax(amax: Operand, *, format: Any = "e4m3fn", margin: int = 0, eps: float = 0.0, amax_limit: float = 0.0, pow2: bool = False,
                        out: Any = None, backend: str = "auto", stream: Any = None) -> Tuple[Any, Any]:
    """``(scale, scale_inv)``, float32 of the shape of amax, by the rule of fp8_quantize(). out: a pair of arrays to write."""
    target = choose_in_place(backend, stream, ("amax", amax))
    view, records = _arrays.small_floats(amax, "amax", target.queue), Records()
    if out is not None and (not isinstance(out, (tuple, list)) or len(out) != 2):
        raise error_for(ERROR_INVALID_ARGUMENT, "out is one array, wanted (scale, scale_inv)")
    made = tuple(new_like(view, view.shape, _ffi.DTYPE_F32) for _ in range(2)) if out is None else tuple(out)
    args = _ffi.Fp8ScaleArgs(ctypes.sizeof(_ffi.Fp8ScaleArgs), _ffi.FP8_POW2 if pow2 else 0)
    args.amax = parts.add(records, view)
    args.scale, args.scale_inv = (parts.add(records, output_of(one, "out", target.queue)) for one in made)
    args.format, args.margin = FORMATS[parts.format_name(format)], _small(margin, "margin")
    args.eps, args.amax_limit = _arrays.number(eps, "eps"), _arrays.number(amax_limit, "amax_limit")
    try:
        _ffi.check(_ffi.library().cqsa_fp8_scale_from_amax(target.context.handle, args, target.stream))
    finally:
        parts.finish(target)
    tell_written(*(out or ()))
    return given(made[0]), given(made[1])


def fp8_scale_relayout(scales: Operand, block_rows: int, block_columns: int, *, layout: str = "rows", layout_out: str = "rows", dtype_out: Any = None,
                       out: Any = None, backend: str = "auto", stream: Any = None) -> Any:
    """Scales ``[block_rows, block_columns]`` in another layout, as scale_layout of fp8_quantize() has them, or of another type.

    dtype_out: "float32" or "e8m0", which rounds up to powers of two; None: that of scales. out: array to write.
    """
    target = choose_in_place(backend, stream, ("scales", scales), ("out", out))
    view = parts.scales_view(scales, "scales", target.queue)
    grid = _arrays.integer(block_rows, "block_rows"), _arrays.integer(block_columns, "block_columns")
    layouts = [parts.LAYOUTS[parts.one_of(one, name, parts.LAYOUTS)] for one, name in ((layout, "layout"), (layout_out, "layout_out"))]
    kind = parts.one_of(dtype_out, "dtype_out", (None, "float32", "e8m0"))
    code = (_ffi.DTYPE_F32 if view.code == _ffi.DTYPE_F32 else _ffi.DTYPE_U8) if kind is None else _ffi.DTYPE_F32 if kind == "float32" else _ffi.DTYPE_U8
    made = parts.new_scales(view, grid, (1, 1), layout_out, code) if out is None else out
    try:
        _relayout(target, view, view.code, layouts[0], output_of(made, "out", target.queue), layouts[1], grid)
    finally:
        parts.finish(target)
    tell_written(out)
    return given(made)


def _relayout(target: Target, scales: View, code: int, layout: int, out: View, layout_out: int, grid: Tuple[int, int]) -> None:
    records = Records()
    _ffi.check(_ffi.library().cqsa_fp8_scale_relayout(target.context.handle, records.add(scales, code), layout, parts.add(records, out), layout_out,
                                                      *grid, target.stream))


def fp8_transpose(x: Operand, *, out: Any = None, backend: str = "auto", stream: Any = None) -> Any:
    """``x.T``, compact, of a matrix of elements of one byte. out: array to write."""
    target = choose_in_place(backend, stream, ("x", x), ("out", out))
    view, records = view_of(x, "x", target.queue), Records()
    if len(view.shape) != 2 or view.itemsize != 1:
        raise error_for(ERROR_SHAPE, f"x is {type_name(view.code)} of shape {list(view.shape)}, wanted two axes of one-byte elements")
    made = new_like(view, view.shape[::-1]) if out is None else out
    to = output_of(made, "out", target.queue)
    try:
        _ffi.check(_ffi.library().cqsa_fp8_transpose(target.context.handle, parts.add(records, view), parts.add(records, to), target.stream))
    finally:
        parts.finish(target)
    tell_written(out)
    return given(made)
