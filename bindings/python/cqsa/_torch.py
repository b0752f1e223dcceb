# SPDX-License-Identifier: Apache-2.0
"""Tensors of torch as views. torch is never imported here: a tensor can only come from a torch that is there already."""

from __future__ import annotations

import sys
from typing import Any, Dict, Optional, Tuple

from . import _ffi
from ._errors import ERROR_DEVICE, ERROR_DTYPE, ERROR_INVALID_ARGUMENT, error_for
from ._views import CODES, CPU, View

_codes: Dict[Any, Tuple[int, int]] = {}  # torch.dtype -> code, bytes
tensor_type: Any = None  # torch.Tensor itself, once a tensor has come


def module() -> Optional[Any]:
    """torch, when the program has imported it."""
    return sys.modules.get("torch")


def is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, getattr(torch, "Tensor", ()))


def view(tensor: Any, name: str) -> View:
    """The memory of a strided tensor. One that autograd would have to follow is refused."""
    global tensor_type
    torch = sys.modules["torch"]
    tensor_type = torch.Tensor
    if tensor.requires_grad and torch.is_grad_enabled():
        raise error_for(ERROR_INVALID_ARGUMENT, f"{name} requires grad, which attention() does not follow: "
                        "give detach()ed tensors or call it under torch.no_grad()")
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise error_for(ERROR_INVALID_ARGUMENT,
                        f"{name} is a tensor of layout {tensor.layout}, wanted a strided one that is not nested")
    if tensor.is_neg():
        raise error_for(ERROR_INVALID_ARGUMENT, f"{name} is a negated view, wanted its resolve_neg()")
    code, itemsize = _code(tensor.dtype, name)
    strides = None if tensor.is_contiguous() else tuple(tensor.stride())
    try:
        address: int = tensor.data_ptr()
    except RuntimeError as error:  # a tensor of vmap, a fake one, ..
        raise error_for(ERROR_INVALID_ARGUMENT, f"{name} has no memory of its own: {error}") from error
    device = CPU if tensor.is_cpu else device_of(tensor, name)
    return View(address, tuple(tensor.shape), strides, code, itemsize, True, tensor, device)


def _code(dtype: Any, name: str) -> Tuple[int, int]:
    known = _codes.get(dtype)
    if known is None:
        code = CODES.get(str(dtype).replace("torch.", ""))
        if code is None:
            raise error_for(ERROR_DTYPE, f"{name} is {dtype}, wanted float32, float16, bfloat16 or float64; k and v also "
                            "int8, float8_e4m3fn or float8_e5m2")
        known = _codes[dtype] = (code, dtype.itemsize if hasattr(dtype, "itemsize") else code >> 11 & 31)
    return known


def device_of(tensor: Any, name: str = "a tensor") -> Tuple[int, int]:
    """DLPack's kind of device and its index."""
    if tensor.is_cpu:
        return CPU
    if not tensor.is_cuda:
        raise error_for(ERROR_DEVICE, f"{name} is on the device {tensor.device}, wanted cpu or cuda")
    return (_device_type(sys.modules["torch"]), tensor.get_device())


def _device_type(torch: Any) -> int:
    return _ffi.DEVICE_ROCM if torch.version.hip else _ffi.DEVICE_CUDA


def current_stream(device: int) -> int:
    """Native handle of torch's current stream on a device."""
    torch = sys.modules["torch"]
    try:
        handle: int = torch._C._cuda_getCurrentRawStream(device)  # 0.1 us, the public one makes objects: 2 us
    except AttributeError:
        handle = torch.cuda.current_stream(device).cuda_stream
    return handle


def is_capturing() -> bool:
    """Whether torch records a graph from its current stream."""
    torch = sys.modules["torch"]
    return bool(torch.cuda.is_current_stream_capturing())


def record(tensor: Any, device: int, stream: int) -> None:
    """Tells torch's allocator that a stream which it does not know of uses the tensor's memory."""
    cuda = sys.modules["torch"].cuda
    tensor.record_stream(cuda.default_stream(device) if stream in (0, 1) else cuda.ExternalStream(stream, device=device))


def workspace(size: int, device: int) -> Any:
    """Device memory of torch's: in a capture it comes from the graph's own pool and lives as long as the graph."""
    torch = sys.modules["torch"]
    return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device))


def converted(values: Any, dtype: str, device: int) -> Any:
    """A compact tensor of another type on a device, from an array of the host or from a tensor there."""
    torch = sys.modules["torch"]
    tensor = values if is_tensor(values) else torch.from_numpy(values)
    return tensor.to(device=torch.device("cuda", device), dtype=getattr(torch, dtype)).contiguous()


def empty_like(tensor: Any, shape: Tuple[int, ...], code: Optional[int]) -> Any:
    """A new tensor on the same device, of the same or of another type."""
    torch = sys.modules["torch"]
    return torch.empty(shape, dtype=tensor.dtype if code is None else type_of(code), device=tensor.device)


def type_of(code: int) -> Any:
    """torch's dtype; uint8 for one that this torch does not have."""
    torch = sys.modules["torch"]
    return getattr(torch, _names[code], torch.uint8)


_names = {code: name for name, code in CODES.items()}


def increment_of(torch: Any) -> Any:
    """What counts the writes of a tensor; None in a torch that has no such function."""
    return getattr(getattr(torch.autograd, "graph", None), "increment_version", None)


def was_written(tensor: Any) -> None:
    """Tells autograd, which may have saved the tensor for a backward pass."""
    increment = increment_of(sys.modules["torch"])
    if increment is not None and not tensor.is_inference():
        increment(tensor)
