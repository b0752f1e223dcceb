# SPDX-License-Identifier: Apache-2.0
"""Borrowing from DLPack producers: both kinds of capsule, each released exactly once."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Dict, Optional, Tuple

from . import _ffi
from ._errors import ERROR_DTYPE, ERROR_INVALID_ARGUMENT, error_for
from ._views import View, capsule_pointer

if TYPE_CHECKING:
    from ._queue import Queue

# Names of capsules. PyCapsule_SetName keeps the pointer, so these must live for ever.
_PLAIN, _VERSIONED = ctypes.c_char_p(b"dltensor"), ctypes.c_char_p(b"dltensor_versioned")
_USED: Dict[bool, ctypes.c_char_p] = {
    False: ctypes.c_char_p(b"used_dltensor"), True: ctypes.c_char_p(b"used_dltensor_versioned")}

_READ_ONLY, _COPIED = 1, 2  # bits of DLManagedTensorVersioned.flags

_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]
_set_name = ctypes.pythonapi.PyCapsule_SetName
_set_name.restype, _set_name.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]
_Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)  # keeps the lock: producers written in Python may need it


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = [("tensor", _ffi.Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _ManagedVersioned(ctypes.Structure):
    """DLManagedTensorVersioned; the version comes first and stays there in every version."""

    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64), ("tensor", _ffi.Tensor),
    ]


class Borrowed:
    """A managed tensor taken out of its capsule; gives it back, through its deleter, when it goes."""

    __slots__ = ("_address", "_deleter", "producer")

    def __init__(self, address: int, deleter: Optional[int], producer: Any) -> None:
        self._address = address
        self._deleter = deleter
        self.producer = producer

    def __del__(self) -> None:
        deleter, self._deleter = self._deleter, None
        if deleter:
            _Deleter(deleter)(self._address)


def view(producer: Any, name: str, queue: Optional[Queue]) -> View:
    """The memory that `producer.__dlpack__()` lends, without a copy where the producer can promise that. On a device the
    producer makes the queue's stream wait for its own work."""
    try:
        capsule = _ask(producer, None if queue is None else queue.dlpack_stream())
    except BufferError as error:  # numpy 1.24 with a read-only array, a sharded array, ..
        raise error_for(ERROR_INVALID_ARGUMENT, f"{name} does not lend its memory: {error}") from error
    versioned = bool(_is_valid(capsule, _VERSIONED))
    if not versioned and not _is_valid(capsule, _PLAIN):
        raise error_for(ERROR_INVALID_ARGUMENT, f"{name}: __dlpack__() gave {capsule!r}, wanted a capsule 'dltensor' or "
                        "'dltensor_versioned' that nobody has taken yet")
    address: int = capsule_pointer(capsule, _VERSIONED if versioned else _PLAIN)
    managed = (_ManagedVersioned if versioned else _Managed).from_address(address)
    _set_name(capsule, _USED[versioned])  # from here on the deleter is ours to call
    owner = Borrowed(address, managed.deleter, producer)
    if versioned and managed.major != 1:
        raise error_for(ERROR_INVALID_ARGUMENT, f"{name} speaks DLPack {managed.major}.{managed.minor}, wanted 1.x")
    flags = managed.flags if versioned else 0
    return _view_of(managed.tensor, name, not flags & (_READ_ONLY | _COPIED), owner)


def _ask(producer: Any, stream: Optional[int]) -> Any:
    """The newest form of the request that the producer understands; numpy 1.24 knows no keyword but `stream`."""
    on_host = producer.__dlpack_device__()[0] in _ffi.HOST_DEVICES if hasattr(producer, "__dlpack_device__") else True
    given: Dict[str, Any] = {} if on_host or stream is None else {"stream": stream}
    for more in ({"max_version": (1, 0), "copy": False}, {"max_version": (1, 0)}):
        try:
            return producer.__dlpack__(**given, **more)
        except TypeError:
            continue
    return producer.__dlpack__(**given)


def _view_of(tensor: Any, name: str, writable: bool, owner: Borrowed) -> View:
    axes, code = tensor.ndim, tensor.dtype & 0xFFFFFFFF
    bits = (code >> 8 & 255) * (code >> 16)
    if bits == 0 or bits % 8:
        raise error_for(ERROR_DTYPE, f"{name} has elements of {bits} bits, wanted whole bytes")
    shape, strides = _numbers(tensor.shape, axes), _numbers(tensor.strides, axes)
    return View((tensor.data or 0) + tensor.byte_offset, shape or (), strides, code, bits // 8, writable, owner,
                (tensor.device_type, tensor.device_id), borrowed=True)


def _numbers(address: Optional[int], count: int) -> Optional[Tuple[int, ...]]:
    return tuple((ctypes.c_int64 * count).from_address(address)) if address and count else None
