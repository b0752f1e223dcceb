# SPDX-License-Identifier: Apache-2.0
"""cqsa.h by cffi: for programs that call the C interface themselves, and for interpreters that ctypes is slow on. Needs cffi, no compiler.

    from cqsa.cffi import ffi, library

    lib, context = library(), ffi.new("cqsa_context **")
    if lib.cqsa_context_create(ffi.NULL, context) != lib.CQSA_OK:
        print(ffi.string(lib.cqsa_last_error()).decode())

With CQSA_FFI=cffi in the environment the package itself calls the library this way.
"""

from __future__ import annotations

import ctypes
from typing import Any, Callable, Dict

from . import _ffi
from ._cffi_abi import ffi

__all__ = ["ffi", "library"]

_opened: Dict[str, Any] = {}


def library() -> Any:
    """The functions and constants of the library that the package uses, found in the same places (`cqsa._ffi`)."""
    _ffi.library()
    return opened(_ffi.library_path())


def opened(path: str) -> Any:
    """The library at a path, or of a name that the system's loader knows. OSError where there is none."""
    if path not in _opened:
        _opened[path] = ffi.dlopen(path)
    return _opened[path]


class Functions:
    """The functions of a library for callers that have ctypes objects: structs, byref(), arrays and addresses."""

    def __init__(self, path: str) -> None:
        self._library = opened(path)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        try:
            found = getattr(self._library, name)
        except ffi.error as error:
            raise AttributeError(str(error)) from None
        function = _call_of(found, ffi.typeof(found))
        setattr(self, name, function)
        return function


def _call_of(function: Any, kind: Any) -> Callable[..., Any]:
    converters = [_converter(argument) for argument in kind.args]
    is_text = kind.result.kind == "pointer"

    def call(*arguments: Any) -> Any:
        if len(arguments) != len(converters):
            raise TypeError(f"{len(arguments)} arguments, wanted {len(converters)}")
        result = function(*[convert(argument) for convert, argument in zip(converters, arguments)])
        if not is_text:
            return result
        return ffi.string(result) if result else None

    return call


def _converter(argument: Any) -> Callable[[Any], Any]:
    if argument.kind != "pointer":
        return _number
    return _address if argument.item.kind in ("void", "struct") else _reference


_REFERENCE = type(ctypes.byref(ctypes.c_int()))


def _number(value: Any) -> Any:
    return getattr(value, "value", value)


def _reference(value: Any) -> Any:
    """ctypes takes a number for a pointer to it."""
    return _address(ctypes.byref(value) if isinstance(value, ctypes._SimpleCData) else value)


def _address(value: Any) -> Any:
    """What ctypes would pass for a pointer."""
    if value is None:
        return ffi.NULL
    if isinstance(value, bytes):
        return value
    if isinstance(value, _REFERENCE):
        value = ctypes.addressof(value._obj)  # type: ignore[attr-defined]
    elif isinstance(value, (ctypes.Structure, ctypes.Array)):
        value = ctypes.addressof(value)
    elif isinstance(value, ctypes.c_void_p):
        value = value.value or 0
    elif isinstance(value, ctypes._Pointer):
        value = ctypes.cast(value, ctypes.c_void_p).value or 0
    return ffi.cast("void *", value)
