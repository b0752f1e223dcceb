# SPDX-License-Identifier: Apache-2.0
"""One context per backend and device, made at first use and kept; the state of the backends."""

from __future__ import annotations

import ctypes
import json
import os
import re
import threading
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from . import _ffi
from ._errors import ERROR_DEVICE, ERROR_INVALID_ARGUMENT, error_for


class Context(NamedTuple):
    handle: int  # cqsa_context*, never destroyed: plans and running calls may hold it
    backend: str
    is_host: bool  # the backend computes in host memory, so that the host budget is the one that binds
    device: int = 0


_contexts: Dict[Tuple[str, Optional[int]], Context] = {}
_lock = threading.Lock()
_INDEXED = re.compile(r"([a-z0-9_]+):(\d{1,4})")


def context_for(backend: str, device: Optional[int] = None) -> Context:
    """The context of a backend ("auto", "cpu", "cuda", "cuda:1", ..) and a device of it, None: its first. Thread-safe."""
    context = _contexts.get((backend, device)) if type(backend) is str else None
    return context if context is not None else _create(backend, device)


def _create(backend: Any, device: Optional[int]) -> Context:
    if not isinstance(backend, str):
        raise error_for(ERROR_INVALID_ARGUMENT, f"backend is {backend!r}, wanted a name such as 'auto' or 'cpu'")
    if not backend.isascii() or "\0" in backend:
        raise error_for(ERROR_INVALID_ARGUMENT, f"backend is {backend!r}, wanted letters, digits and _")
    named = _INDEXED.fullmatch(backend)
    index = int(named.group(2)) if named else None
    if index is not None and device is not None and index != device:
        raise error_for(ERROR_DEVICE, f"backend is {backend!r}, but the operands are on its device {device}")
    with _lock:
        if (backend, device) not in _contexts:
            wanted = (named.group(1) if named else backend, index if index is not None else device or 0)
            _contexts[backend, device] = _contexts[wanted] = _contexts.get(wanted) or _new_context(*wanted)
        return _contexts[backend, device]


def _new_context(backend: str, device: int) -> Context:
    library = _ffi.library()
    params = _ffi.ContextParams(ctypes.sizeof(_ffi.ContextParams))
    params.backend, params.device = backend.encode(), device
    handle = ctypes.c_void_p()
    _ffi.check(library.cqsa_context_create(ctypes.byref(params), ctypes.byref(handle)))
    assert handle.value is not None
    name = library.cqsa_context_backend(handle).decode()
    known = _contexts.get((name, device))  # "auto" is another name of it
    if known is not None:
        library.cqsa_context_destroy(handle)
        return known
    context = _contexts[name, device] = Context(handle.value, name, name == "cpu", device)
    return context


def reason_of(backend: str) -> str:
    """Why a backend is not ready: "no_driver: libcuda.so.1 was not found"; "" when it is."""
    for found in backends():
        if found["name"] == backend and not found["ready"]:
            return f"{found['state']}: {found['reason']}"
    return ""


def backends() -> List[Dict[str, Any]]:
    """The backends this version knows and whether each can be used here.

    A list of dicts, "cpu" first: `name`; `ready` (bool); `state` ("ready", "not_found", "load_failed", "abi_mismatch",
    "no_driver", "no_device", "no_device_code"); `reason` (why it is not ready, else ""); `device` (name of device 0);
    `device_count`. Asking loads the plugins that are installed.
    """
    library = _ffi.library()
    found: List[Dict[str, Any]] = []
    index = 0
    while True:
        name = library.cqsa_backend_name(index)
        if name is None:
            return found
        info = _ffi.BackendInfo(ctypes.sizeof(_ffi.BackendInfo))
        _ffi.check(library.cqsa_backend_query(name, None, ctypes.byref(info)))
        states = _ffi.BACKEND_STATES
        found.append({
            "name": name.decode(),
            "ready": info.state == 0,
            "state": states[info.state] if 0 <= info.state < len(states) else "unknown",
            "reason": info.reason.decode("utf-8", "replace"),
            "device": info.device.decode("utf-8", "replace"),
            "device_count": info.device_count,
        })
        index += 1


def hardware(backend: str, device: Optional[int] = None) -> Dict[str, Any]:
    """The measured properties of a backend's device; the first call takes up to a second."""
    context = context_for(backend, device)
    text: Dict[str, Any] = json.loads(_ffi.text_of(_ffi.library().cqsa_context_hardware, context.handle))
    return text


def _after_fork_in_child() -> None:
    # The parent's worker threads are not here, and another of its threads may have held the lock.
    global _lock
    _lock = threading.Lock()
    _contexts.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
