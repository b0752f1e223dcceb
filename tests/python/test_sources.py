# SPDX-License-Identifier: Apache-2.0
"""Operands and outputs from anything that has memory: DLPack, buffers, interfaces, addresses. Nothing is copied."""
import array as plain_array
import ctypes
import gc
import mmap
import weakref

import numpy as np
import pytest

import cqsa
import exact
from cqsa import _ffi
from cqsa._sources import view_of


@pytest.fixture
def packed(random):
    shapes = (2, 4, 19, 32), (2, 2, 23, 32), (2, 2, 23, 32)
    return tuple(random.standard_normal(shape).astype(np.float32) for shape in shapes)


def refused(status_name, call, *words):
    with pytest.raises(cqsa.CqsaError) as caught:
        call()
    assert caught.value.status_name == "CQSA_ERROR_" + status_name, str(caught.value)
    for word in words:
        assert word in str(caught.value)


# ------------------------------------------------------------------------------------------------------------- DLPack

DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
NEW = ctypes.pythonapi.PyCapsule_New
NEW.restype, NEW.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
NAME = ctypes.pythonapi.PyCapsule_GetName
NAME.restype, NAME.argtypes = ctypes.c_char_p, [ctypes.py_object]
KINDS = {False: ctypes.c_char_p(b"dltensor"), True: ctypes.c_char_p(b"dltensor_versioned")}


class Managed(ctypes.Structure):
    _fields_ = [("tensor", _ffi.Tensor), ("context", ctypes.c_void_p), ("deleter", DELETER)]


class ManagedVersioned(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p), ("deleter", DELETER),
                ("flags", ctypes.c_uint64), ("tensor", _ffi.Tensor)]


class Producer:
    """Lends an array by DLPack and counts what is given back."""

    def __init__(self, array, versioned=False, flags=0, major=1, code=None, device=(1, 0), offset=0, strides=True):
        self.array, self.versioned, self.device, self.deleted, self.capsules = array, versioned, device, 0, []
        axes = array.ndim
        self.shape = (ctypes.c_int64 * axes)(*array.shape)
        self.strides = (ctypes.c_int64 * axes)(*(stride // array.itemsize for stride in array.strides))
        code = {"f": 2, "u": 1}[array.dtype.kind] | array.itemsize * 8 << 8 | 1 << 16 if code is None else code
        tensor = _ffi.Tensor(array.ctypes.data - offset, *device, axes, code, ctypes.addressof(self.shape),
                             ctypes.addressof(self.strides) if strides else None, offset)
        self.deleter = DELETER(self.delete)
        self.managed = ManagedVersioned(major, 0, None, self.deleter, flags, tensor) if versioned else Managed(
            tensor, None, self.deleter)

    def delete(self, address):
        assert address == ctypes.addressof(self.managed)
        self.deleted += 1

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **keywords):
        if not self.versioned and keywords:
            raise TypeError("an old producer")  # as numpy 1.24 answers
        self.capsules.append(NEW(ctypes.addressof(self.managed), KINDS[self.versioned], None))
        return self.capsules[-1]


class OnlyDLPack:
    """numpy's own capsules."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **keywords):
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("versioned", [False, True])
def test_dlpack_is_borrowed_and_given_back_once(packed, versioned):
    wanted = cqsa.attention(*packed)
    out = np.full_like(wanted, np.nan)
    producers = [Producer(x, versioned) for x in packed + (out,)]
    assert cqsa.attention(*producers[:3], out=producers[3]) is producers[3]
    gc.collect()
    np.testing.assert_array_equal(out, wanted)
    for producer in producers:
        assert producer.deleted == 1 and len(producer.capsules) == 1
        assert NAME(producer.capsules[0]) == (b"used_dltensor_versioned" if versioned else b"used_dltensor")


@pytest.mark.parametrize("versioned", [False, True])
def test_dlpack_layouts(packed, versioned):
    q, k, v = packed
    wanted = cqsa.attention(q, k, v)
    turned = q.swapaxes(1, 3).copy().swapaxes(1, 3)
    for lent in (Producer(turned, versioned), Producer(q, versioned, strides=False), Producer(q, versioned, offset=64)):
        np.testing.assert_array_equal(cqsa.attention(lent, k, v), wanted)
    out = cqsa.attention(*(Producer(x, versioned) for x in packed))
    assert type(out) is np.ndarray and out.dtype == np.float32
    bits = [exact.to_bfloat16(x) for x in packed]
    wanted = cqsa.attention(*bits, dtype="bfloat16")
    out = cqsa.attention(*(Producer(x, versioned, code=_ffi.DTYPE_BF16) for x in bits))
    np.testing.assert_array_equal(out.view(np.uint16), wanted)


def test_dlpack_by_numpy(packed):
    wanted = cqsa.attention(*packed)
    out = np.full_like(wanted, np.nan)
    cqsa.attention(*(OnlyDLPack(x) for x in packed), out=OnlyDLPack(out))
    np.testing.assert_array_equal(out, wanted)
    out.flags.writeable = False
    refused("INVALID_ARGUMENT", lambda: cqsa.attention(*packed, out=OnlyDLPack(out)), "out", "read")


def test_dlpack_is_given_back_when_refused(packed):
    q, k, v = packed
    for bad, status in ((Producer(q, True, major=2), "INVALID_ARGUMENT"), (Producer(q, True, code=2 | 4 << 8 | 1 << 16), "DTYPE"),
                        (Producer(q, code=0x00012005), "DTYPE"), (Producer(q, True, device=(2, 0)), "DEVICE"),
                        (Producer(q, device=(7, 0)), "DEVICE")):
        refused(status, lambda: cqsa.attention(bad, k, v, backend="cpu"))
        gc.collect()
        assert bad.deleted == 1
    for flags in (1, 2):  # read-only, a copy
        out = np.zeros_like(q)
        producer = Producer(out, True, flags=flags)
        refused("INVALID_ARGUMENT", lambda: cqsa.attention(q, k, v, out=producer), "out is read-only")
        gc.collect()
        assert producer.deleted == 1 and not out.any()
    taken = Producer(q)
    capsule = taken.__dlpack__()
    taken.__dlpack__ = lambda **keywords: capsule
    cqsa.attention(taken, k, v)
    refused("INVALID_ARGUMENT", lambda: cqsa.attention(taken, k, v), "taken")
    assert taken.deleted == 1


def test_dlpack_lives_until_the_call_ends(packed):
    held = []
    producers = [Producer(x, True) for x in packed]
    refs = [weakref.ref(producer) for producer in producers]
    deleted = lambda: [ref() is not None and ref().deleted for ref in refs]  # noqa: E731

    def progress(done, total):
        producers.clear()
        gc.collect()
        held.append(deleted())

    q, k, v = producers
    arguments = [q, k, v]
    del q, k, v

    def call(progress):
        cqsa.attention(*(arguments.pop(0) for _ in range(3)), progress=progress)

    call(progress)
    assert held and all(state == [0, 0, 0] for state in held)


# ------------------------------------------------------------------------------------------------------------ buffers


def test_mapped_files(packed, tmp_path):
    q, k, v = packed
    wanted = cqsa.attention(q, k, v)
    path = tmp_path / "operands"
    path.write_bytes(q.tobytes() + k.tobytes() + v.tobytes() + bytes(wanted.nbytes))
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped, memoryview(mapped) as whole:
        sizes = [q.nbytes, k.nbytes, v.nbytes, wanted.nbytes]
        starts = np.cumsum([0] + sizes[:-1])
        parts = [whole[start:start + size] for start, size in zip(starts, sizes)]
        views = [part.cast("f", shape=x.shape) for part, x in zip(parts, (q, k, v, wanted))]
        assert view_of(views[0], "q").address == np.frombuffer(mapped, np.uint8).ctypes.data
        assert cqsa.attention(*views[:3], out=views[3]) is views[3]
        for view in views + parts:
            view.release()  # fails if anything still held the buffer
    np.testing.assert_array_equal(np.frombuffer(path.read_bytes()[-wanted.nbytes:], np.float32).reshape(wanted.shape), wanted)


def test_read_only_buffers(packed, tmp_path):
    q, k, v = packed
    path = tmp_path / "q"
    path.write_bytes(q.tobytes())
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = memoryview(mapped).cast("f", shape=q.shape)
        np.testing.assert_array_equal(cqsa.attention(view, k, v), cqsa.attention(q, k, v))
        refused("INVALID_ARGUMENT", lambda: cqsa.attention(q, k, v, out=view), "out is read-only")
        gc.collect()  # the exception's frames hold the buffer
        view.release()
    refused("INVALID_ARGUMENT", lambda: cqsa.attention(q, k, v, out=q.tobytes()), "out is read-only")


def test_half_floats_in_buffers(random):
    bits = random.standard_normal((1, 2, 9, 16)).astype(np.float16).view(np.uint16)
    lent = memoryview(bytearray(bits.tobytes())).cast("H", shape=bits.shape)
    wanted = cqsa.attention(*(bits.view(np.float16),) * 3)
    out = cqsa.attention(lent, lent, lent, dtype="float16")
    np.testing.assert_array_equal(out.view(np.float16), wanted)


def test_an_array_cannot_grow_under_a_call():
    values = plain_array.array("f", range(24))
    tried = []

    def progress(done, total):
        with pytest.raises(BufferError):
            values.append(1.0)
        tried.append(done)

    view = memoryview(values).cast("B").cast("f", shape=[1, 1, 6, 4])
    cqsa.attention(view, view, view, progress=progress)
    view.release()
    assert tried
    values.append(1.0)


def test_arrays_dropped_by_the_caller_live_until_the_call_ends(packed):
    arguments = [x.copy() for x in packed]
    refs = [weakref.ref(x) for x in arguments]
    seen = []
    wanted = cqsa.attention(*packed)
    out = cqsa.attention(*(arguments.pop(0) for _ in range(3)), progress=lambda *now: seen.append([ref() is not None for ref in refs]))
    np.testing.assert_array_equal(out, wanted)
    assert seen and all(all(alive) for alive in seen)
    gc.collect()
    assert not any(ref() is not None for ref in refs)


# --------------------------------------------------------------------------------------------------------- interfaces


class Interface:
    def __init__(self, x, name="__cuda_array_interface__", **changes):
        self.x = x
        interface = dict(x.__array_interface__, **changes)
        interface.pop("descr", None)
        setattr(self, name, interface)


def test_array_interface(packed):
    wanted = cqsa.attention(*packed)
    lent = [Interface(x, "__array_interface__") for x in packed]
    assert view_of(lent[0], "q").address == packed[0].ctypes.data
    np.testing.assert_array_equal(cqsa.attention(*lent), wanted)
    packed[0].flags.writeable = False
    lent = Interface(packed[0], "__array_interface__")
    refused("INVALID_ARGUMENT", lambda: cqsa.attention(*packed, out=lent), "out is read-only")


def test_device_memory_is_a_device_operand(packed):
    """Described as it is, and refused by a backend that cannot read it; the memory is not touched."""
    q, k, v = packed
    device = Interface(q, data=(0x7F0000000000, False))
    refused("DEVICE", lambda: cqsa.attention(device, k, v, backend="cpu"), "q is on device type 2 (cuda)")
    refused("DEVICE", lambda: cqsa.attention(q, k, v, out=device, backend="cpu"), "out is on device type 2")
    view = view_of(Interface(q[:, ::2], typestr="<f4"), "q")
    assert view.device == (2, 0) and view.strides == tuple(s // 4 for s in q[:, ::2].strides) and view.writable
    assert view_of(Interface(q.astype(np.float16).view("V2")), "q").code == 0x00011001  # bfloat16 comes like this
    refused("INVALID_ARGUMENT", lambda: cqsa.attention(Interface(q, mask=1), k, v, backend="cpu"), "masked")
    refused("INVALID_ARGUMENT", lambda: cqsa.attention(Interface(q, data=None), k, v, backend="cpu"), "__cuda_array_interface__")
    refused("DTYPE", lambda: cqsa.attention(Interface(q, typestr=">f4"), k, v, backend="cpu"))
    refused("INVALID_ARGUMENT", lambda: cqsa.attention(q, k, v, out=Interface(q, data=(4096, True)), backend="cpu"), "read-only")
    refused("DTYPE", lambda: cqsa.attention(q, k, v, sinks=Interface(np.zeros(4))), "cuda:0")


# ---------------------------------------------------------------------------------------------------------- addresses


def pointer(x, dtype="float32", **options):
    return cqsa.Tensor.from_pointer(x.ctypes.data, x.shape, dtype, [s // x.itemsize for s in x.strides], owner=x, **options)


def test_pointers(packed):
    wanted = cqsa.attention(*packed)
    out = np.full_like(wanted, np.nan)
    lent = pointer(out)
    assert cqsa.attention(*(pointer(x) for x in packed), out=lent) is lent
    np.testing.assert_array_equal(out, wanted)
    turned = packed[0].swapaxes(0, 3).copy().swapaxes(0, 3)[:, ::-1]
    np.testing.assert_array_equal(cqsa.attention(pointer(turned), *packed[1:]), cqsa.attention(turned, *packed[1:]))
    compact = cqsa.Tensor.from_pointer(packed[0].ctypes.data, packed[0].shape, np.float32)
    assert compact.strides == (4 * 19 * 32, 19 * 32, 32, 1) and compact.dtype == "float32" and compact.device == "cpu"
    assert "float32 [2, 4, 19, 32]" in repr(compact) and compact.writable and compact.address == packed[0].ctypes.data
    np.testing.assert_array_equal(cqsa.attention(compact, *packed[1:]), wanted)
    sinks = np.ones(4)
    np.testing.assert_array_equal(cqsa.attention(*packed, sinks=pointer(sinks, "float64")), cqsa.attention(*packed, sinks=sinks))


def test_pointers_to_bfloat16(packed):
    bits = [exact.to_bfloat16(x) for x in packed]
    out = cqsa.attention(*(pointer(x, "bfloat16") for x in bits))
    np.testing.assert_array_equal(out.view(np.uint16), cqsa.attention(*bits, dtype="bfloat16"))


def test_pointers_are_checked(packed):
    q, k, v = packed
    make = cqsa.Tensor.from_pointer
    refused("NULL_POINTER", lambda: cqsa.attention(make(0, q.shape, "float32"), k, v))
    refused("INVALID_ARGUMENT", lambda: make(-1, (1,), "float32"), "address")
    refused("INVALID_ARGUMENT", lambda: make("x", (1,), "float32"), "address")
    refused("INVALID_ARGUMENT", lambda: make(64, (1.5,), "float32"), "shape")
    refused("SHAPE", lambda: make(64, (-1,), "float32"), "shape")
    refused("SHAPE", lambda: make(64, (1, 2), "float32", [1]), "strides")
    refused("DTYPE", lambda: make(64, (1,), "float7"), "float7")
    refused("INVALID_ARGUMENT", lambda: make(64, (1,), "float32", device="tpu"), "tpu")
    refused("DEVICE", lambda: cqsa.attention(make(64, q.shape, "float32", device="cuda:1"), k, v, backend="cpu"), "cuda")
    refused("INVALID_ARGUMENT", lambda: cqsa.attention(q, k, v, out=pointer(q, writable=False)), "read-only")


@pytest.mark.parametrize("axes", [0, 3, 5, 6, 32, 100, 400])
def test_any_number_of_axes_is_described(packed, axes):
    q, k, v = packed
    odd = cqsa.Tensor.from_pointer(q.ctypes.data, (1,) * axes, "float32", (1,) * axes)
    for operands in ((odd, k, v), (q, odd, v), (q, k, odd)):
        refused("SHAPE", lambda: cqsa.attention(*operands, out=np.empty_like(q)), "axes")
    refused("SHAPE", lambda: cqsa.attention(odd, odd, odd, mask=np.ones((1,) * min(axes, 32), bool), out=np.empty_like(q)))


def test_pointers_hold_their_owner(packed):
    q = packed[0].copy()
    lent, ref = pointer(q), weakref.ref(q)
    del q
    gc.collect()
    assert ref() is not None
    cqsa.attention(lent, *packed[1:])
    del lent
    gc.collect()
    assert ref() is None


def test_plans_of_anything(packed):
    q, k, v = packed
    wanted = cqsa.attention_plan(q, k, v).line()
    assert cqsa.attention_plan(Producer(q), pointer(k), Interface(v, "__array_interface__")).line() == wanted


def test_merge_of_anything(packed):
    q, k, v = packed
    parts = [cqsa.attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 9), slice(9, None))]
    wanted = cqsa.attention_merge(*parts[0], *parts[1])
    got = cqsa.attention_merge(Producer(parts[0][0]), pointer(parts[0][1]), memoryview(parts[1][0]), parts[1][1])
    np.testing.assert_array_equal(got[0], wanted[0])


def test_ml_dtypes(random):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k, v = (random.standard_normal((1, 2, 20, 32)).astype(ml_dtypes.bfloat16) for _ in "qkv")
    out = cqsa.attention(q, k, v)
    assert out.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(cqsa.attention(pointer(q, q.dtype), k, v), out)
    assert cqsa.attention(pointer(q, "bfloat16"), k, v).dtype == ml_dtypes.bfloat16
    eight = [x.astype(getattr(ml_dtypes, name)) for x in (k, v) for name in ("float8_e4m3fn",)]
    assert cqsa.attention(q, *eight).dtype == ml_dtypes.bfloat16
    assert cqsa.attention(q[::-1, ::-1], k, v).shape == q.shape
