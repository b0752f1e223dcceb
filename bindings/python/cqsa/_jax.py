# SPDX-License-Identifier: Apache-2.0
"""Arrays of jax on a device. jax is never imported here.

Its arrays never change, so results cannot be written into one. A result is written into memory of our own and then given to
jax for good, as a DLPack producer whose memory nobody else knows: jax keeps it, without a copy, and frees it with its last user.
"""

from __future__ import annotations

import ctypes
import sys
from math import prod
from typing import Any, Dict, Tuple

from . import _driver, _ffi
from ._errors import ERROR_INVALID_ARGUMENT, error_for
from ._views import View


def is_array(value: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, getattr(jax, "Array", ()))


def check_concrete(value: Any, name: str) -> None:
    """Inside jit and its like there are no arrays yet."""
    if any(base.__name__ == "Tracer" for base in type(value).__mro__):  # where jax keeps the class has changed
        raise error_for(ERROR_INVALID_ARGUMENT, f"{name} is traced by jax: attention() takes arrays, outside jit, vmap and grad")


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = [("tensor", _ffi.Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_lent: Dict[int, Tuple[Any, ...]] = {}  # address of a DLManagedTensor -> it, and what it needs, until its deleter is called


def _give_back(address: int, take: Any = _lent.pop) -> None:
    take(address, None)


# Takes Python's lock: jax may call from any thread. Never freed, for jax may give arrays back when modules are gone already.
_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_give_back)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_deleter))
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_NAME = ctypes.c_char_p(b"dltensor")  # the capsule keeps the pointer


class DeviceMemory:
    """A compact new array on a device, to be lent once. Freed when nobody holds it or what it lent."""

    def __init__(self, device: Tuple[int, int], shape: Tuple[int, ...], code: int) -> None:
        driver = _driver.of(device[0])
        if driver is None:
            raise error_for(ERROR_INVALID_ARGUMENT, "out is None, and there is no memory for it on this kind of device: give out=")
        self.device, self.shape, self.code = device, shape, code
        self._free = driver.free
        self.address = driver.allocate(device[1], prod(shape) * (code >> 8 & 255) // 8)

    def view(self) -> View:
        return View(self.address, self.shape, None, self.code, (self.code >> 8 & 255) // 8, True, self, self.device)

    def __dlpack_device__(self) -> Tuple[int, int]:
        return self.device

    def __dlpack__(self, **_keywords: Any) -> Any:
        """The work that wrote it has ended, so any stream may read it."""
        shape = (ctypes.c_int64 * max(len(self.shape), 1))(*self.shape)
        managed = _Managed()
        managed.tensor = _ffi.Tensor(self.address, self.device[0], self.device[1], len(self.shape), self.code,
                                     ctypes.addressof(shape), None, 0)
        managed.deleter = ctypes.cast(_deleter, ctypes.c_void_p).value
        _lent[ctypes.addressof(managed)] = (managed, shape, self)
        return _new_capsule(ctypes.addressof(managed), _NAME, None)

    def to_jax(self) -> Any:
        known = set(_lent)
        try:
            return sys.modules["jax"].dlpack.from_dlpack(self)
        except BaseException:
            for address in set(_lent) - known:  # a capsule that nobody took has nobody who calls its deleter
                if _lent[address][2] is self:
                    del _lent[address]
            raise

    def __del__(self) -> None:
        address, self.address = getattr(self, "address", 0), 0
        if address:
            self._free(self.device[1], address)
