# SPDX-License-Identifier: Apache-2.0
"""Exceptions: each is a CqsaError and the Python exception that fits its status."""

from __future__ import annotations

from typing import Dict, Type

STATUS_NAMES: Dict[int, str] = {
    0: "CQSA_OK",
    1: "CQSA_ERROR_INVALID_ARGUMENT",
    2: "CQSA_ERROR_STRUCT_SIZE",
    3: "CQSA_ERROR_UNKNOWN_FLAG",
    4: "CQSA_ERROR_NULL_POINTER",
    5: "CQSA_ERROR_SHAPE",
    6: "CQSA_ERROR_DTYPE",
    7: "CQSA_ERROR_STRIDES",
    8: "CQSA_ERROR_DEVICE",
    9: "CQSA_ERROR_OVERLAP",
    10: "CQSA_ERROR_INDEX",
    11: "CQSA_ERROR_WORKSPACE",
    20: "CQSA_ERROR_UNSUPPORTED",
    21: "CQSA_ERROR_BACKEND_NOT_FOUND",
    22: "CQSA_ERROR_BACKEND_LOAD_FAILED",
    23: "CQSA_ERROR_ABI_MISMATCH",
    24: "CQSA_ERROR_NO_DRIVER",
    25: "CQSA_ERROR_NO_DEVICE",
    26: "CQSA_ERROR_NO_DEVICE_CODE",
    40: "CQSA_ERROR_BUDGET_TOO_SMALL",
    41: "CQSA_ERROR_OUT_OF_HOST_MEMORY",
    42: "CQSA_ERROR_OUT_OF_DEVICE_MEMORY",
    43: "CQSA_ERROR_OUT_OF_PINNED_MEMORY",
    60: "CQSA_ERROR_CANCELLED",
    61: "CQSA_ERROR_CALLBACK",
    62: "CQSA_ERROR_RUNTIME",
    63: "CQSA_ERROR_IO",
    64: "CQSA_ERROR_CHECKPOINT",
    65: "CQSA_ERROR_CAPTURE_UNSAFE",
    80: "CQSA_ERROR_INTERNAL",
}
ERROR_INVALID_ARGUMENT = 1
ERROR_SHAPE = 5
ERROR_DTYPE = 6
ERROR_STRIDES = 7
ERROR_DEVICE = 8
ERROR_INDEX = 10
ERROR_WORKSPACE = 11
ERROR_UNSUPPORTED = 20
ERROR_NO_DRIVER = 24
ERROR_OUT_OF_DEVICE_MEMORY = 42
ERROR_CANCELLED = 60
ERROR_RUNTIME = 62
ERROR_CAPTURE_UNSAFE = 65


class CqsaError(Exception):
    """What every error of this package is, whatever else it is.

    `status` is the number of cqsa.h section 3 (5), `status_name` its name ("CQSA_ERROR_SHAPE").
    """

    status: int = -1
    status_name: str = "CQSA_ERROR_UNKNOWN"


class CqsaValueError(CqsaError, ValueError):
    """The caller's mistake (status 1-19)."""


class CqsaNotImplementedError(CqsaError, NotImplementedError):
    """Not available here (status 20-39): no such backend, device or implementation."""


class CqsaMemoryError(CqsaError, MemoryError):
    """No schedule fits the budget, or an allocation failed (status 40-59)."""


class CqsaRuntimeError(CqsaError, RuntimeError):
    """Cancelled, or failed while running (status 60-80)."""


class CqsaLibraryError(CqsaError, ImportError):
    """libcqsa itself was not found or cannot be used; raised at first use. `status` is -1."""

    status_name = "CQSA_LIBRARY_NOT_FOUND"


def error_for(status: int, message: str) -> CqsaError:
    """The exception of a status, not yet raised."""
    family: Type[CqsaError] = CqsaRuntimeError
    if status < 20:
        family = CqsaValueError
    elif status < 40:
        family = CqsaNotImplementedError
    elif status < 60:
        family = CqsaMemoryError
    name = STATUS_NAMES.get(status, CqsaError.status_name)
    error = family(message or name)
    error.status, error.status_name = status, name
    return error
