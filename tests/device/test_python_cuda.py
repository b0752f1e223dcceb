# SPDX-License-Identifier: Apache-2.0
"""The Python package on an NVIDIA GPU, with torch, cupy and jax. A plain script, for CI has no GPU:

    PYTHONPATH=bindings/python CQSA_LIBRARY=$PWD/build/release/lib/libcqsa.so.0 python3 tests/device/test_python_cuda.py [WORD ..]

WORD: run only the tests with it in their name. pytest takes the file too. Everything is compared with float64 on the GPU.
"""
import gc
import math
import os
import subprocess
import sys
import threading
import time
import traceback
import unittest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # jax would take most of the card

import numpy as np
import torch

import cqsa
from cqsa import _attention, _ffi, _queue

F = torch.nn.functional
SDPA = F.scaled_dot_product_attention
CUDA = torch.device("cuda", 0)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SLEEP_CYCLES = 400_000_000  # some 0.2 s: how long a wrong stream has to show itself
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


Skip = unittest.SkipTest  # which pytest knows too


def module(name):
    try:
        return __import__(name)
    except ImportError as error:
        raise Skip(f"no {name}: {error}") from None


def operands(dtype=torch.float32, batch=2, heads=4, kv_heads=2, rows=190, keys=230, dim=64, seed=1, device=CUDA):
    random = torch.Generator(device="cpu").manual_seed(seed)
    shapes = ((batch, heads, rows, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, dim))
    return [torch.randn(shape, generator=random).to(dtype).to(device) for shape in shapes]


def exact(q, k, v, causal="none", mask=None, bias=None, scale=None):
    q, k, v = (x.detach().to(CUDA, torch.float64) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    rows, keys = q.shape[2], k.shape[2]
    s = q @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[3]))
    if bias is not None:
        s = s + bias.to(CUDA, torch.float64)
    if causal != "none":
        offset = 0 if causal == "top_left" else keys - rows
        distance = torch.arange(rows, device=CUDA)[:, None] + offset - torch.arange(keys, device=CUDA)
        s = s.masked_fill(distance < 0, -math.inf)
    if mask is not None:
        s = s.masked_fill(~mask.to(CUDA), -math.inf)
    return torch.nan_to_num(torch.softmax(s, -1)) @ v


def close(got, wanted, dtype=None):
    dtype = dtype or got.dtype
    error = (got.detach().to(CUDA, torch.float64) - wanted.to(CUDA, torch.float64)).abs()
    bound = TOLERANCE[dtype] * (1 + wanted.to(CUDA).abs())
    assert not torch.isnan(error).any(), "NaN in the result"
    assert (error <= bound).all(), f"largest error {error.max().item():.3g} of {TOLERANCE[dtype]}"


def refused(status, call, *words):
    try:
        call()
    except cqsa.CqsaError as error:
        assert error.status_name == "CQSA_ERROR_" + status, f"{error.status_name}: {error}"
        for word in words:
            assert word in str(error), str(error)
    else:
        raise AssertionError(f"not refused: {status}")


# -------------------------------------------------------------------------------------------------------- first of all


FIRST_CALL_IS_CAPTURED = """
import sys, torch, cqsa
random = torch.Generator().manual_seed(3)
q, k, v = (torch.randn(1, 4, 300, 64, generator=random).half().cuda() for _ in "qkv")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = cqsa.attention(q, k, v, causal="top_left")
for turn in range(3):
    q.copy_(torch.randn(q.shape, generator=random).half().cuda())
    graph.replay()
    torch.cuda.synchronize()
    wanted = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    error = (out.double() - wanted).abs().max().item()
    assert error < 4e-3, error
"""


def test_the_first_call_of_a_process_is_captured():
    done = subprocess.run([sys.executable, "-c", FIRST_CALL_IS_CAPTURED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]


def test_backends_and_doctor():
    found = {backend["name"]: backend for backend in cqsa.backends()}
    assert found["cuda"]["ready"], found["cuda"]
    report = cqsa.doctor()
    cuda = next(backend for backend in report["backends"] if backend["name"] == "cuda")
    print("   ", cuda["device"], cuda["check"], {n: x for n, x in cuda["devices"][0]["hardware"].items() if "copy" in n or "flops" in n})
    assert report["ok"] and report["backend"] == "cuda" and len(cuda["devices"]) == torch.cuda.device_count()


def test_place():
    gib = torch.empty(1 << 28)
    on_device = torch.zeros(3, device=CUDA)
    found = cqsa.place(gib, on_device)
    assert found.places == ["device", "device"] and found.device_bytes == 1 << 30, found
    assert cqsa.place(gib, reserve=1).places == ["pinned"]
    free, total = torch.cuda.mem_get_info()
    assert abs(found.limit_bytes - (free - 0.15 * total)) < 0.1 * total, (found, free, total)


# --------------------------------------------------------------------------------------------------------------- torch


def test_torch_parity():
    for dtype in DTYPES:
        for causal in ("none", "top_left", "bottom_right"):
            q, k, v = operands(dtype)
            out, lse = cqsa.attention(q, k, v, causal=causal, return_lse=True)
            assert out.dtype == dtype and out.device == CUDA and lse.dtype == torch.float32 and lse.device == CUDA
            close(out, exact(q, k, v, causal))
        for dim in (1, 33, 80, 128, 256):
            q, k, v = operands(dtype, dim=dim, rows=70, keys=90)
            close(cqsa.attention(q, k, v), exact(q, k, v))


def test_torch_strided_and_misaligned():
    for dtype in DTYPES:
        q, k, v = operands(dtype)
        wanted = exact(q, k, v)
        turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        close(cqsa.attention(*turned, layout="bshd").transpose(1, 2), wanted)
        close(cqsa.attention(*(x.transpose(1, 2) for x in turned)), wanted)
        across = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
        close(cqsa.attention(*across), wanted)
        odd = []
        for x in (q, k, v):  # each row begins at an odd element
            wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), math.nan, dtype=dtype, device=CUDA)
            wide[..., 1:-2] = x
            odd.append(wide[..., 1:-2])
        close(cqsa.attention(*odd), wanted)
        out = torch.full((2, 4, 190, 67), math.nan, dtype=dtype, device=CUDA)
        assert cqsa.attention(q, k, v, out=out[..., 1:-2]).data_ptr() == out[..., 1:-2].data_ptr()
        close(out[..., 1:-2], wanted)
        assert out[..., 0].isnan().all() and out[..., -2:].isnan().all()


def test_torch_masks_and_small_operands():
    q, k, v = operands(torch.float16)
    mask = torch.rand(2, 1, 190, 230, device=CUDA) > 0.3
    bias = torch.randn(4, 190, 230, device=CUDA, dtype=torch.float16)
    close(cqsa.attention(q, k, v, mask=mask), exact(q, k, v, mask=mask))
    close(cqsa.attention(q, k, v, bias=bias), exact(q, k, v, bias=bias))
    close(cqsa.attention(q, k, v, mask=mask[:1], bias=bias), exact(q, k, v, mask=mask[:1], bias=bias))
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    wanted = cqsa.attention(*(x.cpu() for x in (q, k, v)), sinks=sinks, alibi_slopes=[0.1, 0.2, 0.3, 0.4], backend="cpu")
    for place in (sinks, sinks.cuda(), sinks.cuda().double(), sinks.tolist(), sinks.numpy()):
        close(cqsa.attention(q, k, v, sinks=place, alibi_slopes=[0.1, 0.2, 0.3, 0.4]), wanted)
    refused("DEVICE", lambda: cqsa.attention(q, k, v, mask=mask.cpu()), "mask is on cpu", "q is on cuda:0")
    refused("DEVICE", lambda: cqsa.attention(q, k, v.cpu()), "v is on cpu", "k is on cuda:0")


def test_torch_lengths_and_pages():
    q, k, v = operands(torch.bfloat16)
    flat = [x.transpose(1, 2).reshape(-1, x.shape[1], 64) for x in (q, k, v)]
    starts = torch.tensor([0, 190, 380]), torch.tensor([0, 230, 460], dtype=torch.int32)
    wanted = exact(q, k, v).transpose(1, 2).reshape(-1, 4, 64)
    for device in ("cpu", "cuda"):
        out = cqsa.attention(*flat, cu_seqlens_q=starts[0].to(device), cu_seqlens_k=starts[1].to(device))
        close(out, wanted)
    used = torch.tensor([100, 230])
    mask = torch.arange(230)[None, None, None] < used[:, None, None, None]
    close(cqsa.attention(q, k, v, seqused_k=used), exact(q, k, v, mask=mask))
    close(cqsa.attention(q, k, v, seqused_k=used.to(CUDA, torch.int32)), exact(q, k, v, mask=mask))
    pools = [x.transpose(1, 2).reshape(2 * 23, 10, 2, 64) for x in (k, v)]
    table = torch.arange(46).reshape(2, 23)
    for place in (table, table.cuda(), table.to(CUDA, torch.int32)):
        close(cqsa.attention(q, *pools, page_table=place), exact(q, k, v))


def test_torch_eight_bit_keys():
    q, k, v = operands(torch.float16)
    eight = [x.to(torch.float8_e4m3fn) for x in (k, v)]
    scale = torch.tensor([2.0, 0.25])[:, None, None]
    wanted = exact(q, eight[0].float() * 0.5, eight[1].float() * scale.cuda())
    close(cqsa.attention(q, *eight, k_scale=0.5, v_scale=torch.tensor([2.0, 0.25], device=CUDA)), wanted)
    small = [(x * 20).to(torch.int8) for x in (k, v)]
    factor = torch.full((2, 2, 230, 2), 0.05, dtype=torch.float16, device=CUDA)
    close(cqsa.attention(q, *small, k_scale=factor, v_scale=factor, kv_group=32),
          exact(q, small[0].double() * 0.05, small[1].double() * 0.05))


def test_torch_outputs():
    q, k, v = operands()
    wanted = exact(q, k, v)
    out = torch.full_like(q, math.nan)
    version = out._version
    assert cqsa.attention(q, k, v, out=out) is out and out._version > version
    close(out, wanted)
    half = torch.full_like(q, math.nan, dtype=torch.bfloat16)
    close(cqsa.attention(q, k, v, out=half), wanted)
    lse = torch.full((2, 4, 190), math.nan, device=CUDA)
    assert cqsa.attention(q, k, v, out=(out, lse), return_lse=True)[1] is lse and not lse.isnan().any()
    host = np.full(q.shape, np.nan, np.float32)
    cqsa.attention(q, k, v, out=host)
    close(torch.from_numpy(host), wanted)
    refused("OVERLAP", lambda: cqsa.attention(q, k, v, out=q))
    refused("DEVICE", lambda: cqsa.attention(q, k, v, backend="cpu"), "q is on device type 2 (cuda)")
    parts = [cqsa.attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 99), slice(99, None))]
    merged, _ = cqsa.attention_merge(*parts[0], *parts[1])
    assert merged.device == CUDA
    close(merged, wanted)


def same_bits(got, wanted):
    """Also where both are NaN: a cache has the same bytes whoever wrote it."""
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    assert got.dtype == wanted.dtype and torch.equal(got.cpu().view(raw), wanted.cpu().view(raw)), \
        f"{(got.cpu().view(raw) != wanted.cpu().view(raw)).sum()} of {got.numel()} elements differ"


def cache_problem(kind, dtype, dim, group, random, rows=700, heads=3, pages=90, size=16):
    """Rows of very different sizes, some with zeros, NaN or infinity, cells in any order, some without a place."""
    x = torch.randn((rows, heads, dim), generator=random) * 10.0 ** torch.randint(-7, 5, (rows, heads, 1), generator=random)
    x[::50] = 0
    x[::31, 0, 3 % dim] = math.nan
    x[::37, 1, 5 % dim] = math.inf
    table = torch.randperm(pages, generator=random).int()
    table[::9] = -1
    cells = torch.randperm(pages * size + 40, generator=random)[:rows] - 20
    scale = None
    if kind == "int8":
        scale = torch.zeros((pages, heads, size, -(-dim // group)), dtype=torch.float16).transpose(1, 2)
        pool = torch.zeros((pages, heads, size, dim), dtype=torch.int8).transpose(1, 2)
    elif kind == "q4_0":
        pool = torch.zeros((pages, size, heads, dim // 32 * 18), dtype=torch.uint8)
    else:
        pool = torch.zeros((pages, size, heads, dim), dtype=getattr(torch, kind))
    words = {"format": "q4_0"} if kind == "q4_0" else {"kv_group": group} if kind == "int8" else {}
    return x.to(dtype), pool, table, cells, scale, words


def on_cuda(tensor):
    """The strides too."""
    return None if tensor is None else torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CUDA).copy_(tensor)


def test_caches_have_the_bits_of_the_cpu():
    random = torch.Generator().manual_seed(11)
    for dtype in DTYPES:
        for kind, dims in (("float32", (72,)), ("float16", (128, 33)), ("bfloat16", (256,)), ("int8", (256, 100)),
                           ("q4_0", (32, 128, 256, 1024, 4096))):
            for dim in dims:
                group = (32, 64, 128)[int(torch.randint(0, 3, (), generator=random))]
                x, pool, table, cells, scale, words = cache_problem(kind, dtype, dim, group, random)
                there = [on_cuda(t) for t in (x, pool, table, cells, scale)]
                cqsa.kv_append(x, pool, table, cells, scale=scale, backend="cpu", **words)
                cqsa.kv_append(*there[:4], scale=there[4], **words)
                same_bits(there[1], pool)
                if scale is not None:
                    same_bits(there[4], scale)
                out, out_there = torch.full_like(x, 7), torch.full_like(there[0], 7)
                cqsa.kv_gather(pool, table, cells, scale=scale, out=out, backend="cpu", **words)
                assert cqsa.kv_gather(*there[1:4], scale=there[4], out=out_there, **words) is out_there
                same_bits(out_there, out)


def test_rotations_have_the_bits_of_the_cpu():
    random = torch.Generator().manual_seed(12)
    for dtype in DTYPES:
        for n in [1 << shift for shift in range(13)]:
            x = torch.randn((3, 41, n), generator=random).to(dtype)
            x[0, 0, 0] = math.inf
            there = x.to(CUDA)
            same_bits(cqsa.hadamard(there), cqsa.hadamard(x, backend="cpu"))
            wanted = cqsa.hadamard(x.transpose(0, 1), out=torch.empty((41, 3, n)), backend="cpu")
            same_bits(cqsa.hadamard(there.transpose(0, 1), out=torch.empty((41, 3, n), device=CUDA)), wanted)
            assert cqsa.hadamard(there, out=there) is there
            same_bits(there, cqsa.hadamard(x, backend="cpu"))


def test_caches_in_a_graph():
    random = torch.Generator().manual_seed(13)
    made = cache_problem("q4_0", torch.float16, 128, 0, random)
    x, pool, table, cells = (on_cuda(t) for t in made[:4])
    words = made[5]
    back = torch.empty_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cqsa.kv_append(x, pool, table, cells.int(), **words)
        cqsa.kv_gather(pool, table, cells.int(), out=back, **words)
        cqsa.hadamard(back, out=back)
    assert not pool.any()
    graph.replay()
    wanted, wanted_back = torch.zeros_like(pool), torch.empty_like(x)
    cqsa.kv_append(x, wanted, table, cells, **words)
    cqsa.hadamard(cqsa.kv_gather(wanted, table, cells, out=wanted_back, **words), out=wanted_back)
    same_bits(pool, wanted)
    same_bits(back, wanted_back)


def test_a_plan_says_where_it_runs():
    q, k, v = operands()
    plan = cqsa.attention_plan(q, k, v).describe()
    assert plan["backend"] == "cuda" and plan["place_q"] == "device" and plan["schedule"] == "direct", plan
    out, info = cqsa.attention(q, k, v, return_info=True)
    assert info["plan"]["backend"] == "cuda" and info["run"]["tasks"] >= 1
    close(out, exact(q, k, v))


# ------------------------------------------------------------------------------------------------------------- streams


def test_torchs_current_stream():
    """Operands that appear late on a side stream: who reads them on any other stream reads NaN."""
    q, k, v = operands(torch.float16)
    late = [torch.full_like(x, math.nan) for x in (q, k, v)]
    cqsa.attention(q, k, v)  # what loads, loads now
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        for to, x in zip(late, (q, k, v)):
            to.copy_(x)
        begin = time.perf_counter()
        out = cqsa.attention(*late)
        took = time.perf_counter() - begin
        doubled = out * 2
    busy = not side.query()
    side.synchronize()
    close(out, exact(q, k, v))
    close(doubled, exact(q, k, v) * 2)
    assert busy and took < 0.1, f"the call waited for its work: {took:.3f} s"


def test_a_stream_that_is_named():
    q, k, v = operands(torch.float16)
    side = torch.cuda.Stream()
    for stream in (side, side.cuda_stream):
        late = [torch.full_like(x, math.nan) for x in (q, k, v)]
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)  # on the current stream, where the operands are made
        for to, x in zip(late, (q, k, v)):
            to.copy_(x)
        out = cqsa.attention(*late, stream=stream)
        del to, late
        gc.collect()
        for _ in range(4):  # would take the freed memory, were the side stream not recorded
            torch.full_like(q, math.nan), torch.full_like(k, math.nan)
        side.synchronize()
        close(out, exact(q, k, v))


def test_streams_that_are_refused():
    q, k, v = operands()
    refused("INVALID_ARGUMENT", lambda: cqsa.attention(q, k, v, stream="fast"), "stream is 'fast'")
    refused("INVALID_ARGUMENT", lambda: cqsa.attention(q, k, v, stream=-1), "stream is -1")
    refused("INVALID_ARGUMENT", lambda: cqsa.attention(*(x.cpu() for x in (q, k, v)), backend="cpu", stream=torch.cuda.Stream()))


def test_capture_of_later_calls():
    q, k, v = operands(torch.bfloat16)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    out = torch.empty_like(q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = cqsa.attention(q, k, v)
        cqsa.attention(first, k, v, out=out, causal="bottom_right")
    for seed in (5, 6):
        for to, x in zip((q, k, v), operands(torch.bfloat16, seed=seed)):
            to.copy_(x)
        graph.replay()
        close(first, exact(q, k, v))
        close(out, exact(first, k, v, "bottom_right"))
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            x = q * 1
            refused("DEVICE", lambda: cqsa.attention(x, k, v, sinks=sinks), "sinks is in host memory")
            y = x + 1  # the capture goes on after a refusal
    except RuntimeError as error:
        raise AssertionError(f"a refused call broke the capture: {error}") from error
    graph.replay()
    close(y, q.double() + 1)


def test_two_devices():
    if torch.cuda.device_count() < 2:
        raise Skip("one GPU")
    q, k, v = operands()
    other = [x.to("cuda:1") for x in (q, k, v)]
    out = cqsa.attention(*other)  # while device 0 is current
    assert out.device.index == 1 and torch.cuda.current_device() == 0
    close(out, exact(q, k, v))
    refused("DEVICE", lambda: cqsa.attention(q, other[1], v), "k is on cuda:1, but q is on cuda:0")
    refused("DEVICE", lambda: cqsa.attention(q, k, v, out=other[0]), "out is on cuda:1")
    refused("DEVICE", lambda: cqsa.attention(q, k, v, stream=torch.cuda.Stream(device=1)), "stream is of device 1")
    refused("DEVICE", lambda: cqsa.attention(q, k, v, backend="cuda:1"))
    close(torch.from_numpy(cqsa.attention(*(x.cpu().numpy() for x in (q, k, v)), backend="cuda:1")), exact(q, k, v))


# ---------------------------------------------------------------------------------------------------------------- cupy


def test_cupy():
    cupy = module("cupy")
    for dtype in (torch.float32, torch.float16):
        q, k, v = operands(dtype)
        lent = [cupy.from_dlpack(x) for x in (q, k, v)]
        out, lse = cqsa.attention(*lent, causal="top_left", return_lse=True)
        assert type(out) is cupy.ndarray and out.dtype == lent[0].dtype and lse.dtype == np.float32
        close(torch.from_dlpack(out), exact(q, k, v, "top_left"))
        turned = [cupy.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in lent]
        target = cupy.full_like(lent[0], cupy.nan)
        assert cqsa.attention(*turned, out=target, sinks=[0.1, 0.2, 0.3, 0.4]) is target and not cupy.isnan(target).any()
        close(cqsa.attention(q, lent[1], v), exact(q, k, v))  # mixed


def test_cupys_current_stream():
    cupy = module("cupy")
    spin = cupy.RawKernel("extern \"C\" __global__ void spin(long long n) { long long s = clock64(); while (clock64() - s < n); }", "spin")
    q, k, v = operands(torch.float16)
    lent = [cupy.from_dlpack(x) for x in (q, k, v)]
    late = [cupy.full_like(x, cupy.nan) for x in lent]
    spin((1,), (1,), (1,))
    cqsa.attention(*lent)
    side = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with side:
        spin((1,), (1,), (SLEEP_CYCLES,))
        for to, x in zip(late, lent):
            to[...] = x
        out = cqsa.attention(*late)
    assert not side.done
    side.synchronize()
    close(torch.from_dlpack(out), exact(q, k, v))
    for to in late:
        to[...] = cupy.nan
    cupy.cuda.Device().synchronize()
    with side:
        spin((1,), (1,), (SLEEP_CYCLES,))
        for to, x in zip(late, lent):
            to[...] = x
    out = cqsa.attention(*late, stream=side)
    side.synchronize()
    close(torch.from_dlpack(out), exact(q, k, v))


class OnlyInterface:
    """What numba's arrays look like."""

    def __init__(self, tensor, stream=None):
        self.tensor = tensor
        self.__cuda_array_interface__ = dict(tensor.__cuda_array_interface__, stream=stream, version=3)


def test_the_cuda_array_interface_and_its_stream():
    q, k, v = operands()
    out = torch.full_like(q, math.nan)
    cqsa.attention(*(OnlyInterface(x) for x in (q, k, v)), out=OnlyInterface(out))
    close(out, exact(q, k, v))
    late = [torch.full_like(x, math.nan) for x in (q, k, v)]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        for to, x in zip(late, (q, k, v)):
            to.copy_(x)
    out.fill_(math.nan)
    cqsa.attention(*(OnlyInterface(x, side.cuda_stream) for x in late), out=OnlyInterface(out))
    torch.cuda.synchronize()
    close(out, exact(q, k, v))


# ----------------------------------------------------------------------------------------------------------------- jax


def test_jax():
    jax = module("jax")
    for dtype in DTYPES:
        q, k, v = operands(dtype)
        lent = [jax.dlpack.from_dlpack(x.contiguous()) for x in (q, k, v)]
        out, lse = cqsa.attention(*lent, causal="bottom_right", return_lse=True)
        assert isinstance(out, jax.Array) and out.dtype == lent[0].dtype and out.shape == lent[0].shape
        assert next(iter(out.devices())).platform in ("gpu", "cuda")
        close(torch.from_dlpack(out), exact(q, k, v, "bottom_right"))
        again = jax.jit(lambda x: x * 2)(out)
        close(torch.from_dlpack(again), 2 * exact(q, k, v, "bottom_right"))
        del out, lse, again
    refused("INVALID_ARGUMENT", lambda: jax.jit(lambda x: cqsa.attention(x, x, x))(lent[0]), "traced by jax")
    refused("INVALID_ARGUMENT", lambda: cqsa.attention(*lent, out=lent[0]), "never change")


def test_jax_work_that_is_still_queued():
    jax = module("jax")
    numpy = jax.numpy

    @jax.jit
    def slow(x, seed):
        y = numpy.full((4096, 4096), 1e-4, numpy.float32) + seed
        for _ in range(60):
            y = y @ y * 1e-1
        return x + 0 * y.sum().astype(x.dtype)

    q, k, v = operands()
    lent = [jax.dlpack.from_dlpack(x) for x in (q, k, v)]
    jax.block_until_ready(slow(lent[0], 0.0))
    for turn in range(5):
        out = cqsa.attention(slow(lent[0], 1e-6 * turn), lent[1], lent[2])
        close(torch.from_dlpack(out), exact(q, k, v))


def test_jax_gives_the_memory_back():
    jax = module("jax")
    q = jax.numpy.ones((1, 1, 1 << 16, 64), jax.numpy.float16)  # 8 MiB
    from cqsa._jax import _lent
    cqsa.attention(q[:, :, :64], q, q).block_until_ready()
    gc.collect()
    before, free = len(_lent), torch.cuda.mem_get_info()[0]
    for _ in range(40):
        cqsa.attention(q, q[:, :, :64], q[:, :, :64]).block_until_ready()
    gc.collect()
    assert len(_lent) <= before and free - torch.cuda.mem_get_info()[0] < 128 << 20, (len(_lent), before)


# --------------------------------------------------------------------------------------------------------- host memory


def kinds(q, k, v, out):
    """DLPack kinds of device as the library is told them."""
    target = _queue.choose("cuda", None, ("q", q), ("k", k), ("v", v))
    call = _attention.Call(target, q, k, v, out=out)  # what args points to lives as long as it does
    args = call.args
    return [_ffi.Tensor.from_address(x).device_type for x in (args.q, args.k, args.v, args.out)]


def test_pinned_and_pageable_within_a_limit():
    for dtype in DTYPES:
        q, k, v = operands(dtype, batch=1, rows=3000, keys=3000, device="cpu")
        wanted = exact(q, k, v, "top_left")
        for pinned in (False, True):
            lent = [x.pin_memory() if pinned else x for x in (q, k, v)]
            out = torch.empty_like(lent[0]).pin_memory() if pinned else torch.empty_like(q)
            assert kinds(*lent, out) == [_ffi.DEVICE_CUDA_HOST if pinned else _ffi.DEVICE_CPU] * 4
            for limit in ("2MiB", "64MiB", None):
                out.fill_(math.nan)
                got, info = cqsa.attention(*lent, out=out, causal="top_left", backend="cuda", memory_limit=limit, return_info=True)
                assert got is out and info["plan"]["backend"] == "cuda"
                assert limit is None or info["run"]["peak_device_bytes"] <= int(limit[:-3]) << 20, info["line"]
                close(out, wanted)
    refused("BUDGET_TOO_SMALL", lambda: cqsa.attention(q, k, v, backend="cuda", memory_limit=1000))
    assert kinds(q.pin_memory(), k.pin_memory(), v, q) == [_ffi.DEVICE_CUDA_HOST] + [_ffi.DEVICE_CPU] * 3


def test_numpy_on_the_gpu():
    q, k, v = (x.cpu().numpy() for x in operands())
    out = cqsa.attention(q, k, v, backend="cuda")
    assert type(out) is np.ndarray
    wanted = exact(*(torch.from_numpy(x) for x in (q, k, v)))
    close(torch.from_numpy(out), wanted)
    cupyx = module("cupyx")
    pinned = [cupyx.empty_like_pinned(x) for x in (q, k, v)]
    for to, x in zip(pinned, (q, k, v)):
        to[...] = x
    assert kinds(*pinned, np.empty_like(q))[:3] == [_ffi.DEVICE_CUDA_HOST] * 3
    close(torch.from_numpy(cqsa.attention(*pinned, backend="cuda")), wanted)


def test_keys_in_host_memory():
    """Queries on the device, keys and values where there is room."""
    q, k, v = operands(torch.float16, batch=1, rows=64, keys=9000)
    wanted = exact(q, k, v)
    for pinned in (False, True):
        lent = [x.cpu().pin_memory() if pinned else x.cpu() for x in (k, v)]
        out = cqsa.attention(q, *lent, memory_limit="4MiB")
        assert out.device == CUDA
        close(out, wanted)


def test_device_operands_within_a_small_limit():
    q, k, v = operands(torch.float16, batch=1, heads=8, rows=4000, keys=4000)
    wanted = exact(q, k, v, "top_left")
    least = cqsa.attention_plan(q, k, v, causal="top_left").describe()["peak_device_bytes"]
    for limit in (max(least, 1), "1MiB", "32MiB"):
        close(cqsa.attention(q, k, v, causal="top_left", memory_limit=limit), wanted)


def test_progress_on_the_gpu():
    q, k, v = operands(torch.float16, batch=1, rows=3000, keys=3000, device="cpu")
    seen = []
    cqsa.attention(q, k, v, backend="cuda", memory_limit="4MiB", progress=lambda done, total: seen.append((done, total)))
    assert seen and seen[-1][0] == seen[-1][1]
    refused("CANCELLED", lambda: cqsa.attention(q, k, v, backend="cuda", memory_limit="4MiB", progress=lambda *_: False))


# --------------------------------------------------------------------------------------------------------------- patch


def patched(function):
    def run():
        calls = []
        real = cqsa._patch.attention
        cqsa._patch.attention = lambda *a, **k: calls.append(1) or real(*a, **k)
        cqsa.patch_torch_sdpa(min_tokens=0)
        try:
            function(calls)
        finally:
            cqsa.unpatch_torch_sdpa()
            cqsa._patch.attention = real
        assert F.scaled_dot_product_attention is SDPA
    run.__name__ = function.__name__
    return run


@patched
def test_patch(calls):
    for dtype in DTYPES:
        q, k, v = operands(dtype, kv_heads=4, keys=190)
        cases = ({}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": torch.rand(190, 190, device=CUDA) > 0.4},
                 {"attn_mask": torch.randn(2, 1, 190, 190, device=CUDA).to(dtype)})
        for options in cases:
            before = len(calls)
            got = F.scaled_dot_product_attention(q, k, v, **options)
            assert len(calls) == before + 1 and got.dtype == dtype and got.device == CUDA
            wide = {n: x.double() if torch.is_tensor(x) and x.dtype != torch.bool else x for n, x in options.items()}
            close(got, SDPA(q.double(), k.double(), v.double(), **wide))
        q, k, v = operands(dtype)
        got = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        close(got, exact(q, k, v))
        close(F.scaled_dot_product_attention(q[:, 0], k[:, 0], v[:, 0]), exact(q[:, :1], k[:, :1], v[:, :1])[:, 0])


@patched
def test_patch_leaves_the_rest_to_torch(calls):
    q, k, v = operands(kv_heads=4)
    F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    tracked = q.clone().requires_grad_()
    F.scaled_dot_product_attention(tracked, k, v).sum().backward()
    assert tracked.grad is not None
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert F.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
    assert F.scaled_dot_product_attention(q.double(), k.double(), v.double()).dtype == torch.float64
    cqsa.patch_torch_sdpa(min_tokens=231)
    F.scaled_dot_product_attention(q, k, v)
    assert not calls
    cqsa.patch_torch_sdpa(min_tokens=230)
    F.scaled_dot_product_attention(q, k, v)
    assert len(calls) == 1


@patched
def test_patch_in_a_captured_module(calls):
    torch.manual_seed(3)
    module = torch.nn.MultiheadAttention(64, 4, batch_first=True, device=CUDA).train()
    x = torch.randn(2, 90, 64, device=CUDA)
    with torch.no_grad():
        module(x, x, x, need_weights=False)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = module(x, x, x, need_weights=False)[0]
        assert len(calls) == 2
        x.copy_(torch.randn_like(x))
        graph.replay()
        cqsa.unpatch_torch_sdpa()
        torch.testing.assert_close(got, module(x, x, x, need_weights=False)[0], atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------------------------------------- threads and cost


def second_context():
    params, handle = _ffi.ContextParams(_ffi.ctypes.sizeof(_ffi.ContextParams)), _ffi.c_void_p()
    params.backend = b"cuda"
    _ffi.check(_ffi.library().cqsa_context_create(params, handle))
    return _queue.context_for("cuda", 0)._replace(handle=handle.value)


def test_two_contexts_and_eight_threads():
    contexts = [_queue.context_for("cuda", 0), second_context()]
    failures = []
    barrier = threading.Barrier(8)

    def work(index):
        try:
            q, k, v = operands(DTYPES[index % 3], seed=index, rows=100 + index, keys=120 + 3 * index)
            wanted = exact(q, k, v)
            torch.cuda.synchronize()
            barrier.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(25):
                    target = _queue.choose("auto", None, ("q", q))._replace(context=contexts[index % 2])
                    call = _attention.Call(target, q, k, v)
                    _attention._run(target, call, None, False)
                    close(call.out, wanted)
                    close(cqsa.attention(q, k, v), wanted)
                    refused("SHAPE", lambda: cqsa.attention(q, k[..., :index + 1], v))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def best_us(call, calls=200, repeats=15):
    best = math.inf
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, time.perf_counter() - begin)
    torch.cuda.synchronize()
    return best / calls * 1e6


def test_what_a_call_costs():
    for shape in ((1, 1, 1, 64), (1, 8, 128, 64)):
        q = torch.randn(shape, device=CUDA).half()
        out = torch.empty_like(q)
        target = _queue.choose("auto", None, ("q", q))
        call = _attention.Call(target, q, q, q, out=out)
        function, handle = _ffi.library().cqsa_attention, target.context.handle
        bare = best_us(lambda: function(handle, call.params, call.args, target.stream))
        whole, given = best_us(lambda: cqsa.attention(q, q, q)), best_us(lambda: cqsa.attention(q, q, q, out=out))
        torchs = best_us(lambda: SDPA(q, q, q))
        print(f"    {shape}: cqsa.attention {whole:.1f} us, with out= {given:.1f}; the C call {bare:.1f}; torch's own {torchs:.1f}")
        assert given - bare < 40, "the bar is 15; this is far away"


# ---------------------------------------------------------------------------------------------------------------------


def run(words, names):
    """The tests among a module's names that have one of the words in theirs, or all. What the process is to return."""
    tests = [(name, test) for name, test in names.items() if name.startswith("test_") and callable(test)
             and (not words or any(word in name for word in words))]
    failed, begun = [], time.perf_counter()
    for name, test in tests:
        begin = time.perf_counter()
        try:
            test()
            torch.cuda.synchronize()
            said = "ok  "
        except Skip as reason:
            said = f"skip ({reason})"
        except BaseException:
            failed.append(name)
            said = "FAIL"
            traceback.print_exc(limit=6, file=sys.stdout)
        print(f"{said} {name} {time.perf_counter() - begin:.2f} s", flush=True)
    print(f"{len(tests)} tests, {len(failed)} failures {failed}, {time.perf_counter() - begun:.1f} s: {'FAIL' if failed else 'PASS'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], globals()))
