# SPDX-License-Identifier: Apache-2.0
"""The few functions of NVIDIA's driver that frameworks do not offer for each other's memory and streams.

libcuda is opened at the first need, never at import. All of this works in the devices' primary contexts, which is where
torch, cupy, jax and this library work, and leaves the thread's current context as it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, Dict, Iterator, Optional

from . import _ffi
from ._errors import ERROR_NO_DRIVER, ERROR_OUT_OF_DEVICE_MEMORY, ERROR_RUNTIME, error_for

_MEMORY_TYPE, _IS_MANAGED, _DEVICE_ORDINAL = 2, 8, 9  # CU_POINTER_ATTRIBUTE_*
_HOST_MEMORY = 1  # CU_MEMORYTYPE_HOST
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY

_FUNCTIONS: Dict[str, Any] = {
    "cuInit": [c_uint32],
    "cuDevicePrimaryCtxRetain": [c_void_p, c_int],
    "cuCtxPushCurrent_v2": [c_void_p],
    "cuCtxPopCurrent_v2": [c_void_p],
    "cuEventCreate": [c_void_p, c_uint32],
    "cuEventRecord": [c_void_p, c_void_p],
    "cuEventDestroy_v2": [c_void_p],
    "cuStreamWaitEvent": [c_void_p, c_void_p, c_uint32],
    "cuStreamSynchronize": [c_void_p],
    "cuStreamIsCapturing": [c_void_p, c_void_p],
    "cuPointerGetAttribute": [c_void_p, c_int, c_uint64],
    "cuMemAlloc_v2": [c_void_p, c_size_t],
    "cuMemFree_v2": [c_uint64],
    "cuMemcpyDtoH_v2": [c_void_p, c_uint64, c_size_t],
    "cuMemcpyHtoD_v2": [c_uint64, c_void_p, c_size_t],
    "cuGetErrorString": [c_int, c_void_p],
}


class Cuda:
    """libcuda. Streams are native handles: 0 and 1 are the legacy default stream, 2 the thread's own."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
            for name, arguments in _FUNCTIONS.items():
                function = getattr(self._library, name)
                function.restype, function.argtypes = c_int, arguments
        except (OSError, AttributeError) as error:
            raise error_for(ERROR_NO_DRIVER, f"NVIDIA's driver cannot be used: {error}") from None
        self._contexts: Dict[int, int] = {}
        self._call("cuInit", 0)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = c_char_p()
            self._library.cuGetErrorString(status, byref(text))
            said = (text.value or b"unknown").decode("utf-8", "replace")
            raise error_for(ERROR_OUT_OF_DEVICE_MEMORY if status == _OUT_OF_MEMORY else ERROR_RUNTIME,
                            f"the driver's {name} failed with {status} ({said})")

    @contextlib.contextmanager
    def _current(self, device: int) -> Iterator[None]:
        context = self._contexts.get(device)
        if context is None:
            made = c_void_p()
            self._call("cuDevicePrimaryCtxRetain", byref(made), device)  # kept: contexts of frameworks live as long
            context = self._contexts[device] = made.value or 0
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def order(self, device: int, first: int, then: int) -> None:
        """What is queued on `then` from now on waits for what is queued on `first` by now."""
        event = c_void_p()
        with self._current(device):
            self._call("cuEventCreate", byref(event), _NO_TIMING)
            try:
                self._call("cuEventRecord", event, first)
                self._call("cuStreamWaitEvent", then, event, 0)
            finally:
                self._call("cuEventDestroy_v2", event)  # the driver keeps it until it was reached

    def synchronize(self, device: int, stream: int) -> None:
        with self._current(device):
            self._call("cuStreamSynchronize", stream)

    def is_capturing(self, device: int, stream: int) -> bool:
        """Whether a graph is being recorded from the stream. The legacy default stream never is."""
        if stream in (0, 1):
            return False
        state = c_int(0)
        with self._current(device):
            self._call("cuStreamIsCapturing", stream, byref(state))
        return state.value != 0

    def capture_id(self, device: int, stream: int) -> int:
        """The number of the graph that is being recorded from the stream, 0 for none."""
        if not self.is_capturing(device, stream):
            return 0
        ask = getattr(self._library, "cuStreamGetCaptureInfo_v2", None)  # since CUDA 11.3
        state, number = c_int(0), c_uint64(0)
        with self._current(device):
            status = 0 if ask is None else ask(c_void_p(stream), byref(state), byref(number), None, None, None)
        return number.value if not status and number.value else 1

    def read(self, device: int, address: int, size: int) -> bytes:
        """What is in memory of the device; the work that writes it has ended."""
        buffer = ctypes.create_string_buffer(max(size, 1))
        with self._current(device):
            self._call("cuMemcpyDtoH_v2", buffer, address, size)
        return buffer.raw[:size]

    def write(self, device: int, address: int, data: bytes) -> None:
        with self._current(device):
            self._call("cuMemcpyHtoD_v2", address, data, len(data))

    def device_of(self, address: int) -> int:
        """The device that memory belongs to; 0 for memory that is not the driver's."""
        return self._attribute(_DEVICE_ORDINAL, address, 0)

    def is_pinned(self, address: int, size: int) -> bool:
        """Whether host memory is page-locked from its first byte to its last."""
        return all(self._attribute(_MEMORY_TYPE, at, 0) == _HOST_MEMORY and not self._attribute(_IS_MANAGED, at, 0)
                   for at in (address, address + max(size, 1) - 1))

    def _attribute(self, which: int, address: int, otherwise: int) -> int:
        value = c_int(0)
        status = self._library.cuPointerGetAttribute(byref(value), which, address)
        return otherwise if status else value.value

    def allocate(self, device: int, size: int) -> int:
        memory = c_uint64(0)
        with self._current(device):
            self._call("cuMemAlloc_v2", byref(memory), max(size, 1))
        return memory.value

    def free(self, device: int, address: int) -> None:
        with self._current(device):
            self._call("cuMemFree_v2", address)


_cuda: Optional[Cuda] = None
_missing: Optional[Exception] = None
_lock = threading.Lock()


def cuda() -> Cuda:
    """The driver, or the error that says why there is none."""
    global _cuda, _missing
    with _lock:
        if _missing is not None:
            raise _missing
        if _cuda is None:
            try:
                _cuda = Cuda()
            except Exception as error:
                _missing = error
                raise
        return _cuda


def of(device_type: int) -> Optional[Cuda]:
    """The driver of a kind of device, None where this module knows none."""
    return cuda() if device_type == _ffi.DEVICE_CUDA else None


def device_of(address: int) -> int:
    """The device of memory; 0 where nobody can say."""
    try:
        return cuda().device_of(address)
    except Exception:
        return 0


def is_pinned(address: int, size: int) -> bool:
    """Whether the host memory is page-locked, as far as NVIDIA's driver knows; without one, nothing is."""
    try:
        return cuda().is_pinned(address, size)
    except Exception:
        return False


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
