# SPDX-License-Identifier: Apache-2.0
"""Whatever the caller has as a View: numpy, torch, DLPack, buffers, array interfaces, pointers."""

from __future__ import annotations

import operator
import re
from typing import TYPE_CHECKING, Any, Optional, Protocol, Sequence, Tuple, Union

import numpy as np

from . import _cupy, _dlpack, _driver, _ffi, _jax, _torch
from ._errors import ERROR_DTYPE, ERROR_INVALID_ARGUMENT, ERROR_SHAPE, error_for
from ._views import BITS_16, BITS_8, CODES, View, compact, numpy_type, of_numpy, type_name, whole_strides

_DEVICES = {"cpu": _ffi.DEVICE_CPU, "cuda": _ffi.DEVICE_CUDA, "cuda_host": _ffi.DEVICE_CUDA_HOST, "rocm": _ffi.DEVICE_ROCM,
            "rocm_host": _ffi.DEVICE_ROCM_HOST, "ext": _ffi.DEVICE_EXT}
_DEVICE = re.compile(r"([a-z_]+)(?::(\d{1,4}))?")


class LendsByDLPack(Protocol):
    """Has `__dlpack__`, with whatever keywords."""

    def __dlpack__(self, *arguments: Any, **keywords: Any) -> Any: ...


class LendsDeviceMemory(Protocol):
    """Has `__cuda_array_interface__`."""

    @property
    def __cuda_array_interface__(self) -> Any: ...


class Tensor:
    """Memory at an address, for operands and outputs that no Python array describes. Made by from_pointer().

    Attributes: `address` (of element 0,0,..), `shape`, `strides` (elements), `dtype` (name), `device` ("cpu", "cuda:1"),
    `writable`.
    """

    __slots__ = ("_view", "_device")

    def __init__(self, view: View, device: str) -> None:
        self._view = view
        self._device = device

    @classmethod
    def from_pointer(cls, address: int, shape: Sequence[int], dtype: Any, strides: Optional[Sequence[int]] = None,
                     device: str = "cpu", *, writable: bool = True, owner: Any = None) -> Tensor:
        """A view of raw memory; nothing is read, copied or freed.

        address: of element 0,0,.. in bytes. shape: sizes, any number of axes. dtype: "float32", "bfloat16", "float8_e4m3fn",
        .., or a dtype of numpy or torch. strides: one per axis, in elements (not bytes), 0 and negative included; None is
        compact row-major. device: "cpu", "cuda", "cuda:1", "rocm", or host memory pinned by a driver, "cuda_host",
        "rocm_host". writable: may be an output. owner: an object that keeps the memory alive, held as long as this one.

        The caller vouches for the memory: a wrong address or shape reads or writes what lies there.
        """
        sizes = tuple(_index(size, "shape") for size in shape)
        if any(not 0 <= size < 1 << 63 for size in sizes):
            raise error_for(ERROR_SHAPE, f"shape is {list(sizes)}, wanted sizes of at least 0 that fit 63 bits")
        steps = None if strides is None else tuple(_index(stride, "strides") for stride in strides)
        if steps is not None and (len(steps) != len(sizes) or any(not -1 << 63 <= step < 1 << 63 for step in steps)):
            raise error_for(ERROR_SHAPE, f"strides are {list(steps)}, wanted one of 64 bits for each of {len(sizes)} axes")
        start = _index(address, "address")
        if not 0 <= start < 1 << 64:
            raise error_for(ERROR_INVALID_ARGUMENT, f"address is {start}, wanted one of 64 bits")
        code = CODES.get(dtype_name(dtype))
        if code is None:
            raise error_for(ERROR_DTYPE, f"dtype is {dtype!r}, wanted one of {', '.join(CODES)}")
        view = View(start, sizes, steps, code, code >> 11 & 31, bool(writable), owner, _device_numbers(device))
        return cls(view, device)

    @property
    def address(self) -> int:
        """Of element 0,0,.. in bytes."""
        return self._view.address

    @property
    def shape(self) -> Tuple[int, ...]:
        """Sizes of the axes."""
        return self._view.shape

    @property
    def strides(self) -> Tuple[int, ...]:
        """Of the axes, in elements."""
        return self._view.strides if self._view.strides is not None else compact(self._view.shape)

    @property
    def dtype(self) -> str:
        """Name of the element type."""
        return type_name(self._view.code)

    @property
    def device(self) -> str:
        """"cpu", "cuda:1", .."""
        return self._device

    @property
    def writable(self) -> bool:
        """Whether it may be an output."""
        return self._view.writable

    def __repr__(self) -> str:
        return f"<cqsa.Tensor {self.dtype} {list(self.shape)} at {self.address:#x} on {self.device}>"


def dtype_name(dtype: Any) -> str:
    """ "bfloat16" of "bfloat16", ml_dtypes.bfloat16, torch.bfloat16, .."""
    if isinstance(dtype, str):
        return dtype
    text = str(dtype)
    if text.startswith("torch."):
        return text[len("torch."):]
    try:
        return str(np.dtype(dtype).name)
    except TypeError:
        return text


def _index(value: Any, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise error_for(ERROR_INVALID_ARGUMENT, f"{name} has {value!r}, wanted integers") from None


def _device_numbers(device: Any) -> Tuple[int, int]:
    match = _DEVICE.fullmatch(device) if isinstance(device, str) else None
    if match is None or match.group(1) not in _DEVICES:
        raise error_for(ERROR_INVALID_ARGUMENT, f"device is {device!r}, wanted one of {', '.join(_DEVICES)}, or with an index, "
                        "'cuda:1'")
    return _DEVICES[match.group(1)], int(match.group(2) or 0)


if TYPE_CHECKING:
    import array
    import mmap

    from numpy.typing import ArrayLike

    from ._queue import Queue

    # What an operand may be: arrays, buffers and lists, tensors of torch and others, device memory, addresses.
    Operand = Union[ArrayLike, memoryview, bytearray, mmap.mmap, "array.array[Any]", LendsByDLPack, LendsDeviceMemory, Tensor]

# ---------------------------------------------------------------------------------------------------------------------
# Operands
# ---------------------------------------------------------------------------------------------------------------------


def view_of(value: Any, name: str, queue: Optional[Queue] = None) -> View:
    """An operand where it is. Lists and scalars, which have no memory to lend, become arrays."""
    if type(value) is np.ndarray:
        return of_numpy(value, name)
    view = _lent(value, name, queue)
    if view is None:
        return of_numpy(np.asarray(value), name)
    if queue is not None:
        queue.take(view, name)
    return view


def output_of(value: Any, name: str, queue: Optional[Queue] = None) -> View:
    """A writable output where it is, or an error: never a copy."""
    if type(value) is np.ndarray:
        view: Optional[View] = of_numpy(value, name)
    else:
        if _jax.is_array(value):
            raise error_for(ERROR_INVALID_ARGUMENT, f"{name} is an array of jax, which never change: leave it out to get one")
        view = _lent(value, name, queue)
        if queue is not None and view is not None:
            queue.take(view, name, is_output=True)
    if view is None:
        raise error_for(ERROR_INVALID_ARGUMENT, f"{name} is {type(value).__name__}, wanted an array that can be written "
                        "in place")
    if not view.writable:
        raise error_for(ERROR_INVALID_ARGUMENT, f"{name} is read-only, wanted a writable array")
    return view


def _lent(value: Any, name: str, queue: Optional[Queue]) -> Optional[View]:
    """The memory that an object lends, by whichever protocol it has; None if it has none."""
    if _torch.is_tensor(value):
        return _torch.view(value, name)
    if isinstance(value, np.ndarray):
        return of_numpy(value, name)
    if isinstance(value, View):
        return value
    if isinstance(value, Tensor):
        return value._view
    if _cupy.is_array(value):
        return _cupy.view(value, name)
    if isinstance(value, _jax.DeviceMemory):
        return value.view()
    if isinstance(value, (np.generic, str)):
        return None
    if hasattr(value, "__array_interface__"):
        return of_numpy(np.asarray(value), name)
    if _jax.is_array(value):
        _jax.check_concrete(value, name)
    if hasattr(value, "__dlpack__"):
        return _dlpack.view(value, name, queue)
    if hasattr(value, "__cuda_array_interface__"):
        return _of_cuda_interface(value, name, queue)
    try:
        buffer = memoryview(value)
    except TypeError:
        return None
    return of_numpy(np.asarray(buffer), name)


def device_of(value: Any) -> Optional[Tuple[int, int]]:
    """The device that an operand is on, DLPack's kind and index; None for host memory."""
    device: Any = None
    if _torch.is_tensor(value):
        device = None if value.is_cpu else _torch.device_of(value)
    elif isinstance(value, View):
        device = value.device
    elif isinstance(value, Tensor):
        device = value._view.device
    elif _cupy.is_array(value):
        device = _cupy.device_of(value)
    elif _jax.is_array(value):
        _jax.check_concrete(value, "an operand")
        kind, index = value.__dlpack_device__()
        device = (int(kind), int(index))
    elif isinstance(value, np.ndarray) or hasattr(value, "__array_interface__"):
        return None
    elif hasattr(value, "__dlpack_device__"):
        kind, index = value.__dlpack_device__()
        device = (int(kind), int(index))
    elif hasattr(value, "__cuda_array_interface__"):
        try:
            device = (_ffi.DEVICE_CUDA, _driver.device_of(int(value.__cuda_array_interface__["data"][0] or 0)))
        except (KeyError, TypeError, ValueError):
            return None  # the view of it says what is wrong
    return None if device is None or device[0] in _ffi.HOST_DEVICES else device


def _of_cuda_interface(value: Any, name: str, queue: Optional[Queue]) -> View:
    """numba's protocol. Without a `stream` the producer promises that nothing is queued on the memory any more."""
    interface = value.__cuda_array_interface__
    try:
        shape, (address, read_only) = tuple(interface["shape"]), interface["data"]
        dtype, byte_strides = np.dtype(interface["typestr"]), interface.get("strides")
    except (KeyError, TypeError, ValueError) as error:
        raise error_for(ERROR_INVALID_ARGUMENT,
                        f"{name} has a __cuda_array_interface__ that cannot be read: {error!r}") from None
    if interface.get("mask") is not None:
        raise error_for(ERROR_INVALID_ARGUMENT, f"{name} is a masked array, wanted a plain one")
    opaque = {1: BITS_8, 2: BITS_16}.get(dtype.itemsize) if dtype.kind == "V" else None  # how bfloat16 comes
    code = opaque if opaque is not None else CODES.get(dtype.name)
    if code is None or not dtype.isnative:
        raise error_for(ERROR_DTYPE, f"{name} is {dtype.str}, which attention() does not take")
    strides = None if byte_strides is None else whole_strides(shape, tuple(byte_strides), dtype.itemsize, name)
    stream = interface.get("stream")
    if queue is not None and stream is not None:
        if not isinstance(stream, int) or stream < 1:
            raise error_for(ERROR_INVALID_ARGUMENT, f"{name} has a __cuda_array_interface__ with the stream {stream!r}, wanted "
                            "None, 1, 2 or a handle")
        queue.after(stream)
    device = (_ffi.DEVICE_CUDA, _driver.device_of(address) if address else queue.device[1] if queue is not None else 0)
    return View(address or 0, shape, strides, code, dtype.itemsize, not read_only, value, device, borrowed=True)


# ---------------------------------------------------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------------------------------------------------


def new_like(like: View, shape: Tuple[int, ...], code: Optional[int] = None) -> Any:
    """A new array for a result, of the framework and on the device of `like` if that is torch, cupy, or jax on a device; else
    numpy's. code: float32 or float64; None: the type of `like`."""
    owner = like.owner
    if type(owner) is np.ndarray:
        return np.empty(shape, owner.dtype if code is None else numpy_type(code))
    if _torch.is_tensor(owner):
        return _torch.empty_like(owner, shape, code)
    if _cupy.is_array(owner):
        return _cupy.empty_like(owner, shape, code)
    if isinstance(owner, _dlpack.Borrowed) and not like.on_host() and _jax.is_array(owner.producer):
        return _jax.DeviceMemory(like.device, shape, like.code if code is None else code)
    return np.empty(shape, numpy_type(like.code if code is None else code))
