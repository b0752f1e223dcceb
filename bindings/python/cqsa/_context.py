# SPDX-License-Identifier: Apache-2.0
"""One context per backend, made at first use and kept; the state of the backends."""

from __future__ import annotations

import ctypes
import json
import os
import threading
from typing import Any, Dict, List, NamedTuple

from . import _ffi
from ._errors import ERROR_INVALID_ARGUMENT, error_for


class Context(NamedTuple):
    handle: int  # cqsa_context*, never destroyed: plans and running calls may hold it
    backend: str
    is_host: bool  # the backend computes in host memory, so that the host budget is the one that binds


_contexts: Dict[str, Context] = {}
_lock = threading.Lock()


def context_for(backend: str) -> Context:
    """The context of a backend ("auto", "cpu", "cuda", ..). Thread-safe."""
    context = _contexts.get(backend)
    return context if context is not None else _create(backend)


def _create(backend: Any) -> Context:
    if not isinstance(backend, str):
        raise error_for(ERROR_INVALID_ARGUMENT, f"backend is {backend!r}, wanted a name such as 'auto' or 'cpu'")
    if not backend.isascii() or "\0" in backend:
        raise error_for(ERROR_INVALID_ARGUMENT, f"backend is {backend!r}, wanted letters, digits and _")
    library = _ffi.library()
    with _lock:
        if backend in _contexts:
            return _contexts[backend]
        params = _ffi.ContextParams(ctypes.sizeof(_ffi.ContextParams))
        params.backend = backend.encode()
        handle = ctypes.c_void_p()
        _ffi.check(library.cqsa_context_create(ctypes.byref(params), ctypes.byref(handle)))
        assert handle.value is not None
        name = library.cqsa_context_backend(handle).decode()
        context = Context(handle.value, name, name == "cpu")
        _contexts[backend] = context
        return context


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


def hardware(backend: str) -> Dict[str, Any]:
    """The measured properties of a backend's device; the first call takes up to a second."""
    context = context_for(backend)
    text: Dict[str, Any] = json.loads(_ffi.text_of(_ffi.library().cqsa_context_hardware, context.handle))
    return text


def _after_fork_in_child() -> None:
    # The parent's worker threads are not here, and another of its threads may have held the lock.
    global _lock
    _lock = threading.Lock()
    _contexts.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
