# SPDX-License-Identifier: Apache-2.0
"""A GPU that is not there: modules that look like torch, cupy and jax to this package, and a driver that writes down what it
is asked. Tensors of theirs are numpy arrays in host memory that say they are on a device; no library ever reads them."""
import ctypes
import sys
import types

import numpy as np

CUDA, CPU = 2, 1


class Driver:
    """Stands in for _driver.Cuda."""

    def __init__(self):
        self.asked = []  # what was asked, in order
        self.pinned = set()  # addresses
        self.captured = set()  # streams
        self.memory = {}

    def order(self, device, first, then):
        self.asked.append(("order", device, first, then))

    def synchronize(self, device, stream):
        self.asked.append(("synchronize", device, stream))

    def is_capturing(self, device, stream):
        return stream in self.captured

    def capture_id(self, device, stream):
        return int(stream in self.captured)

    def device_of(self, address):
        return 0

    def is_pinned(self, address, size):
        return address in self.pinned

    def allocate(self, device, size):
        buffer = ctypes.create_string_buffer(max(size, 1))
        self.memory[ctypes.addressof(buffer)] = buffer
        self.asked.append(("allocate", device, size))
        return ctypes.addressof(buffer)

    def free(self, device, address):
        del self.memory[address]
        self.asked.append(("free", device))


class Dtype:
    def __init__(self, name):
        self.name = name
        self.itemsize = {"bfloat16": 2}.get(name) or np.dtype(name).itemsize

    def __repr__(self):
        return "torch." + self.name


DTYPES = {name: Dtype(name) for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")}
STRIDED = object()


class Device:
    def __init__(self, kind, index=None):
        self.type, self.index = kind, index

    def __eq__(self, other):
        return (self.type, self.index) == (other.type, other.index)

    def __hash__(self):
        return hash((self.type, self.index))

    def __repr__(self):
        return self.type if self.index is None else f"{self.type}:{self.index}"


class TorchTensor:
    """What this package touches of torch.Tensor."""

    requires_grad = is_nested = False
    layout = STRIDED

    def __init__(self, array, device=0, dtype=None):
        self.array = array
        self.index = device  # None: cpu
        self.dtype = dtype or DTYPES[array.dtype.name]
        self.recorded = []
        self.version = 0

    is_cpu = property(lambda self: self.index is None)
    is_cuda = property(lambda self: self.index is not None)
    device = property(lambda self: Device("cpu") if self.is_cpu else Device("cuda", self.index))
    shape = property(lambda self: self.array.shape)

    def is_neg(self):
        return False

    def is_inference(self):
        return False

    def is_contiguous(self):
        return self.array.flags.c_contiguous

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def data_ptr(self):
        return self.array.ctypes.data

    def get_device(self):
        return -1 if self.is_cpu else self.index

    def dim(self):
        return self.array.ndim

    def record_stream(self, stream):
        self.recorded.append(stream.cuda_stream)

    def to(self, device, dtype):
        moved = TorchTensor(self.array.astype(dtype.name), device.index)
        sys.modules["torch"].conversions.append((self.dtype.name, dtype.name))
        return moved

    def contiguous(self):
        return TorchTensor(np.ascontiguousarray(self.array), self.index, self.dtype)


class TorchStream:
    def __init__(self, handle, device=0):
        self.cuda_stream, self.device = handle, Device("cuda", device)


def torch_module():
    torch = types.ModuleType("torch")
    torch.Tensor, torch.strided, torch.device = TorchTensor, STRIDED, Device
    torch.__dict__.update(DTYPES)
    torch.current, torch.capturing, torch.conversions = {}, False, []
    torch.version = types.SimpleNamespace(hip=None)
    torch.is_grad_enabled = lambda: False
    torch.from_numpy = lambda array: TorchTensor(array, None)
    torch.empty = lambda shape, dtype, device: TorchTensor(
        np.zeros(shape, "uint16" if dtype.name == "bfloat16" else dtype.name), device.index, dtype)
    torch.empty_like = lambda tensor: torch.empty(tensor.shape, tensor.dtype, tensor.device)
    torch._C = types.SimpleNamespace(_cuda_getCurrentRawStream=lambda device: torch.current.get(device, 0))
    torch.cuda = types.SimpleNamespace(
        is_current_stream_capturing=lambda: torch.capturing,
        ExternalStream=lambda handle, device: TorchStream(handle, device),
        default_stream=lambda device: TorchStream(0, device))

    functional = types.SimpleNamespace(scaled_dot_product_attention=lambda *a, **k: "torch's own")
    torch.nn = types.SimpleNamespace(functional=functional, Parameter=type("Parameter", (), {}))
    torch.jit = types.SimpleNamespace(is_tracing=lambda: False)
    torch.autocast = set()
    torch.is_autocast_enabled = lambda device: device in torch.autocast

    def increment(tensor):
        tensor.version += 1
    torch.autograd = types.SimpleNamespace(graph=types.SimpleNamespace(increment_version=increment))
    return torch


class CupyArray:
    def __init__(self, array, device=0):
        self.array = array
        self.device = types.SimpleNamespace(id=device)
        self.data = types.SimpleNamespace(ptr=array.ctypes.data)

    dtype = property(lambda self: self.array.dtype)
    shape = property(lambda self: self.array.shape)
    strides = property(lambda self: self.array.strides)
    flags = property(lambda self: self.array.flags)


class CupyStream:
    def __init__(self, handle, device=0):
        self.ptr, self.device_id = handle, device


class _Context:
    def __init__(self, *_arguments):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        pass


def cupy_module():
    cupy = types.ModuleType("cupy")
    cupy.ndarray = CupyArray
    cupy.current = 0
    cupy.empty = lambda shape, dtype: CupyArray(np.zeros(shape, dtype))
    cupy.asarray = lambda values, dtype: CupyArray(np.asarray(getattr(values, "array", values), dtype))
    cupy.ascontiguousarray = lambda x: x
    cupy.cuda = types.SimpleNamespace(
        get_current_stream=lambda device=-1: CupyStream(cupy.current), Device=_Context, runtime=types.SimpleNamespace(is_hip=False))
    return cupy


class Lends:
    """A DLPack producer on a device, as jax's arrays are; notes the stream it was asked with, and when it got its memory back."""

    def __init__(self, array, device=(CUDA, 0), log=None):
        self.array, self.place, self.log = array, device, [] if log is None else log

    def __dlpack_device__(self):
        return self.place

    def __dlpack__(self, *, stream=None, max_version=None, copy=None):
        self.log.append(("lend", stream))
        return lend(self.array, self.place, lambda: self.log.append(("back",)))


class JaxArray(Lends):
    pass


class Tracer(JaxArray):
    pass


def jax_module():
    jax = types.ModuleType("jax")
    jax.Array = JaxArray
    jax.core = types.SimpleNamespace(Tracer=Tracer)

    def from_dlpack(producer):
        capsule = producer.__dlpack__(stream=7)
        made = JaxArray(take(capsule), producer.__dlpack_device__())
        made.capsule = capsule
        return made
    jax.dlpack = types.SimpleNamespace(from_dlpack=from_dlpack)
    return jax


# ------------------------------------------------------------------------------------------------------------- DLPack


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
                ("dtype", ctypes.c_int32), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64)]


class Managed(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_NAME = ctypes.c_char_p(b"dltensor")
_USED = ctypes.c_char_p(b"used_dltensor")
_kept = {}
_api = ctypes.pythonapi
_api.PyCapsule_New.restype, _api.PyCapsule_New.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
CODES = {"float32": 0x00012002, "float16": 0x00011002, "int32": 0x00012000, "bool": 0x00010806}


def lend(array, device, on_return):
    shape = (ctypes.c_int64 * array.ndim)(*array.shape)
    strides = (ctypes.c_int64 * array.ndim)(*(step // array.itemsize for step in array.strides))
    managed = Managed(Tensor(array.ctypes.data, *device, array.ndim, CODES[array.dtype.name], ctypes.addressof(shape),
                             ctypes.addressof(strides), 0))

    def give_back(address):
        del _kept[address]
        on_return()
    deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(give_back)
    managed.deleter = ctypes.cast(deleter, ctypes.c_void_p).value
    _kept[ctypes.addressof(managed)] = (managed, shape, strides, array, deleter)
    return _api.PyCapsule_New(ctypes.addressof(managed), _NAME, None)


class _Taken:
    """Calls the deleter when the array over its memory goes, as a consumer does."""

    def __init__(self, address, interface):
        self.address, self.__array_interface__ = address, interface

    def __del__(self):
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(Managed.from_address(self.address).deleter)(self.address)


def take(capsule):
    get = _api.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = get(capsule, _NAME)
    _api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
    _api.PyCapsule_SetName(capsule, _USED)
    tensor = Managed.from_address(address).tensor
    shape = tuple((ctypes.c_int64 * tensor.ndim).from_address(tensor.shape))
    name = next(name for name, code in CODES.items() if code == tensor.dtype)
    return np.asarray(_Taken(address, {"shape": shape, "typestr": np.dtype(name).str, "data": (tensor.data, False), "version": 3}))
