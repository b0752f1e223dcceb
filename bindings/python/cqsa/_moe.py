# SPDX-License-Identifier: Apache-2.0
"""moe_prefill(): a mixture-of-experts layer straight from quantized weights."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from . import _arrays, _ffi, _torch
from ._errors import ERROR_DTYPE, ERROR_INVALID_ARGUMENT, ERROR_SHAPE, error_for
from ._jax import DeviceMemory
from ._quant import QuantTensor, _strides, quant_formats
from ._queue import Queue, Target, choose_in_place
from ._sources import new_like, output_of, view_of
from ._views import Records, View

if TYPE_CHECKING:
    from ._arrays import DtypeName
    from ._sources import Operand

_PLAIN = {_ffi.DTYPE_F32: "F32", _ffi.DTYPE_F16: "F16", _ffi.DTYPE_BF16: "BF16"}


class MoeInfo(NamedTuple):
    """What a call of moe_prefill() did."""

    implementation: str  # "cpu_avx2"
    precision: Dict[str, str]  # how activations were taken, for each projection
    pieces: int  # that the tokens went through in
    workspace_bytes: int
    text: str  # all of it, and why earlier implementations declined


def moe_prefill(
    x: Operand,
    topk_ids: Operand,
    topk_weights: Optional[Operand],
    w_gate: Any,
    w_up: Any,
    w_down: Any,
    *,
    activation: str = "swiglu",
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: Optional[float] = None,
    b_gate: Optional[Operand] = None,
    b_up: Optional[Operand] = None,
    b_down: Optional[Operand] = None,
    output: str = "combined",
    precision: str = "auto",
    gate_up_layout: str = "separate",
    expert_map: Optional[Operand] = None,
    shared: Any = None,
    memory_limit: Any = None,
    backend: str = "auto",
    batch_invariant: bool = False,
    dtype: DtypeName = None,
    out: Any = None,
    return_info: bool = False,
    stream: Any = None,
) -> Any:
    """``out[t] = sum_s topk_weights[t, s] * w_down[e] act(w_gate[e] x[t], w_up[e] x[t])`` with ``e = topk_ids[t, s]``.

    x: float32, float16 or bfloat16 ``[tokens, hidden]``.
    topk_ids: integers ``[tokens, k]``; -1 contributes nothing. topk_weights: ``[tokens, k]``, may be None with output="per_slot".
    w_gate, w_up: ``[inter, hidden]`` for each expert, w_down ``[hidden, inter]``: a float array ``[experts, rows, cols]``, a QuantTensor with an axis
        of experts, or a list with a QuantTensor for each (None: not here). Without a gate w_gate is None; concatenated or interleaved,
        both are in w_gate and w_up is None.
    activation: "swiglu" (``G = min(g, limit)``, ``U = clip(u, -limit, limit)``: ``G * sigmoid(alpha * G) * (U + beta)``), "geglu", "geglu_tanh"; without
        a gate "silu", "gelu", "gelu_tanh", "relu2".
    b_gate, b_up, b_down: float32 ``[experts, rows]``.
    output: "combined", or "per_slot": float32 ``[tokens * k, hidden]``, not weighted.
    precision: "q8" (activations rounded to int8 in groups of 32, integer products), "f16" (not rounded), "auto" (q8).
    gate_up_layout: "separate", "concat" (rows of gate first), "interleaved" (even rows are gate's).
    expert_map: ``[ids]``: the expert of the weights for each id, -1 for one that is elsewhere.
    shared: ``(w_gate, w_up, w_down)`` or ``(w_gate, w_up, w_down, gate)`` or a dict with these names, an expert for every token, times the sigmoid of its gate:
        ``[hidden]``, which is multiplied by x, or ``[tokens, 1]``, the gates themselves.
    memory_limit: the most workspace, in bytes or as "512MiB": tokens then go through in pieces.
    batch_invariant: a token's bits do not depend on the others.
    dtype: what the bits of uint16 arrays are. out: array to write; None makes one of x's type. return_info: also a MoeInfo.
    stream: as in attention(); on a device the work is queued.
    """
    target = choose_in_place(backend, stream, ("x", x), ("out", out))
    call = _Call(target, _arrays.dtype_names(dtype))
    call.numbers(activation, (alpha, beta, limit), output, precision, gate_up_layout, memory_limit, batch_invariant)
    rows = call.input("x", x)
    call.routing(topk_ids, topk_weights, expert_map)
    call.weights(call.args, "", w_gate, w_up, w_down)
    for name, bias in (("b_gate", b_gate), ("b_up", b_up), ("b_down", b_down)):
        if bias is not None:
            call.small(name, bias)
    call.shared(shared)
    made = call.output(out, rows, output == "per_slot")
    info = call.info() if return_info else None
    call.run()
    if out is not None and _torch.is_tensor(out):
        _torch.was_written(out)
    result = made.to_jax() if type(made) is DeviceMemory else made
    return (result, info) if return_info else result


class _Call:
    """The cqsa_moe_args of one call, and all that it points to."""

    def __init__(self, target: Target, names: _arrays.Names) -> None:
        self.args = _ffi.MoeArgs(ctypes.sizeof(_ffi.MoeArgs))
        self._target, self._names, self._records = target, names, Records()
        self._keep: List[Any] = []
        self._code = 0
        self._slots = (0, 0)

    def numbers(self, activation: str, swiglu: Tuple[Any, Any, Any], output: str, precision: str, layout: str, memory_limit: Any, invariant: bool) -> None:
        args = self.args
        args.activation = _one_of(activation, "activation", _ffi.MOE_ACTIVATIONS)
        args.output = _one_of(output, "output", _ffi.MOE_OUTPUTS)
        args.precision = _one_of(precision, "precision", _ffi.MOE_PRECISIONS)
        args.gate_up_layout = _one_of(layout, "gate_up_layout", _ffi.MOE_LAYOUTS)
        args.max_bytes = _arrays.memory_bytes(memory_limit, "memory_limit")
        args.flags = _ffi.MOE_BATCH_INVARIANT if invariant else 0
        alpha, beta = _arrays.number(swiglu[0], "alpha"), _arrays.number(swiglu[1], "beta")
        limit = 0.0 if swiglu[2] is None else _arrays.number(swiglu[2], "limit")
        if alpha == 0:
            raise error_for(ERROR_INVALID_ARGUMENT, "alpha is 0, wanted another number")
        if swiglu[2] is not None and not limit > 0:
            raise error_for(ERROR_INVALID_ARGUMENT, f"limit is {limit}, wanted a number above 0, or None")
        args.alpha, args.beta, args.limit = 0.0 if alpha == 1 else alpha, beta, 0.0 if math.isinf(limit) else limit

    def input(self, name: str, operand: Any) -> View:
        view = view_of(operand, name, self._target.queue)
        code = _arrays.float_code(view, name, self._names)
        if name == "x":
            self._code = code
        setattr(self.args, name, self._records.add(view, code))
        return view

    def small(self, name: str, values: Any) -> None:
        view = _arrays.small_floats(values, name, self._target.queue)
        setattr(self.args, name, self._records.add(view, view.code))

    def routing(self, topk_ids: Any, topk_weights: Any, expert_map: Any) -> None:
        side = self._target.queue
        ids = _arrays.small_integers(topk_ids, "topk_ids", side)
        self.args.topk_ids = self._records.add(ids, ids.code)
        self._slots = (ids.shape[0], ids.shape[1]) if len(ids.shape) == 2 else (0, 0)
        if topk_weights is not None:
            self.small("topk_weights", topk_weights)
        if expert_map is not None:
            view = int32s(expert_map, "expert_map", side)
            self.args.expert_map = self._records.add(view, view.code)

    def weights(self, to: Any, base: str, w_gate: Any, w_up: Any, w_down: Any) -> None:
        for name, given in (("w_gate", w_gate), ("w_up", w_up), ("w_down", w_down)):
            if given is not None:
                record = _weights_of(given, base + name, self._names, self._target.queue, self._keep)
                setattr(to, name, ctypes.addressof(record))

    def shared(self, given: Any) -> None:
        if given is None:
            return
        w_gate, w_up, w_down, gate = _shared_parts(given)
        record = _ffi.MoeShared(ctypes.sizeof(_ffi.MoeShared))
        self.weights(record, "shared ", w_gate, w_up, w_down)
        if gate is not None:
            view = _arrays.small_floats(gate, "shared gate", self._target.queue)
            record.gate = self._records.add(view, view.code)
        self._keep.append(record)
        self.args.shared = ctypes.addressof(record)

    def output(self, out: Any, rows: View, per_slot: bool) -> Any:
        if len(rows.shape) != 2:
            raise error_for(ERROR_SHAPE, f"x has shape {list(rows.shape)}, wanted [tokens, hidden]")
        shape = (self._slots[0] * self._slots[1] if per_slot else rows.shape[0], rows.shape[1])
        code = _ffi.DTYPE_F32 if per_slot else self._code
        made = new_like(rows, shape, code if per_slot else None) if out is None else out
        view = output_of(made, "out", self._target.queue)
        self.args.out = self._records.add(view, code if out is None else _arrays.float_code(view, "out", self._names))
        return made

    def info(self) -> MoeInfo:
        text = _ffi.text_of(_ffi.library().cqsa_moe_explain, self._target.context.handle, self.args)
        lines = text.splitlines()
        taken = {line.split(":")[0].split(" ")[0]: line.rsplit("activations ", 1)[1] for line in lines if ", activations " in line}
        words = next(line for line in lines if line.endswith("bytes of workspace")).split()
        return MoeInfo(lines[0][len("impl="):], taken, int(words[3]), int(words[5]), text)

    def run(self) -> None:
        queue = self._target.queue
        try:
            memory = self._memory_of_graph(queue) if queue is not None and queue.is_captured() else None
            _ffi.check(_ffi.library().cqsa_moe_prefill(self._target.context.handle, self.args, self._target.stream))
            del memory
        finally:
            if queue is not None:
                queue.finish()

    def _memory_of_graph(self, queue: Queue) -> Any:
        """While a graph is captured the library allocates nothing; the memory must be the graph's own."""
        size = ctypes.c_uint64(0)
        _ffi.check(_ffi.library().cqsa_moe_workspace(self._target.context.handle, self.args, ctypes.byref(size)))
        memory = queue.new_workspace(size.value) if size.value else None
        if memory is not None:
            self.args.workspace, self.args.workspace_bytes = memory.data_ptr(), size.value
        return memory


def _one_of(value: Any, name: str, names: Sequence[str]) -> int:
    if value not in names:
        raise error_for(ERROR_INVALID_ARGUMENT, f"{name} is {value!r}, wanted one of {', '.join(map(repr, names))}")
    return names.index(value)


def int32s(values: Any, name: str, side: Optional[Queue]) -> View:
    """A small list as i32."""
    view = _arrays.small_integers(values, name, side)
    if view.code == _ffi.DTYPE_I32:
        return view
    if side is not None:
        return view_of(side.converted(view.owner, "int32", name), name, side)
    array = view.array(name)
    if array.size and not -1 << 31 <= array.min() <= array.max() < 1 << 31:
        raise error_for(ERROR_INVALID_ARGUMENT, f"{name} has {array.min()} to {array.max()}, which are no int32")
    return view_of(array.astype("int32"), name)


# ---------------------------------------------------------------------------------------------------------------------
# Weights
# ---------------------------------------------------------------------------------------------------------------------


def _weights_of(given: Any, name: str, names: _arrays.Names, queue: Optional[Queue], keep: List[Any]) -> _ffi.MoeWeights:
    record = _ffi.MoeWeights(ctypes.sizeof(_ffi.MoeWeights))
    keep.append(record)
    if isinstance(given, (list, tuple)) and any(part is None or isinstance(part, QuantTensor) for part in given):
        _list_of(given, name, record, queue, keep)
    elif isinstance(given, QuantTensor):
        _whole_of(given._view, given.format, given.cols, name, record, queue)
        keep.append(given)
    else:
        view = view_of(given, name, queue)
        code = _arrays.float_code(view, name, names)
        if code not in _PLAIN:
            raise error_for(ERROR_DTYPE, f"{name} is {view.code}, wanted a QuantTensor, or float32, float16 or bfloat16")
        keep.append(view)
        _whole_of(view, _PLAIN[code], view.shape[-1] if view.shape else 0, name, record, queue)
    return record


def _whole_of(view: View, format: str, cols: int, name: str, record: _ffi.MoeWeights, queue: Optional[Queue]) -> None:
    """[experts, rows, ..] as one block of memory; of two axes: one expert."""
    if len(view.shape) not in (2, 3):
        raise error_for(ERROR_SHAPE, f"{name} has shape {list(view.shape)}, wanted [experts, rows, cols]")
    strides = tuple(stride * view.itemsize for stride in _strides(view))
    if strides[-1] != view.itemsize or min(strides) < 0:
        raise error_for(ERROR_SHAPE, f"{name} has strides {list(_strides(view))}, wanted rows whose elements lie one after the other")
    record.num_experts = view.shape[0] if len(view.shape) == 3 else 1
    record.rows, record.row_elements = view.shape[-2], cols
    record.expert_bytes = strides[0] if len(view.shape) == 3 and view.shape[0] > 1 else 0
    _fill(record.all, view, format, strides[-2] if view.shape[-2] > 1 else 0, queue, name)


def _list_of(given: Sequence[Any], name: str, record: _ffi.MoeWeights, queue: Optional[Queue], keep: List[Any]) -> None:
    there = [part for part in given if part is not None]
    if not there or any(not isinstance(part, QuantTensor) or part.experts is not None for part in there):
        raise error_for(ERROR_INVALID_ARGUMENT, f"{name} is a list, wanted a QuantTensor of two axes for each expert, or None for one that is not here")
    rows, cols = there[0].shape
    experts = (_ffi.MoeMatrix * len(given))()
    for index, part in enumerate(given):
        if part is None:
            experts[index].format = quant_formats()[there[0].format].id
            continue
        if part.shape != (rows, cols):
            raise error_for(ERROR_SHAPE, f"{name}[{index}] has shape {list(part.shape)}, wanted {[rows, cols]} as the others")
        _fill(experts[index], part._view, part.format, _strides(part._view)[0] if rows > 1 else 0, queue, name)
    keep += [experts, there]
    record.num_experts, record.rows, record.row_elements = len(given), rows, cols
    record.experts = ctypes.addressof(experts)


def _fill(matrix: _ffi.MoeMatrix, view: View, format: str, row_bytes: int, queue: Optional[Queue], name: str) -> None:
    if queue is not None:
        queue.take(view, name)
    matrix.data, matrix.row_bytes, matrix.format = view.address, row_bytes, quant_formats()[format].id
    matrix.device_type, matrix.device_id = view.device


def _shared_parts(given: Any) -> Tuple[Any, Any, Any, Any]:
    names = ("w_gate", "w_up", "w_down", "gate")
    if isinstance(given, dict) and set(given) <= set(names) and given.get("w_down") is not None:
        return given.get("w_gate"), given.get("w_up"), given["w_down"], given.get("gate")
    if isinstance(given, (tuple, list)) and len(given) in (3, 4):
        return given[0], given[1], given[2], given[3] if len(given) == 4 else None
    raise error_for(ERROR_INVALID_ARGUMENT, "shared is neither (w_gate, w_up, w_down), nor that with a gate behind it, nor a dict with these names")
