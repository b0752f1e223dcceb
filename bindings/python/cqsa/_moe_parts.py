# SPDX-License-Identifier: Apache-2.0
"""The parts of a mixture of experts: moe_route(), moe_group(), moe_quantize_activations(), moe_combine()."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Tuple

from . import _arrays, _ffi, _torch
from ._errors import ERROR_DTYPE, ERROR_INVALID_ARGUMENT, ERROR_SHAPE, error_for
from ._jax import DeviceMemory
from ._moe import _one_of, int32s
from ._queue import Target, choose_in_place
from ._sources import new_like, output_of, view_of
from ._views import Records, View

if TYPE_CHECKING:
    from ._arrays import DtypeName
    from ._sources import Operand


class MoeGroups(NamedTuple):
    """Slots ``t * k + s`` by their experts."""

    offsets: Any  # [experts + 1]: expert e has order[offsets[e]:offsets[e + 1]]
    order: Any  # [tokens * k]: slots, within an expert in their own order; -1 past the last
    counts: Any  # [experts]
    places: Any  # [tokens, k]: where a slot is in order; -1: nowhere


def moe_route(logits: Operand, topk: int, *, scoring: str = "softmax", renormalise: bool = False, bias: Optional[Operand] = None,
              num_groups: Optional[int] = None, topk_groups: Optional[int] = None, group_score: str = "max", scale: float = 1.0,
              dtype: DtypeName = None, id_dtype: str = "int32", backend: str = "auto", stream: Any = None) -> Tuple[Any, Any]:
    """The topk experts of each token: their ids ``[tokens, topk]`` and float32 weights ``[tokens, topk]``, best first, ties to the lower id.

    logits: float32, float16 or bfloat16 ``[tokens, experts]``. scoring: "softmax" over all experts, or "sigmoid". bias: ``[experts]``, added for the choice
    only. renormalise: the weights are divided by their sum. num_groups, topk_groups: only experts of the best groups may be chosen; group_score: "max", or
    "top2", the sum of a group's best two. scale: a factor for the weights. id_dtype: "int32" or "int64".
    """
    target = choose_in_place(backend, stream, ("logits", logits))
    records, args = Records(), _ffi.MoeRouteArgs(ctypes.sizeof(_ffi.MoeRouteArgs))
    view = view_of(logits, "logits", target.queue)
    args.logits = records.add(view, _arrays.float_code(view, "logits", _arrays.dtype_names(dtype)))
    if len(view.shape) != 2:
        raise error_for(ERROR_SHAPE, f"logits has shape {list(view.shape)}, wanted [tokens, experts]")
    args.scoring = _one_of(scoring, "scoring", _ffi.MOE_SCORINGS)
    args.group_score = _one_of(group_score, "group_score", _ffi.MOE_GROUP_SCORES)
    args.flags = _ffi.MOE_RENORMALISE if renormalise else 0
    args.num_groups = 0 if num_groups is None else _small(num_groups, "num_groups")
    args.topk_groups = 0 if topk_groups is None else _small(topk_groups, "topk_groups")
    args.scale = _factor(scale)
    if bias is not None:
        args.bias = _add(records, _arrays.small_floats(bias, "bias", target.queue))
    shape = (view.shape[0], _small(topk, "topk"))
    code = _ffi.DTYPE_I32 if _one_of(id_dtype, "id_dtype", ("int32", "int64")) == 0 else _ffi.DTYPE_I64
    ids, weights = new_like(view, shape, code), new_like(view, shape, _ffi.DTYPE_F32)
    args.topk_ids = _add(records, output_of(ids, "topk_ids", target.queue))
    args.topk_weights = _add(records, output_of(weights, "topk_weights", target.queue))
    _run(target, "cqsa_moe_route", args)
    return _given(ids), _given(weights)


def moe_group(topk_ids: Operand, num_experts: int, *, expert_map: Optional[Operand] = None, backend: str = "auto", stream: Any = None) -> MoeGroups:
    """The slots of a routing by their experts, stable; -1 is nowhere. Arrays of int32, of int64 where there are more slots than that counts."""
    target = choose_in_place(backend, stream, ("topk_ids", topk_ids))
    records, args = Records(), _ffi.MoeGroupArgs(ctypes.sizeof(_ffi.MoeGroupArgs))
    ids = _arrays.small_integers(topk_ids, "topk_ids", target.queue)
    args.topk_ids = _add(records, ids)
    if len(ids.shape) != 2:
        raise error_for(ERROR_SHAPE, f"topk_ids has shape {list(ids.shape)}, wanted [tokens, k]")
    if expert_map is not None:
        args.expert_map = _add(records, int32s(expert_map, "expert_map", target.queue))
    experts, slots = _small(num_experts, "num_experts"), ids.shape[0] * ids.shape[1]
    code = _ffi.DTYPE_I32 if slots < 1 << 31 else _ffi.DTYPE_I64
    like = view_of(topk_ids, "topk_ids") if target.queue is not None else ids
    made = MoeGroups(*(new_like(like, shape, code) for shape in ((experts + 1,), (slots,), (experts,), ids.shape)))
    for name, array in zip(MoeGroups._fields, made):
        setattr(args, name, _add(records, output_of(array, name, target.queue)))
    _run(target, "cqsa_moe_group", args)
    return MoeGroups(*map(_given, made))


def moe_quantize_activations(x: Operand, *, dtype: DtypeName = None, backend: str = "auto", stream: Any = None) -> Tuple[Any, Any]:
    """int8 codes ``[rows, n]`` and float32 scales ``[rows, n / 32]`` of x, float32, float16 or bfloat16: as precision="q8" takes activations."""
    target = choose_in_place(backend, stream, ("x", x))
    records = Records()
    view = view_of(x, "x", target.queue)
    code = _arrays.float_code(view, "x", _arrays.dtype_names(dtype))
    if len(view.shape) != 2:
        raise error_for(ERROR_SHAPE, f"x has shape {list(view.shape)}, wanted [rows, n]")
    codes, scales = new_like(view, view.shape, _ffi.DTYPE_I8), new_like(view, (view.shape[0], view.shape[1] // 32), _ffi.DTYPE_F32)
    outputs = [_add(records, output_of(array, name, target.queue)) for name, array in (("codes", codes), ("scales", scales))]
    _run(target, "cqsa_moe_quantize_activations", records.add(view, code), *outputs)
    return _given(codes), _given(scales)


def moe_combine(y: Operand, topk_weights: Operand, topk_ids: Optional[Operand] = None, *, out_dtype: str = "float32", out: Any = None,
                dtype: DtypeName = None, backend: str = "auto", stream: Any = None) -> Any:
    """``out[t] = sum_s topk_weights[t, s] * y[t * k + s]``, in f32 and in order: what output="combined" makes of "per_slot".

    y: float32 ``[tokens * k, hidden]``. topk_ids: where it is below 0, and where a weight is 0, y is not looked at. out_dtype: "float32", "float16" or
    "bfloat16", of a new result. dtype: what the bits of `out` are where it is uint16.
    """
    target = choose_in_place(backend, stream, ("y", y), ("out", out))
    records, args = Records(), _ffi.MoeCombineArgs(ctypes.sizeof(_ffi.MoeCombineArgs))
    rows = view_of(y, "y", target.queue)
    args.y = records.add(rows, rows.code)
    weights = _arrays.small_floats(topk_weights, "topk_weights", target.queue)
    args.topk_weights = _add(records, weights)
    if topk_ids is not None:
        args.topk_ids = _add(records, _arrays.small_integers(topk_ids, "topk_ids", target.queue))
    if len(rows.shape) != 2 or len(weights.shape) != 2:
        raise error_for(ERROR_SHAPE, f"y has shape {list(rows.shape)} and topk_weights {list(weights.shape)}, wanted [tokens * k, hidden] and [tokens, k]")
    code = _float_code(out_dtype)
    made = new_like(rows, (weights.shape[0], rows.shape[1]), code) if out is None else out
    view = output_of(made, "out", target.queue)
    args.out = records.add(view, code if out is None else _arrays.float_code(view, "out", _arrays.dtype_names(dtype)))
    _run(target, "cqsa_moe_combine", args)
    if out is not None and _torch.is_tensor(out):
        _torch.was_written(out)
    return _given(made)


def _add(records: Records, view: View) -> int:
    return records.add(view, view.code)


def _run(target: Target, function: str, *arguments: Any) -> None:
    try:
        _ffi.check(getattr(_ffi.library(), function)(target.context.handle, *arguments, target.stream))
    finally:
        if target.queue is not None:
            target.queue.finish()


def _given(made: Any) -> Any:
    return made.to_jax() if type(made) is DeviceMemory else made


def _small(value: Any, name: str) -> int:
    count = _arrays.integer(value, name)
    if not 0 < count < 1 << 31:
        raise error_for(ERROR_INVALID_ARGUMENT, f"{name} is {count}, wanted at least 1")
    return count


def _factor(scale: Any) -> float:
    factor = _arrays.number(scale, "scale")
    if factor == 0:
        raise error_for(ERROR_INVALID_ARGUMENT, "scale is 0, wanted another number")
    return factor


def _float_code(dtype: Any) -> int:
    names = _arrays.named_types(dtype)
    if len(names) != 1 or names[0] not in ("float32", "float16", "bfloat16"):
        raise error_for(ERROR_DTYPE, f"out_dtype is {dtype!r}, wanted 'float32', 'float16' or 'bfloat16'")
    return _arrays.code_of(names[0])
