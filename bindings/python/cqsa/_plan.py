# SPDX-License-Identifier: Apache-2.0
"""Plans: how attention would run, without running it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from typing import Any, Callable, Dict, Iterator, Optional, Tuple, Union

from . import _arrays, _ffi
from ._context import context_for
from ._errors import ERROR_INVALID_ARGUMENT, error_for
from ._sources import view_of
from ._views import stand_in


@contextlib.contextmanager
def plan_handle(create: Callable[..., int], *arguments: Any) -> Iterator[int]:
    """A cqsa_plan* from one of the two functions that make one, destroyed at the end."""
    handle = ctypes.c_void_p()
    _ffi.check(create(*arguments, ctypes.byref(handle)))
    assert handle.value is not None
    try:
        yield handle.value
    finally:
        _ffi.library().cqsa_plan_destroy(handle)


def plan_line(plan: int, run: Optional[_ffi.RunInfo] = None) -> str:
    return _ffi.text_of(_ffi.library().cqsa_plan_line, plan, None if run is None else ctypes.addressof(run))


def plan_numbers(plan: int) -> Dict[str, Any]:
    """cqsa_plan_info as a dict."""
    info = _ffi.PlanInfo(ctypes.sizeof(_ffi.PlanInfo))
    _ffi.check(_ffi.library().cqsa_plan_describe(plan, ctypes.byref(info)))
    return {
        "schedule": _ffi.SCHEDULES[info.schedule],
        "implementation": info.implementation.decode(),
        "backend": info.backend.decode(),
        "c": info.cqs_c,
        "itr": info.cqs_itr,
        "tasks": info.tasks,
        "in_flight": info.in_flight,
        "tile_q": info.tile_q,
        "tile_k": info.tile_k,
        "place_q": _ffi.MEMORIES[info.place_q],
        "place_kv": _ffi.MEMORIES[info.place_kv],
        "place_acc": _ffi.MEMORIES[info.place_acc],
        "place_out": _ffi.MEMORIES[info.place_out],
        "peak_device_bytes": info.peak_device_bytes,
        "peak_host_bytes": info.peak_host_bytes,
        "peak_pinned_bytes": info.peak_pinned_bytes,
        "workspace_bytes": info.workspace_bytes,
        "bytes_in": info.bytes_in,
        "bytes_out": info.bytes_out,
        "flops": info.flops,
        "seconds": info.seconds,
    }


def run_numbers(run: _ffi.RunInfo) -> Dict[str, Any]:
    """cqsa_run_info as a dict."""
    names = ("peak_device_bytes", "peak_host_bytes", "peak_pinned_bytes", "bytes_in", "bytes_out", "tasks", "seconds",
             "retries")
    return {name: getattr(run, name) for name in names}


class Plan:
    """How one call of attention() would run: schedule, tiles, bytes, seconds. Made by attention_plan()."""

    __slots__ = ("_numbers", "_line", "_explanation", "_json")

    def __init__(self, plan: int) -> None:
        library = _ffi.library()
        self._numbers = plan_numbers(plan)
        self._line = plan_line(plan)
        self._explanation = _ffi.text_of(library.cqsa_plan_explain, plan)
        self._json = _ffi.text_of(library.cqsa_plan_json, plan)

    def describe(self) -> Dict[str, Any]:
        """The plan in numbers; bytes, seconds and floating-point operations. The peaks are never exceeded by the run."""
        return dict(self._numbers)

    def line(self) -> str:
        """The plan in one line that states every automatic choice."""
        return self._line

    def explain(self) -> str:
        """Why this plan: every candidate and why it lost. Several lines."""
        return self._explanation

    def json(self) -> str:
        """The plan as a JSON object."""
        return self._json

    def __repr__(self) -> str:
        return f"<cqsa.Plan {self._line}>"


Hardware = Union[str, "os.PathLike[str]", Dict[str, Any], None]


def attention_plan(q: Any, k: Any, v: Any = None, *, hardware: Hardware = None, backend: str = "auto",
                   dtype: _arrays.DtypeName = None, **keywords: Any) -> Plan:
    """How ``attention(q, k, v, ..)`` would run, without running it; no operand is read but the lengths and page ids.

    q, k, v: arrays, or shapes as tuples of integers; v None is k's shape. mask, bias, k_scale, v_scale, alibi_slopes and
    sinks may be shapes too.
    dtype: as in attention(); for shapes also the type of q, k and v: "float32" (the default), "float16", "bfloat16", or two
    names, ``("float16", "int8")``, for q and for k and v.
    hardware: the machine to plan for, which need not be here: a dict, JSON text or the path of a JSON file (docs/planning.md;
    ``doctor()["hardware"]`` has this machine's). None: the device of `backend`.
    All other keywords are those of attention(); progress and stream do nothing here.

    Raises what attention() would raise: MemoryError when no schedule fits the limits, and so on.
    """
    from ._attention import Call
    from ._queue import Target, choose

    for ignored in ("progress", "stream", "return_info"):
        keywords.pop(ignored, None)
    operands = {"q": q, "k": k, "v": k if v is None else v}
    operands.update({name: keywords.pop(name) for name in _SHAPED if name in keywords})
    operands, dtype = _with_stand_ins(operands, dtype)
    machine = None if hardware is None else hardware_text(hardware)
    q, k, v = (view_of(operands.pop(name), name) for name in "qkv")
    if machine is None:
        target = choose(backend, None, ("q", q), ("k", k), ("v", v))
    else:
        target = Target(context_for("cpu")._replace(is_host=bool(json.loads(machine).get("host", False))))
    context = target.context
    keywords.setdefault("out", stand_in(q.shape[:-1] + v.shape[-1:], "out", q.code, len(_SHAPED) + 4, q.device))
    call = Call(target, q, k, v, dtype=dtype, **operands, **keywords)
    library = _ffi.library()
    _ffi.check(library.cqsa_attention_params_of(context.handle, call.args, call.params))
    if machine is not None:
        with plan_handle(library.cqsa_attention_plan_create_for, machine.encode(), call.params) as plan:
            return Plan(plan)
    with plan_handle(library.cqsa_attention_plan_create, context.handle, call.params) as plan:
        return Plan(plan)


_SHAPED = ("mask", "bias", "k_scale", "v_scale", "alibi_slopes", "sinks")


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(hasattr(size, "__index__") for size in value)


def _with_stand_ins(operands: Dict[str, Any], dtype: _arrays.DtypeName) -> Tuple[Dict[str, Any], _arrays.DtypeName]:
    """Operands given as shapes become arrays without memory."""
    if not any(_is_shape(value) for value in operands.values()):
        return operands, dtype
    given = _arrays.named_types(dtype)
    _arrays.dtype_names(given)
    of_q = given[0] if given else "float32"
    of_kv = given[1] if len(given) > 1 else of_q
    of_scale = "float16" if of_kv == "int8" else "float32"
    types = {"q": of_q, "k": of_kv, "v": of_kv, "k_scale": of_scale, "v_scale": of_scale, "bias": of_q}
    result = {
        name: stand_in(value, name, _ffi.DTYPE_BOOL if name == "mask" else _arrays.code_of(types.get(name, "float32")), slot)
        if _is_shape(value) else value
        for slot, (name, value) in enumerate(operands.items(), start=1)
    }
    return result, given or None


def hardware_text(hardware: Hardware) -> str:
    if isinstance(hardware, dict):
        return json.dumps(hardware)
    if isinstance(hardware, str) and hardware.lstrip().startswith("{"):
        text = hardware
    elif isinstance(hardware, (str, os.PathLike)):
        with open(hardware, encoding="utf-8") as file:
            text = file.read()
    else:
        raise error_for(ERROR_INVALID_ARGUMENT,
                        f"hardware is {type(hardware).__name__}, wanted a dict, JSON text or the path of a JSON file")
    try:
        if isinstance(json.loads(text), dict):
            return text
    except (ValueError, RecursionError):
        pass
    raise error_for(ERROR_INVALID_ARGUMENT, "hardware is not a JSON object")
