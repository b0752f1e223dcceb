# SPDX-License-Identifier: Apache-2.0
"""Operands on a GPU that is not there: what the library is told, on which stream, and what is ordered with it. The last
function of the way, cqsa_attention(), is replaced; the results of a real GPU are tested by tests/device/test_python_cuda.py."""
import gc
import sys

import numpy as np
import pytest

import cqsa
import stand_ins
from cqsa import _attention, _context, _driver, _ffi, _repeat
from stand_ins import CupyArray, CupyStream, JaxArray, Lends, TorchStream, TorchTensor, Tracer

CPU, CUDA, CUDA_HOST = 1, 2, 3


def refused(status_name, call, *words):
    with pytest.raises(cqsa.CqsaError) as caught:
        call()
    assert caught.value.status_name == "CQSA_ERROR_" + status_name, str(caught.value)
    for word in words:
        assert word in str(caught.value), str(caught.value)


class Library:
    """The real library, but for the calls that would run something."""

    def __init__(self, real):
        self.real, self.calls = real, []

    def __getattr__(self, name):
        return getattr(self.real, name)

    def cqsa_attention(self, context, params, args, stream):
        fields = [name for name, kind in _ffi.AttentionArgs._fields_ if kind is _ffi.c_void_p][:15]
        tensors = {name: _ffi.Tensor.from_address(getattr(args, name)) for name in fields if getattr(args, name)}
        self.calls.append({
            "context": context, "stream": stream, "device_bytes": params.max_device_bytes, "host_bytes": params.max_host_bytes,
            "cancel": args.cancel,
            **{name: (x.device_type, x.device_id, x.data) for name, x in tensors.items()},
            **{name + "_dtype": x.dtype for name, x in tensors.items()}})
        return 0

    def cqsa_kv_append(self, context, args, stream):
        fields = {name: _ffi.Tensor.from_address(getattr(args, name)) for name in ("x", "pool", "page_table", "cells")}
        assert len({(x.device_type, x.device_id) for x in fields.values()}) == 1
        self.calls.append({"context": context, "stream": stream, "device": fields["x"].device_type,
                           **{name: x.dtype for name, x in fields.items()}})
        return 0

    cqsa_kv_gather = cqsa_kv_append

    def cqsa_hadamard(self, context, x, out, stream):
        devices = [_ffi.Tensor.from_address(tensor).device_type for tensor in (x, out)]
        assert devices[0] == devices[1]
        self.calls.append({"context": context, "stream": stream, "device": devices[0]})
        return 0

    def cqsa_attention_merge(self, context, args, stream):
        self.calls.append({"context": context, "stream": stream})
        return 0


@pytest.fixture
def driver(monkeypatch):
    made = stand_ins.Driver()
    monkeypatch.setattr(_driver, "cuda", lambda: made)
    return made


@pytest.fixture
def library(monkeypatch, driver):
    """A cuda backend with two devices, at the addresses 1000 and 1001."""
    made = Library(_ffi.library())
    monkeypatch.setattr(_ffi, "library", lambda: made)
    contexts = {("cuda", index): _context.Context(1000 + (index or 0), "cuda", False, index or 0) for index in (None, 0, 1)}
    monkeypatch.setattr(_context, "_contexts", contexts)
    return made


@pytest.fixture
def torch(monkeypatch, library):
    made = stand_ins.torch_module()
    monkeypatch.setitem(sys.modules, "torch", made)
    monkeypatch.setattr(cqsa._torch, "_codes", {})
    return made


@pytest.fixture
def cupy(monkeypatch, library):
    made = stand_ins.cupy_module()
    monkeypatch.setitem(sys.modules, "cupy", made)
    return made


@pytest.fixture
def jax(monkeypatch, library):
    made = stand_ins.jax_module()
    monkeypatch.setitem(sys.modules, "jax", made)
    return made


def arrays(dtype=np.float32):
    return [np.ones(shape, dtype) for shape in ((2, 4, 19, 32), (2, 2, 23, 32), (2, 2, 23, 24))]


def tensors(device=0, dtype=np.float32):
    return [TorchTensor(x, device) for x in arrays(dtype)]


# --------------------------------------------------------------------------------------------------------------- torch


def test_torch_on_a_gpu(torch, library, driver):
    q, k, v = tensors()
    torch.current[0] = 77
    out, lse = cqsa.attention(q, k, v, return_lse=True, memory_limit="1MiB")
    assert type(out) is TorchTensor and out.index == 0 and out.shape == (2, 4, 19, 24) and lse.shape == (2, 4, 19)
    call, = library.calls
    assert call["context"] == 1000 and call["stream"] == 77 and call["device_bytes"] == 1 << 20 and call["host_bytes"] == 0
    for name, x in (("q", q), ("k", k), ("v", v), ("out", out), ("lse", lse)):
        assert call[name] == (CUDA, 0, x.data_ptr()), name
    assert not driver.asked  # everything is on one stream


@pytest.fixture
def known(torch, library, monkeypatch):
    """Calls of forms that were seen twice must not go the long way again."""
    monkeypatch.setattr(_repeat, "forms", {})
    monkeypatch.setattr(cqsa._torch, "tensor_type", None)

    def learn(*operands, **options):
        for _ in range(2):
            cqsa.attention(*operands, **options)
        library.calls.clear()
        monkeypatch.setattr(_attention, "Call", lambda *a, **k: pytest.fail("the long way"))
    return learn


@pytest.mark.parametrize("device", [0, 1])
def test_a_call_made_before(torch, library, driver, known, device):
    torch.current = {0: 5, 1: 0}
    known(*tensors(device), return_lse=True, causal="bottom_right")
    q, k, v = tensors(device)
    out, lse = cqsa.attention(q, k, v, return_lse=True, causal="bottom_right")
    call, = library.calls
    assert call["context"] == 1000 + device and call["stream"] == (5, None)[device]
    for name, x in (("q", q), ("k", k), ("v", v), ("out", out), ("lse", lse)):
        assert call[name] == (CUDA, device, x.data_ptr()), name
    assert out.shape == (2, 4, 19, 24) and out.dtype is torch.float32 and lse.shape == (2, 4, 19) and out.index == device
    assert not driver.asked
    torch.current[device] = 9
    cqsa.attention(q, k, v, return_lse=True, causal="bottom_right")
    assert library.calls[1]["stream"] == 9 and library.calls[1]["out"] != call["out"]


def test_a_call_made_before_with_outputs(torch, library, known):
    made = [TorchTensor(np.zeros(shape, np.float32)) for shape in ((2, 4, 19, 24), (2, 4, 19))]
    known(*tensors(), out=tuple(made), return_lse=True)
    assert cqsa.attention(*tensors(), out=tuple(made), return_lse=True) == tuple(made)
    assert [x.version for x in made] == [3, 3] and library.calls[0]["lse"] == (CUDA, 0, made[1].data_ptr())


@pytest.mark.parametrize("options", [
    {"causal": "top_left"}, {"softmax_scale": 0.5}, {"softmax_scale": 1}, {"softcap": 1.0}, {"window": (1, 0)}, {"window": [1, 0]}, {"window": np.array([1, 0])},
    {"memory_limit": 1 << 30}, {"return_lse": True}, {"backend": "cuda"}, {"layout": "bhsd", "stream": 3}, {"progress": print}])
def test_another_call(torch, library, known, options):
    known(*tensors())
    with pytest.raises(pytest.fail.Exception, match="the long way"):
        cqsa.attention(*tensors(), **options)
    assert not library.calls


def test_other_tensors_are_another_call(torch, library, known):
    q, k, v = tensors()
    known(q, k, v)
    turned = TorchTensor(np.ones((2, 19, 4, 32), np.float32).transpose(0, 2, 1, 3))
    following = TorchTensor(q.array)
    following.requires_grad, torch.is_grad_enabled = True, lambda: True
    negated = TorchTensor(q.array)
    negated.is_neg = lambda: True
    given = TorchTensor(np.zeros((2, 4, 19, 24), np.float32))
    for other in (turned, following, negated, TorchTensor(q.array, 1), TorchTensor(q.array.astype(np.float16)), q.array):
        with pytest.raises(pytest.fail.Exception, match="the long way"):
            cqsa.attention(other, k, v)
    for other in ({"out": given}, {"out": given.array}):
        with pytest.raises(pytest.fail.Exception, match="the long way"):
            cqsa.attention(q, k, v, **other)
    cqsa.attention(q, k, v)
    assert len(library.calls) == 1


def test_a_call_made_before_that_fails(torch, library, known, monkeypatch):
    known(*tensors())
    monkeypatch.setattr(library, "cqsa_attention", lambda *a: 62, raising=False)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            cqsa.attention(*tensors())
    monkeypatch.setattr(library, "cqsa_attention", lambda *a: 65, raising=False)  # a capture that lacks its workspace
    with pytest.raises(pytest.fail.Exception, match="the long way"):
        cqsa.attention(*tensors())


def test_a_new_context_forgets_the_calls(torch, library, known, monkeypatch):
    known(*tensors())
    monkeypatch.setitem(_context._contexts, ("cuda", 0), _context.Context(2000, "cuda", False, 0))
    with pytest.raises(pytest.fail.Exception, match="the long way"):
        cqsa.attention(*tensors())


def test_the_default_stream_is_null(torch, library):
    cqsa.attention(*tensors())
    assert library.calls[0]["stream"] is None


def test_the_second_gpu(torch, library):
    torch.current = {0: 5, 1: 6}
    out = cqsa.attention(*tensors(1))
    assert out.index == 1 and library.calls[0]["context"] == 1001 and library.calls[0]["stream"] == 6
    cqsa.attention(*tensors(1), backend="cuda")
    assert library.calls[1]["context"] == 1001
    refused("DEVICE", lambda: cqsa.attention(*tensors(1), backend="cuda:0"), "backend is 'cuda:0'", "device 1")


def test_bfloat16_and_outputs_of_the_caller(torch, library):
    bits = [TorchTensor(x.astype(np.uint16), 0, torch.bfloat16) for x in arrays()]
    out = cqsa.attention(*bits)
    assert out.dtype is torch.bfloat16 and library.calls[0]["q_dtype"] == _ffi.DTYPE_BF16
    given = TorchTensor(np.zeros((2, 4, 19, 24), np.float32))
    assert cqsa.attention(*bits, out=given) is given and given.version == 1
    assert library.calls[1]["out"] == (CUDA, 0, given.data_ptr())
    on_host = np.zeros((2, 4, 19, 24), np.float32)
    assert cqsa.attention(*bits, out=on_host) is on_host and library.calls[2]["out"][0] == CPU


@pytest.mark.parametrize("make", [lambda handle: handle, TorchStream, CupyStream, np.int64])
def test_a_stream_that_is_named(torch, library, driver, make):
    q, k, v = tensors()
    torch.current[0] = 77
    out = cqsa.attention(q, k, v, stream=make(99))
    assert library.calls[0]["stream"] == 99
    assert driver.asked == [("order", 0, 77, 99)]  # the operands come from stream 77; who uses the results waits for 99 himself
    assert all(x.recorded == [99] for x in (q, k, v, out))


def test_the_stream_that_is_current_can_be_named(torch, library, driver):
    torch.current[0] = 77
    cqsa.attention(*tensors(), stream=TorchStream(77))
    assert library.calls[0]["stream"] == 77 and not driver.asked


def test_a_captured_stream_waits_for_nobody(torch, library, driver):
    torch.current[0] = 77
    driver.captured = {99}
    cqsa.attention(*tensors(), stream=99)
    assert not driver.asked


def test_streams_that_are_refused(torch, library):
    refused("INVALID_ARGUMENT", lambda: cqsa.attention(*tensors(), stream=-1), "stream is -1")
    refused("INVALID_ARGUMENT", lambda: cqsa.attention(*tensors(), stream="fast"), "stream is 'fast'")
    refused("INVALID_ARGUMENT", lambda: cqsa.attention(*tensors(), stream=1 << 64), "native handle")
    refused("DEVICE", lambda: cqsa.attention(*tensors(), stream=TorchStream(9, 1)), "stream is of device 1, but q is on cuda:0")
    refused("DEVICE", lambda: cqsa.attention(*tensors(), stream=CupyStream(9, 1)), "stream is of device 1")
    cqsa.attention(*tensors(1), stream=CupyStream(0, -1))  # cupy's default stream is of any device
    assert len(library.calls) == 1


class Spoken:
    def __cuda_stream__(self):
        return 0, 55


def test_other_streams(torch, library):
    cqsa.attention(*tensors(), stream=Spoken())
    assert library.calls[0]["stream"] == 55


def test_operands_on_two_gpus(torch, library):
    q, k, v = tensors()
    other = tensors(1)
    refused("DEVICE", lambda: cqsa.attention(q, other[1], v), "k is on cuda:1, but q is on cuda:0")
    refused("DEVICE", lambda: cqsa.attention(q, k, v, out=TorchTensor(np.zeros((2, 4, 19, 24), np.float32), 1)), "out is on cuda:1")
    refused("DEVICE", lambda: cqsa.attention(q, k, v, mask=TorchTensor(np.ones((19, 23), bool), 1)), "mask is on cuda:1")
    assert not library.calls


def test_host_memory_among_device_memory(torch, library):
    q, k, v = tensors()
    refused("DEVICE", lambda: cqsa.attention(q, k, v, mask=np.ones((19, 23), bool)), "mask is on cpu, but q is on cuda:0")
    refused("DEVICE", lambda: cqsa.attention(q, k, TorchTensor(v.array, None)), "v is on cpu, but k is on cuda:0")
    refused("DEVICE", lambda: cqsa.attention(q, k, v, out=(q, np.zeros((2, 4, 19), np.float32)), return_lse=True),
            "lse is on cpu, but out is on cuda:0")
    assert not library.calls
    on_host = [TorchTensor(x.array, None) for x in (k, v)]
    out = cqsa.attention(q, *on_host)  # keys and values may stay where there is room
    assert out.index == 0 and library.calls[0]["q"][0] == CUDA and library.calls[0]["k"][0] == CPU


def test_small_operands_go_to_the_device(torch, library):
    q, k, v = tensors()
    slopes = TorchTensor(np.ones(4, np.float64), 0)
    cqsa.attention(q, k, v, sinks=[1, 2, 3, 4], alibi_slopes=slopes, seqused_k=np.array([3, 4], np.int16), k_scale=None)
    call = library.calls[0]
    assert call["sinks"][0] == call["alibi_slopes"][0] == call["seqused_k"][0] == CUDA
    assert call["sinks_dtype"] == call["alibi_slopes_dtype"] == _ffi.DTYPE_F32 and call["seqused_k_dtype"] == _ffi.DTYPE_I64
    assert torch.conversions == [("float64", "float32"), ("float32", "float32"), ("int64", "int64")]
    there = TorchTensor(np.ones(4, np.float32), 0)
    cqsa.attention(q, k, v, sinks=there)
    assert library.calls[1]["sinks"] == (CUDA, 0, there.data_ptr()) and len(torch.conversions) == 3


def test_lengths_get_one_type(torch, library):
    flat = [TorchTensor(np.ones((40, heads, 32), np.float32)) for heads in (4, 2, 2)]
    starts = TorchTensor(np.array([0, 40], np.int32)), TorchTensor(np.array([0, 40], np.int64))
    cqsa.attention(*flat, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1])
    assert library.calls[0]["cu_seqlens_q_dtype"] == library.calls[0]["cu_seqlens_k_dtype"] == _ffi.DTYPE_I64
    pools = [TorchTensor(np.ones((5, 8, 2, 32), np.float32)) for _ in "kv"]
    q = TorchTensor(np.ones((1, 4, 3, 32), np.float32))
    cqsa.attention(q, *pools, page_table=TorchTensor(np.zeros((1, 2), np.int64)))
    assert library.calls[1]["page_table"][0] == CUDA and library.calls[1]["page_table_dtype"] == _ffi.DTYPE_I32


def test_long_calls_on_a_gpu_need_no_thread(torch, library):
    q = TorchTensor(np.empty((1, 8, 8192, 64), np.float16))
    cqsa.attention(q, q, q)
    assert not library.calls[0]["cancel"]


def test_no_backend_for_the_gpu(torch, library, monkeypatch):
    monkeypatch.setattr(_context, "_contexts", {})
    with pytest.raises(NotImplementedError) as caught:
        cqsa.attention(*tensors())
    text = str(caught.value)
    assert text.startswith("q is on cuda:0, but the backend cuda is not ready here: "), text  # not_found or no_driver


def test_merge_on_a_gpu(torch, library):
    torch.current[0] = 77
    parts = [TorchTensor(np.ones((2, 19, 24), np.float32)), TorchTensor(np.ones((2, 19), np.float32))]
    out, lse = cqsa.attention_merge(*parts, *parts)
    assert type(out) is TorchTensor and lse.index == 0 and library.calls == [{"context": 1000, "stream": 77}]


def test_caches_on_a_gpu(torch, library):
    torch.current[0] = 77
    x, pool = TorchTensor(np.ones((3, 2, 32), np.float32)), TorchTensor(np.ones((2, 4, 2, 32), np.float16))
    table, cells = TorchTensor(np.zeros(2, np.int64)), TorchTensor(np.zeros(3, np.int64))
    cqsa.kv_append(x, pool, table, cells)
    back = cqsa.kv_gather(pool, table, cells)
    assert type(back) is TorchTensor and back.index == 0 and back.shape == (3, 2, 32)
    turned = cqsa.hadamard(x)
    assert type(turned) is TorchTensor and turned.shape == (3, 2, 32)
    here = {"context": 1000, "stream": 77, "device": CUDA}
    places = {"page_table": _ffi.DTYPE_I32, "cells": _ffi.DTYPE_I64, "pool": _ffi.DTYPE_F16}
    assert library.calls == [{**here, **places, "x": _ffi.DTYPE_F32}, {**here, **places, "x": _ffi.DTYPE_F16}, here]


def test_a_captured_call_gets_a_workspace(torch, library, monkeypatch):
    q, k, v = tensors()
    torch.capturing, torch.current[0] = True, 77
    given = {}

    def query(plan, size_out):
        size_out._obj.value = 4096
        return 0

    def execute(plan, args, stream):
        given.update(workspace=args.workspace, bytes=args.workspace_bytes, stream=stream, progress=args.cancel)
        return 0
    monkeypatch.setattr(library, "cqsa_attention_params_of", lambda *a: 0, raising=False)
    monkeypatch.setattr(library, "cqsa_attention_plan_create", lambda context, params, out: setattr(out._obj, "value", 1) or 0, raising=False)
    monkeypatch.setattr(library, "cqsa_plan_destroy", lambda plan: None, raising=False)
    monkeypatch.setattr(library, "cqsa_workspace_query", query, raising=False)
    monkeypatch.setattr(library, "cqsa_workspace_init", lambda plan, memory, size: given.update(ready=(memory, size)) or 0, raising=False)
    monkeypatch.setattr(library, "cqsa_attention_execute", execute, raising=False)
    cqsa.attention(q, k, v)
    assert given["workspace"] and given["ready"] == (given["workspace"], 4096) and given["bytes"] == 4096 and given["stream"] == 77
    refused("DEVICE", lambda: cqsa.attention(q, k, v, sinks=[1.0] * 4), "sinks is in host memory", "captured")


@pytest.fixture
def patched(torch):
    original = torch.nn.functional.scaled_dot_product_attention
    cqsa.patch_torch_sdpa(min_tokens=0, memory_limit="1MiB")
    yield torch
    cqsa.unpatch_torch_sdpa()
    assert torch.nn.functional.scaled_dot_product_attention is original


def test_patch_takes_tensors_on_a_gpu(patched, library):
    sdpa = patched.nn.functional.scaled_dot_product_attention
    patched.current[1] = 66
    q, k, v = (TorchTensor(np.ones((2, 4, size, 32), np.float16), 1) for size in (19, 23, 23))
    out = sdpa(q, k, v, attn_mask=TorchTensor(np.ones((19, 23), bool), 1))
    assert type(out) is TorchTensor and out.index == 1
    call, = library.calls
    assert call["context"] == 1001 and call["stream"] == 66 and call["mask"][:2] == (CUDA, 1) and call["device_bytes"] == 1 << 20
    sdpa(q, k, v, TorchTensor(np.ones((4, 1, 23), np.float16), 1), scale=0.5)
    assert library.calls[1]["bias"][:2] == (CUDA, 1)


def test_patch_leaves_to_torch_what_it_cannot_do_on_a_gpu(patched, library, monkeypatch):
    sdpa = patched.nn.functional.scaled_dot_product_attention
    q = TorchTensor(np.ones((2, 4, 19, 32), np.float16), 0)
    elsewhere, on_host = TorchTensor(q.array, 1), TorchTensor(q.array, None)
    assert sdpa(q, elsewhere, q) == sdpa(q, on_host, q) == "torch's own"
    assert sdpa(q, q, q, TorchTensor(np.ones((19, 19), bool), None)) == "torch's own"
    patched.autocast.add("cuda")
    assert sdpa(q, q, q) == "torch's own"
    patched.autocast.clear()
    patched.autocast.add("cpu")
    assert type(sdpa(q, q, q)) is TorchTensor
    monkeypatch.setattr(_context, "_contexts", {})  # no backend for it
    assert sdpa(q, q, q) == "torch's own" and len(library.calls) == 1


# ------------------------------------------------------------------------------------------------------- cupy and jax


def test_cupy(cupy, library, driver):
    q, k, v = (CupyArray(x) for x in arrays(np.float16))
    cupy.current = 33
    turned = CupyArray(np.ones((2, 19, 4, 32), np.float16).swapaxes(1, 2))
    out = cqsa.attention(turned, k, v)
    assert type(out) is CupyArray and out.dtype == np.float16 and library.calls[0]["stream"] == 33
    assert library.calls[0]["q"] == (CUDA, 0, turned.data.ptr) and not driver.asked
    cqsa.attention(q, k, v, stream=CupyStream(44), sinks=[1.0] * 4)
    assert library.calls[1]["stream"] == 44 and library.calls[1]["sinks"][0] == CUDA
    # its pool knows nothing of stream 44, so that the memory could go to somebody else before that got to it
    assert driver.asked == [("order", 0, 33, 44), ("synchronize", 0, 44)]
    refused("DTYPE", lambda: cqsa.attention(CupyArray(np.ones((2, 4, 19, 32), np.complex64)), k, v), "complex64")


def test_two_frameworks(torch, cupy, library, driver):
    torch.current[0], cupy.current = 77, 33
    q, k, v = tensors()
    lent = CupyArray(k.array), CupyArray(v.array)
    out = CupyArray(np.zeros((2, 4, 19, 24), np.float32))
    cqsa.attention(q, *lent, out=out)
    assert library.calls[0]["stream"] == 77
    assert driver.asked == [("order", 0, 33, 77), ("order", 0, 77, 33)]  # cupy's work first, and cupy sees the result


def test_jax(jax, library, driver):
    log = []
    q, k, v = (JaxArray(x, log=log) for x in arrays(np.float16))
    out, lse = cqsa.attention(q, k, v, return_lse=True)
    assert [entry for entry in log if entry[0] == "lend"] == [("lend", 1)] * 3  # 1: the legacy default stream
    assert library.calls[0]["stream"] is None
    assert driver.asked == [("allocate", 0, 2 * 4 * 19 * 24 * 2), ("allocate", 0, 2 * 4 * 19 * 4), ("synchronize", 0, 0)]
    assert isinstance(out, JaxArray) and out.array.dtype == np.float16 and out.array.shape == (2, 4, 19, 24)
    assert lse.array.dtype == np.float32 and library.calls[0]["out"][2] == out.array.ctypes.data
    gc.collect()
    assert log.count(("back",)) == 3 and len(driver.memory) == 2
    del out, lse
    gc.collect()
    assert not driver.memory and not cqsa._jax._lent


def test_jax_frees_what_it_did_not_take(jax, library, driver):
    jax.dlpack.from_dlpack = lambda producer: producer.__dlpack__() and 1 / 0
    with pytest.raises(ZeroDivisionError):
        cqsa.attention(*(JaxArray(x) for x in arrays()))
    gc.collect()
    assert not driver.memory and not cqsa._jax._lent


def test_jax_is_refused(jax, library):
    q, k, v = (JaxArray(x) for x in arrays())
    refused("INVALID_ARGUMENT", lambda: cqsa.attention(q, k, v, out=q), "never change")
    refused("INVALID_ARGUMENT", lambda: cqsa.attention(Tracer(q.array), k, v), "traced by jax")
    refused("DEVICE", lambda: cqsa.attention(q, k, v, sinks=[1.0] * 4), "sinks is not float32 in the memory of cuda:0")
    sinks = JaxArray(np.ones(4, np.float32))
    cqsa.attention(q, k, v, sinks=sinks)
    assert library.calls[0]["sinks"] == (CUDA, 0, sinks.array.ctypes.data)


def test_lent_memory_is_given_back_when_the_work_has_ended(library, driver):
    log = driver.asked
    q, k, v = (Lends(x, log=log) for x in arrays())
    out = np.zeros((2, 4, 19, 24), np.float32)
    cqsa.attention(q, k, v, out=out, stream=88)
    assert log[:4] == [("lend", 88)] * 3 + [("synchronize", 0, 88)] and log[4:] == [("back",)] * 3
    refused("INVALID_ARGUMENT", lambda: cqsa.attention(q, Lends(k.array[:, :, :, ::2]), v, layout="x"))


class Interface:
    def __init__(self, array, **more):
        self.array = array
        self.__cuda_array_interface__ = dict(shape=array.shape, typestr=array.dtype.str, strides=None,
                                             data=(array.ctypes.data, False), version=3, **more)


def test_the_stream_of_an_array_interface(library, driver):
    q, k, v = arrays()
    out = Interface(np.zeros((2, 4, 19, 24), np.float32))
    cqsa.attention(Interface(q), Interface(k, stream=5), Interface(v, stream=1), out=out)
    assert driver.asked == [("order", 0, 5, 0), ("synchronize", 0, 0)]  # 1 and 0 are the same stream
    assert library.calls[0]["q"] == (CUDA, 0, q.ctypes.data)
    for bad in (0, -1, "x"):
        refused("INVALID_ARGUMENT", lambda: cqsa.attention(Interface(q, stream=bad), k, v), "stream")


# ---------------------------------------------------------------------------------------------- host memory, and place


def test_pinned_memory_is_found(library, driver):
    q, k, v = arrays()
    out = np.zeros((2, 4, 19, 24), np.float32)
    driver.pinned = {x.ctypes.data for x in (q, k, v)}
    cqsa.attention(q, k, v, out=out, backend="cuda", memory_limit=1 << 20)
    call = library.calls[0]
    assert [call[name][0] for name in ("q", "k", "v", "out")] == [CUDA_HOST, CUDA_HOST, CUDA_HOST, CPU]
    assert call["device_bytes"] == 1 << 20
    driver.pinned.remove(v.ctypes.data)  # the library takes k and v as one kind of memory, and q with its mask
    mask = np.ones((19, 23), bool)
    cqsa.attention(q, k, v, mask=mask, backend="cuda")
    assert [library.calls[1][name][0] for name in ("q", "mask", "k", "v")] == [CPU] * 4
    driver.pinned.add(mask.ctypes.data)
    cqsa.attention(q, k, v, mask=mask, backend="cuda")
    assert [library.calls[2][name][0] for name in ("q", "mask", "k", "v")] == [CUDA_HOST, CUDA_HOST, CPU, CPU]


def test_spans():
    x = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    for view in (x, x[::-1], x[:, ::2], x[1:, :, ::-1], x.T, x[:1, :1, :1]):
        first, size = cqsa._sources.view_of(view, "x").span()
        low, high = np.lib.array_utils.byte_bounds(view) if hasattr(np.lib, "array_utils") else np.byte_bounds(view)
        assert (first, first + size) == (low, high)


def test_place_counts_what_is_free(torch, library, monkeypatch):
    card = {"name": "card", "host": False, "pinned": True, "device_bytes": 500, "device_total_bytes": 1000}
    monkeypatch.setattr(cqsa._place, "hardware_of", lambda backend, device: {**card, "name": f"{backend}:{device}"})
    there = TorchTensor(np.zeros(100, np.float32), 1)
    found = cqsa.place(there, np.zeros(300, np.int8), np.zeros(100, np.int8))
    assert found.places == ["device", "device", "pinned"] and found.limit_bytes == 350 and found.reason.startswith("cuda:1")


def test_a_plan_for_operands_on_a_gpu(torch, library, monkeypatch):
    asked = []

    def params_of(context, args, params):
        out = _ffi.Tensor.from_address(args.out)
        asked.append((context, out.device_type, out.device_id))
        return 1
    monkeypatch.setattr(library, "cqsa_attention_params_of", params_of, raising=False)
    with pytest.raises(cqsa.CqsaError):
        cqsa.attention_plan(*tensors(1))
    assert asked == [(1001, CUDA, 1)]
