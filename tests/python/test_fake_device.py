# SPDX-License-Identifier: Apache-2.0
"""Runs on the fake device of tests/fake: a memory of its own that this process cannot read, budgets, pinned memory."""
import ctypes
import os

import numpy as np
import pytest

import cqsa
import exact
from cqsa import _context, _ffi
from test_devices import refused

PLUGIN = os.environ.get("CQSA_FAKE_BACKEND", "")
pytestmark = pytest.mark.skipif(not os.path.exists(PLUGIN), reason="CQSA_FAKE_BACKEND names no plugin")


@pytest.fixture(scope="module")
def fake():
    library = ctypes.CDLL(PLUGIN)
    for name in ("fake_alloc", "fake_pinned_alloc"):
        function = getattr(library, name)
        function.restype, function.argtypes = ctypes.c_void_p, [ctypes.c_uint64]
    for name in ("fake_free", "fake_pinned_free"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
    for name in ("fake_write", "fake_read"):
        getattr(library, name).argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
    params = _ffi.ContextParams(ctypes.sizeof(_ffi.ContextParams))
    folder = os.path.dirname(PLUGIN).encode()
    params.backend, params.backend_path = b"fake", folder
    handle = ctypes.c_void_p()
    _ffi.check(_ffi.library().cqsa_context_create(params, handle))
    for index in (None, 0):
        _context._contexts["fake", index] = _context.Context(handle.value, "fake", False, 0)
    return library


class Memory:
    """An array in the fake's memory."""

    def __init__(self, fake, array, kind):
        self.fake, self.array, self.kind = fake, np.ascontiguousarray(array), kind
        self.address = (fake.fake_alloc if kind == "ext" else fake.fake_pinned_alloc)(self.array.nbytes)
        if kind == "ext":
            fake.fake_write(self.address, self.array.ctypes.data, self.array.nbytes)
        else:
            ctypes.memmove(self.address, self.array.ctypes.data, self.array.nbytes)

    def tensor(self):
        return cqsa.Tensor.from_pointer(self.address, self.array.shape, self.array.dtype, device=self.kind, owner=self)

    def read(self):
        if self.kind == "ext":
            self.fake.fake_read(self.array.ctypes.data, self.address, self.array.nbytes)
        else:
            ctypes.memmove(self.array.ctypes.data, self.address, self.array.nbytes)
        return self.array

    def __del__(self):
        (self.fake.fake_free if self.kind == "ext" else self.fake.fake_pinned_free)(self.address)


@pytest.fixture
def packed(random):
    return tuple(random.standard_normal(shape).astype(np.float32) for shape in ((2, 4, 60, 32), (2, 2, 90, 32), (2, 2, 90, 32)))


def new_stream(fake, device=0):
    fake.fake_stream_create.restype, fake.fake_stream_create.argtypes = ctypes.c_void_p, [ctypes.c_int32]
    for name in ("fake_stream_sync", "fake_stream_destroy", "fake_capture_begin", "fake_capture_end"):
        getattr(fake, name).argtypes = [ctypes.c_void_p]
    fake.fake_capture_end.restype = ctypes.c_void_p
    return fake.fake_stream_create(device)


@pytest.mark.parametrize("kind", ["ext", "cuda_host"])
@pytest.mark.parametrize("limit", [None, "64KiB"])
def test_operands_and_results_where_they_are(fake, packed, kind, limit):
    wanted = exact.attention(*packed, causal="bottom_right")
    memories = [Memory(fake, x, kind) for x in packed]
    out, lse = Memory(fake, np.full((2, 4, 60, 32), np.nan, np.float32), kind), Memory(fake, np.full((2, 4, 60), np.nan, np.float32), kind)
    results = out.tensor(), lse.tensor()
    got = cqsa.attention(*(x.tensor() for x in memories), out=results, return_lse=True, causal="bottom_right", memory_limit=limit,
                         backend="fake")
    assert got[0] is results[0]
    fake.fake_stream_sync(None)  # the call only queued its work, if the plan was direct
    exact.assert_close(out.read(), wanted[0])
    exact.assert_close(lse.read(), wanted[1])


def test_numpy_through_the_device(fake, packed):
    out, info = cqsa.attention(*packed, backend="fake", memory_limit="64KiB", return_info=True)
    exact.assert_close(out, exact.attention(*packed)[0])
    assert info["plan"]["backend"] == "fake" and 0 < info["run"]["peak_device_bytes"] <= 64 << 10
    with pytest.raises(MemoryError):
        cqsa.attention(*packed, backend="fake", memory_limit=100)


def test_keys_in_host_memory(fake, packed):
    q = Memory(fake, packed[0], "ext")
    out = cqsa.attention(q.tensor(), *packed[1:], backend="fake")  # no framework there makes a result
    assert type(out) is np.ndarray
    exact.assert_close(out, exact.attention(*packed)[0])


def test_a_stream_of_the_caller(fake, packed):
    stream = new_stream(fake)
    memories = [Memory(fake, x, "ext") for x in packed]
    out = Memory(fake, np.full((2, 4, 60, 32), np.nan, np.float32), "ext")
    cqsa.attention(*(x.tensor() for x in memories), out=out.tensor(), stream=stream, backend="fake")
    fake.fake_stream_sync(stream)
    exact.assert_close(out.read(), exact.attention(*packed)[0])
    fake.fake_capture_begin(stream)
    refused("CAPTURE_UNSAFE", lambda: cqsa.attention(memories[0].tensor(), *packed[1:], stream=stream, backend="fake"), "captured")
    fake.fake_graph_destroy.argtypes = [ctypes.c_void_p]
    fake.fake_graph_destroy(fake.fake_capture_end(stream))
    fake.fake_stream_destroy(stream)
    other = new_stream(fake, 1)
    refused("DEVICE", lambda: cqsa.attention(memories[0].tensor(), *packed[1:], stream=other, backend="fake"), "stream")
    fake.fake_stream_destroy(other)


def test_refused(fake, packed):
    q = Memory(fake, packed[0], "ext").tensor()
    refused("DEVICE", lambda: cqsa.attention(q, *packed[1:], mask=np.ones((60, 90), bool), backend="fake"), "mask is on cpu", "ext:0")
    refused("DEVICE", lambda: cqsa.attention(q, *packed[1:], sinks=[1.0] * 4, backend="fake"), "sinks is not float32 in the memory of ext:0")
    refused("DEVICE", lambda: cqsa.attention(q, *packed[1:], backend="cpu"), "q is on device type 12 (ext)")


def test_place_and_plans(fake, packed):
    found = cqsa.place(*packed, backend="fake")
    assert found.places == ["device"] * 3 and found.device_bytes == sum(x.nbytes for x in packed)
    assert cqsa.place(*packed, reserve=1, backend="fake").places == ["pinned"] * 3
    q = Memory(fake, packed[0], "ext").tensor()
    plan = cqsa.attention_plan(q, q, q, backend="fake").describe()
    assert plan["backend"] == "fake" and plan["place_q"] == plan["place_out"] == "device"


def test_fp8(fake, random):
    """Both sides, in memory that this process cannot read; the same bits as on the CPU."""
    x = random.standard_normal((70, 130)).astype(np.float32)
    wanted = cqsa.fp8_quantize(x, layout="dual", granularity="1x64", nan="flag")
    names = ("data", "data_t", "scale", "scale_inv", "scale_inv_t", "amax", "flags")
    made = {name: Memory(fake, np.zeros_like(getattr(wanted, name)), "ext") for name in names}
    out = wanted._replace(**{name: memory.tensor() for name, memory in made.items()})
    source = Memory(fake, x, "ext")
    q = cqsa.fp8_quantize(source.tensor(), layout="dual", granularity="1x64", flags=out.flags, out=out, backend="fake")
    fake.fake_stream_sync(None)
    for name, memory in made.items():
        np.testing.assert_array_equal(memory.read(), getattr(wanted, name), name)
    back = Memory(fake, np.zeros_like(x), "ext")
    cqsa.fp8_dequantize(q, out=back.tensor(), backend="fake")
    fake.fake_stream_sync(None)
    np.testing.assert_array_equal(back.read(), cqsa.fp8_dequantize(wanted))
    product = Memory(fake, np.zeros((70, 70), np.float32), "ext")
    cqsa.fp8_gemm(q.data, q.data, format_a="e4m3fn", format_b="e4m3fn", out=product.tensor(), backend="fake")
    fake.fake_stream_sync(None)
    codes = cqsa.fp8_dequantize(wanted.data, format="e4m3fn").astype(np.float64)
    np.testing.assert_allclose(product.read(), codes @ codes.T, rtol=1e-4, atol=1e-2 * np.abs(codes).max())
    with pytest.raises(ValueError, match="is on"):
        cqsa.fp8_quantize(source.tensor(), out=np.zeros((70, 130), np.uint8), backend="fake")


def test_quant(fake, random):
    """Rows of quantized matrices in memory that this process cannot read; zeros for rows that are not there."""
    for name, format in cqsa.quant_formats().items():
        cols = 512
        data = random.integers(0, 256, (5, cols // format.block_elements * format.block_bytes), np.uint8)
        wanted = cqsa.QuantTensor(data, name)
        w = cqsa.QuantTensor(Memory(fake, data, "ext").tensor(), name)
        out = Memory(fake, np.zeros((4, cols), np.float32), "ext")
        ids = Memory(fake, np.array([4, 0, 9, 2]), "ext")
        cqsa.dequantize_rows(w, ids.tensor(), out=out.tensor(), backend="fake")
        fake.fake_stream_sync(None)
        got = out.read()
        assert not got[2].any()
        np.testing.assert_array_equal(got[[0, 1, 3]], cqsa.dequantize_rows(wanted, [4, 0, 2]), name)
        cqsa.dequantize_rows(w, slice(1, 5), out=out.tensor(), backend="fake")
        fake.fake_stream_sync(None)
        np.testing.assert_array_equal(out.read(), cqsa.dequantize_rows(wanted, slice(1, 5)), name)
    refused("DEVICE", lambda: cqsa.dequantize_rows(w, [0], out=out.tensor(), backend="fake"), "rows")
    refused("DEVICE", lambda: cqsa.dequantize_rows(wanted, out=out.tensor(), backend="fake"), "w is on")
    refused("DEVICE", lambda: w.data, "ext:0")
