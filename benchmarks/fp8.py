# SPDX-License-Identifier: Apache-2.0
"""FP8 through the Python package on a GPU: quantizations beside copies that move as many bytes, products beside torch._scaled_mm, all in one run.

    PYTHONPATH=bindings/python CQSA_LIBRARY=$PWD/build/release/lib/libcqsa.so.0 python3 benchmarks/fp8.py [--rounds 40]
        [--only quantize|gemm|host] [--size 8192]

Before each launch half a gigabyte is written, so that nothing of the operands is left in L2 and the host is ahead of the device; contenders take turns, and
medians of event times are printed. Every result is checked before it is timed. A bar that is missed or a wrong result is printed in its row, and makes the exit
status 1 after the last one.
"""
import argparse
import statistics
import sys
import time

import torch

import cqsa

LARGEST = {"e4m3fn": 448.0, "e5m2": 57344.0}
FLOAT8 = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def medians_us(functions, rounds, flush):
    """Of each function, by turns."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = [[] for _ in functions]
    for function in functions:
        function()
    for turn in range(rounds):
        for i in range(len(functions)):
            i = (i + turn) % len(functions)
            flush.zero_()
            begin.record()
            functions[i]()
            end.record()
            end.synchronize()
            times[i].append(begin.elapsed_time(end) * 1e3)
    return [statistics.median(t) for t in times]


def copy_of(total_bytes):
    """A copy that reads and writes so many bytes in all."""
    source = torch.zeros(total_bytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def graph_of(function):
    """One launch of what is captured, without Python in it."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


# ------------------------------------------------------------------------------------------------------------ quantize


def expected(x, scale, block, format):
    """Codes by torch's own conversion."""
    down, across = (size if step == 0 else step for size, step in zip(x.shape, block))
    full = scale.reshape(-(-x.shape[0] // down), -(-x.shape[1] // across)).repeat_interleave(down, 0)[:x.shape[0]].repeat_interleave(across, 1)[:, :x.shape[1]]
    largest = LARGEST[format]
    return (x.float() * full).clamp(-largest, largest).to(FLOAT8[format]).view(torch.uint8)


def scale_of(x, block):
    down, across = (size if step == 0 else step for size, step in zip(x.shape, block))
    amax = x.float().abs().reshape(x.shape[0] // down, down, x.shape[1] // across, across).amax((1, 3))
    return torch.full_like(amax, 448.0) / amax  # torch makes a number / tensor from the reciprocal, which rounds twice


BLOCKS = {"tensor": (0, 0), "row": (1, 0), "1x128": (1, 128), "128x128": (128, 128)}


def wrong_in(x, q, granularity, given):
    """What is wrong, or ""."""
    block = BLOCKS[granularity]
    for matrix, codes in ((x, q.data), (x.T, q.data_t)):
        if codes is None:
            continue
        scale = given if given is not None else scale_of(matrix, block)
        wrong = int((codes != expected(matrix, scale, block, "e4m3fn")).sum())
        if wrong:
            return f"WRONG: {wrong} of {codes.numel()} codes{' (transposed)' if codes is q.data_t else ''}"
    return "" if q.amax is None or q.amax.item() == x.abs().max().item() else f"WRONG: amax {q.amax.item()}"


def quantize_table(size, rounds, flush):
    x = torch.randn((size, size), device="cuda").bfloat16()
    small = torch.randn((512, 2048), device="cuda").bfloat16()
    one = torch.full((), 60.0, device="cuda")
    rows = [("row, ring, amax", x, {"scale": "ring"}, 1.05), ("row, static, amax", x, {"scale": one}, 1.05),
            ("transposed, ring", x, {"scale": "ring", "layout": "transposed"}, 1.08),
            ("dual, ring, amax", x, {"scale": "ring", "layout": "dual"}, 1.10), ("row granularity, current", x, {"granularity": "row"}, 1.06),
            ("1x128, current", x, {"granularity": "1x128"}, 1.06), ("dual 1x128 + 128x1", x, {"granularity": "1x128", "layout": "dual"}, 1.15),
            ("128x128, current", x, {"granularity": "128x128"}, None), ("tensor, current, row", x, {}, "1.6 static"),
            ("tensor, current, dual", x, {"layout": "dual"}, "1.6 static"),
            ("mx (1x32, E8M0)", x, {"granularity": "mx"}, None), ("512 x 2048, ring", small, {"scale": "ring"}, 1.2)]
    missed, static = 0, {}
    print(f"{'quantize bf16 ' + str(size):<28} {'us':>8} {'graph us':>9} {'copy us':>8} {'of copy':>8}  bar")
    for name, operand, options, bar in rows:
        layout, granularity = options.get("layout", "row"), options.get("granularity", "tensor")
        ring = cqsa.Ring(16, amax=7.0).begin(operand) if options.get("scale") == "ring" else None
        first = cqsa.fp8_quantize(operand, **{**options, **({"scale": ring} if ring else {})})
        given = first.scale.clone() if options.get("scale") is not None else None
        wrong = wrong_in(operand, first, granularity, given) if granularity != "mx" else ""

        def call(operand=operand, options=options, ring=ring, out=first):
            cqsa.fp8_quantize(operand, out=out, **{**options, **({"scale": ring} if ring else {})})

        moved = operand.numel() * (2 + (1 if layout != "dual" else 2))
        plain, graph, copy = medians_us([call, graph_of(call), copy_of(moved)], rounds, flush)
        best = min(plain, graph)
        if name.startswith("row, static"):
            static["row"] = best
        if name.startswith("dual, ring"):
            static["dual"] = best
        limit = bar if bar is None or isinstance(bar, float) else 1.6 * static[layout] / copy
        ok = limit is None or best / copy <= limit
        missed += not ok or bool(wrong)
        verdict = "" if limit is None else f"<= {limit:.2f} {'ok' if ok else 'MISSED'}"
        print(f"{name:<28} {plain:>8.1f} {graph:>9.1f} {copy:>8.1f} {best / copy:>8.3f}  {verdict} {wrong}".rstrip(), flush=True)
    return missed


# ---------------------------------------------------------------------------------------------------------------- gemm


def operands(size, granularity_a, granularity_b):
    a, b = (torch.randn((size, size), device="cuda").bfloat16() for _ in range(2))
    make = lambda x, g: cqsa.fp8_quantize(x, granularity=g, out=torch.empty(x.shape, dtype=torch.float8_e4m3fn, device="cuda"))  # noqa: E731
    return make(a, granularity_a), make(b, granularity_b)


def rms_of_rows(got, qa, qb):
    rows = torch.arange(0, qa.data.shape[0], qa.data.shape[0] // 64, device="cuda")
    wanted = cqsa.fp8_dequantize(qa)[rows].double() @ cqsa.fp8_dequantize(qb).double().T
    return ((got[rows].double() - wanted).norm() / wanted.norm()).item()


def gemm_table(size, rounds, flush):
    missed = 0
    print(f"\n{'product ' + str(size) + '^3, bf16 result':<44} {'us':>9} {'TFLOP/s':>9} {'peer us':>9} {'of peer':>8} {'error':>9}  bar")
    tensor, row, block = ("tensor", "tensor"), ("row", "row"), ("1x128", "128x128")
    for (ga, gb), provider, accumulate, bar in (
            (tensor, "auto", "fast", 0.98), (tensor, "auto", "promote", 0.98), (tensor, "own", "fast", 0.85), (tensor, "own", "promote", 0.85),
            (row, "auto", "promote", None), (row, "own", "promote", 0.85), (block, "auto", "promote", None), (block, "own", "promote", 0.85)):
        qa, qb = operands(size, ga, gb)
        out = torch.empty((size, size), dtype=torch.bfloat16, device="cuda")
        fast = accumulate == "fast"

        def mine():
            cqsa.fp8_gemm(qa, qb, out=out, accumulate=accumulate, provider=provider)

        one = torch.ones((), device="cuda")

        def theirs():
            torch._scaled_mm(qa.data, qb.data.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast)

        name = f"{ga} x {gb}, {accumulate}, {provider}"
        try:
            impl = cqsa.fp8_gemm_explain(qa, qb, out=out, accumulate=accumulate, provider=provider).split("\n")[0]
            mine()
        except NotImplementedError as error:
            print(f"{name:<44} not here: {error}")
            continue
        error = rms_of_rows(out, qa, qb)
        wrong = "" if error < 6e-3 else "WRONG"
        us, peer = medians_us([mine, theirs], max(rounds // 4, 5), flush)
        ok = bar is None or peer / us >= bar
        missed += not ok or bool(wrong)
        verdict = "" if bar is None else f">= {bar} {'ok' if ok else 'MISSED'}"
        print(f"{name:<44} {us:>9.1f} {2e-6 * size**3 / us:>9.0f} {peer:>9.1f} {peer / us:>8.3f} {error:>9.1e}  {verdict} {impl} {wrong}".rstrip(), flush=True)
    return missed


# ---------------------------------------------------------------------------------------------------------------- host


def host_us(function):
    for _ in range(50):
        function()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(50):
        begin = time.perf_counter()
        for _ in range(40):
            function()
        best = min(best, (time.perf_counter() - begin) / 40)
        torch.cuda.synchronize()
    return best * 1e6


def host_table():
    from cqsa import _ffi, _fp8, _queue

    x = torch.randn((64, 256), device="cuda").bfloat16()
    ring = cqsa.Ring(16).begin(x)
    out = cqsa.fp8_quantize(x, scale=ring, layout="dual")
    row = cqsa.fp8_quantize(x, granularity="row", return_amax=False)
    target = _queue.choose("auto", None, ("x", x))
    job = _fp8._Job(target, x, _fp8._Options(granularity="row", return_amax=False), row)
    function, handle = _ffi.library().cqsa_fp8_quantize, target.context.handle
    print("\nhost time of a call, us")
    print(f"  C API, row granularity (through ctypes)      {host_us(lambda: function(handle, job.args, target.stream)):.1f}")
    print(f"  fp8_quantize, row granularity, out=          {host_us(lambda: cqsa.fp8_quantize(x, granularity='row', return_amax=False, out=row)):.1f}")
    print(f"  fp8_quantize, ring, dual, out=               {host_us(lambda: cqsa.fp8_quantize(x, scale=ring, layout='dual', out=out)):.1f}")
    print(f"  fp8_quantize, ring, dual                     {host_us(lambda: cqsa.fp8_quantize(x, scale=ring, layout='dual')):.1f}")
    y = torch.empty_like(x)
    print(f"  torch's copy_                                {host_us(lambda: y.copy_(x)):.1f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", choices=("quantize", "gemm", "host"))
    parser.add_argument("--size", type=int, default=8192)
    options = parser.parse_args()
    flush = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    missed = 0
    if options.only in (None, "quantize"):
        missed += quantize_table(options.size, options.rounds, flush)
    if options.only in (None, "gemm"):
        missed += gemm_table(options.size, options.rounds, flush)
    if options.only in (None, "host"):
        host_table()
    print(f"{missed} rows miss a bar or are wrong" if missed else "no bar missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
