# SPDX-License-Identifier: Apache-2.0
"""Quantized matrices of the Python package on an NVIDIA GPU, with torch. A plain script, as test_python_cuda.py:

    PYTHONPATH=bindings/python CQSA_LIBRARY=$PWD/build/release/lib/libcqsa.so.0 python3 tests/device/test_python_quant.py [WORD ..]

Every format on random bytes, compared bit for bit with the CPU backend. What is large (more than 2^31 elements) takes 6 GB. "rates" prints rates.
"""
import sys
import time

import numpy as np
import torch

import cqsa
from test_python_cuda import CUDA, SLEEP_CYCLES, refused, run

FORMATS = cqsa.quant_formats()
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def blocks(name, rows, cols, seed=1):
    """Random bytes, some of whose 16-bit words are NaN as a number of f16."""
    format, random = FORMATS[name], np.random.default_rng(seed)
    data = random.integers(0, 256, (rows, cols // format.block_elements * format.block_bytes), np.uint8)
    data[:, 1:][random.random((rows, data.shape[1] - 1)) < 0.01] = 0x7e
    return torch.from_numpy(data)


def same(got, wanted, what):
    got, wanted = (x.contiguous().cpu().view(torch.uint8) for x in (got, wanted))
    assert torch.equal(got, wanted), f"{what}: {(got != wanted).sum().item()} of {got.numel()} bytes differ, first at {(got != wanted).flatten().int().argmax().item()}"


def on_host(data, name, rows=None, dtype="float32"):
    return cqsa.dequantize_rows(cqsa.QuantTensor(data, name), rows, dtype=dtype, backend="cpu")


def test_every_format_has_the_bits_of_the_cpu():
    for name, (rows, cols) in ((n, shape) for n in FORMATS for shape in ((1, 256), (3, 512), (700, 2560), (37, 11008))):
        data = blocks(name, rows, cols, rows)
        w = cqsa.QuantTensor(data.to(CUDA), name)
        for dtype in DTYPES:
            got = w.dequantize(dtype)
            assert got.device == CUDA and got.dtype == DTYPES[dtype] and tuple(got.shape) == (rows, cols)
            same(got, on_host(data, name, dtype=dtype), f"{name} {rows} x {cols} {dtype}")


def test_short_rows():
    for name, format in FORMATS.items():
        for rows, cols in ((1000, format.block_elements), (77, 3 * format.block_elements)):
            data = blocks(name, rows, cols, 5)
            same(cqsa.QuantTensor(data.to(CUDA), name).dequantize(), on_host(data, name), f"{name} {rows} x {cols}")


def test_addresses_and_strides():
    for name, format in FORMATS.items():
        data = blocks(name, 50, 1024, 6)
        step = 1 if format.block_bytes % 2 else 2
        wanted = {dtype: on_host(data, name, dtype=dtype) for dtype in DTYPES}
        for shift in range(0, 18, step):
            whole = torch.full((50, data.shape[1] + 20 + shift % 4), 0xee, dtype=torch.uint8, device=CUDA)
            part = whole[:, shift:shift + data.shape[1]]
            part.copy_(data)
            dtype = tuple(DTYPES)[shift % 3]
            memory = torch.full((60, 1024 + 9), 7.0, dtype=DTYPES[dtype], device=CUDA)
            out = memory[:50, shift % 5:shift % 5 + 1024] if shift % 4 else memory.view(-1)[:51200 + 50].view(1025, 50)[:1024].T
            kept = memory.clone()
            cqsa.dequantize_rows(cqsa.QuantTensor(part, name, cols=1024), out=out)
            same(out, wanted[dtype], f"{name} shift {shift} {dtype}")
            out.fill_(7.0)
            assert torch.equal(memory, kept), f"{name} shift {shift}: wrote beside out"


def test_rows_in_any_order():
    for name in FORMATS:
        data = blocks(name, 90, 768, 7)
        w = cqsa.QuantTensor(data.to(CUDA), name)
        ids = torch.randint(0, 90, (200,), generator=torch.Generator().manual_seed(8))
        for rows in (ids.to(CUDA), ids.int().to(CUDA), ids.to(CUDA)[::3], slice(17, 80), ids.tolist()):
            host = rows.cpu() if torch.is_tensor(rows) else rows
            same(cqsa.dequantize_rows(w, rows, dtype="float16"), on_host(data, name, host, "float16"), f"{name} {type(rows)}")
        got = cqsa.dequantize_rows(w, torch.tensor([3, -1, 90, 1 << 40, 5], device=CUDA))
        assert not got[1:4].any()
        same(got[[0, 4]], on_host(data, name, [3, 5]), name)


def test_experts():
    data = torch.stack([blocks("Q4_K", 64, 512, seed) for seed in range(5)])
    w = cqsa.QuantTensor(data.to(CUDA), "Q4_K")
    same(w.dequantize("bfloat16"), cqsa.QuantTensor(data, "Q4_K").dequantize("bfloat16", backend="cpu"), "experts")
    same(w[3].dequantize(), on_host(data[3], "Q4_K"), "one expert")


def test_graphs_and_streams():
    for name in ("Q8_0", "Q3_K", "IQ2_XS", "MXFP4", "F16"):
        first, second = blocks(name, 100, 1024, 1), blocks(name, 100, 1024, 2)
        memory = first.to(CUDA)
        w = cqsa.QuantTensor(memory, name)
        out = torch.empty((100, 1024), device=CUDA)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            cqsa.dequantize_rows(w, out=out)
        memory.copy_(second)
        graph.replay()
        torch.cuda.synchronize()
        same(out, on_host(second, name), f"{name} in a graph")
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
            memory.copy_(first.to(CUDA, non_blocking=True))
            got = w.dequantize()
        stream.synchronize()
        same(got, on_host(first, name), f"{name} on a stream")


def test_more_than_2_31_elements():
    rows, cols = (1 << 16) + 40, 1 << 15
    for name in ("Q4_0", "IQ3_S"):
        data = blocks(name, 128, cols, 9)
        memory = data.to(CUDA).repeat(rows // 128 + 1, 1)[:rows]
        got = cqsa.QuantTensor(memory, name).dequantize("float16")
        wanted = on_host(data, name, dtype="float16").to(CUDA)
        for begin in range(0, rows, 128):
            n = min(128, rows - begin)
            assert torch.equal(got[begin:begin + n].view(torch.int16), wanted[:n].view(torch.int16)), (name, begin)
        del got, memory
        torch.cuda.empty_cache()


def test_what_is_refused():
    data = blocks("Q4_K", 4, 512)
    w = cqsa.QuantTensor(data.to(CUDA), "Q4_K")
    refused("DEVICE", lambda: cqsa.dequantize_rows(w, out=torch.empty((4, 512))), "out")
    refused("UNSUPPORTED", lambda: cqsa.quantize_rows(torch.ones((4, 512), device=CUDA), "Q8_0"), "quantize_rows")


def us_of(call, calls=20):
    call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    best = float("inf")
    for _ in range(5):
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / calls * 1e3)
    return best


def test_rates():
    rows, cols = 16384, 8192
    a, b = (torch.empty(rows * cols, device=CUDA) for _ in range(2))
    copy = 2 * a.nbytes / us_of(lambda: b.copy_(a)) / 1e6
    print(f"    a copy: {copy:.2f} TB/s; {rows} x {cols}, bytes in and out, of that rate:")
    del a, b
    for name in FORMATS:
        data = blocks(name, 256, cols).to(CUDA).repeat(rows // 256, 1)
        w, text = cqsa.QuantTensor(data, name), []
        for dtype, kind in DTYPES.items():
            out = torch.empty((rows, cols), dtype=kind, device=CUDA)
            us = us_of(lambda: cqsa.dequantize_rows(w, out=out))
            text.append(f"{dtype} {us:7.1f} us {(data.nbytes + out.nbytes) / us / 1e6:.2f} TB/s {(data.nbytes + out.nbytes) / us / 1e6 / copy:.0%}")
        print(f"    {name:8} {'  '.join(text)}", flush=True)


if __name__ == "__main__":
    begun = time.perf_counter()
    code = run(sys.argv[1:], globals())
    print(f"{time.perf_counter() - begun:.1f} s")
    sys.exit(code)
