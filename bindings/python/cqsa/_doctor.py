# SPDX-License-Identifier: Apache-2.0
"""doctor(): what is installed, what works, and whether it computes the right thing."""

from __future__ import annotations

import json
import platform
from typing import Any, Dict

import numpy as np

from . import _ffi
from ._attention import attention
from ._context import backends, context_for, hardware
from ._errors import CqsaError
from ._version import __version__

# Largest difference from float64 that float32 attention over 130 keys of unit variance may have.
_TOLERANCE = 1e-5


def doctor() -> Dict[str, Any]:
    """Examines this installation; takes about a second, most of it measuring the device.

    Returns a dict: `version` (of this package); `python`, `numpy`; `library` (`path`, `version`, `abi`, `build`);
    `backends` (as backends(), and for a ready one `check`: `ok`, `max_abs_error` against float64, `error`; and `devices`: for
    each its `hardware` and its own `check`, with operands in host memory); `backend` (what "auto" means here); `hardware`
    (its device, as attention_plan() reads it); `ok` (every device of every ready backend is exact).
    """
    library = _ffi.library()
    found = backends()
    for backend in found:
        if backend["ready"]:
            backend["devices"] = [_examine(backend["name"], index) for index in range(max(backend["device_count"], 1))]
            checks = [device["check"] for device in backend["devices"]]
            backend["check"] = next((check for check in checks if not check["ok"]), checks[0])
    return {
        "version": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "library": {
            "path": _ffi.library_path(),
            "version": library.cqsa_version_string().decode(),
            "abi": library.cqsa_abi_version(),
            "build": json.loads(library.cqsa_build_info()),
        },
        "backends": found,
        "backend": context_for("auto").backend,
        "hardware": hardware("auto"),
        "ok": all(backend["check"]["ok"] for backend in found if backend["ready"]),
    }


def _examine(backend: str, device: int) -> Dict[str, Any]:
    name = f"{backend}:{device}"
    try:
        return {"hardware": hardware(name), "check": _check(name)}
    except CqsaError as error:  # a device that is there but cannot be opened
        return {"hardware": {}, "check": {"ok": False, "max_abs_error": float("nan"), "error": str(error)}}


def _check(backend: str) -> Dict[str, Any]:
    """A causal problem with shared key heads and odd sizes, against float64."""
    random = np.random.default_rng(1)
    q, k, v = (random.standard_normal(shape, np.float32) for shape in ((1, 4, 100, 40), (1, 2, 130, 40), (1, 2, 130, 24)))
    try:
        out = attention(q, k, v, causal="bottom_right", backend=backend)
    except CqsaError as error:
        return {"ok": False, "max_abs_error": float("nan"), "error": str(error)}
    logits = np.einsum("bhid,bhjd->bhij", q.astype(np.float64), k.astype(np.float64).repeat(2, 1)) / np.sqrt(40)
    logits[..., np.arange(130) > np.arange(100)[:, None] + 30] = -np.inf
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    wanted = (weights / weights.sum(-1, keepdims=True)) @ v.astype(np.float64).repeat(2, 1)
    error_size = float(np.abs(out - wanted).max())
    return {"ok": error_size <= _TOLERANCE, "max_abs_error": error_size, "error": ""}
