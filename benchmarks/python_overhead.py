# SPDX-License-Identifier: Apache-2.0
"""What a tiny call costs in Python beyond the C call itself, best of many: python3 benchmarks/python_overhead.py

The C call is cqsa_attention() through ctypes with structs that are ready. The bar is 10 us for numpy float32. ml_dtypes and
torch are measured when they can be imported.
"""
import importlib
import platform
import time

import numpy as np

import cqsa
from cqsa import _attention, _queue, _ffi

CALLS, REPEATS = 50, 500  # short enough to fit between two time slices of a busy machine


def best_us(call):
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, time.perf_counter() - start)
    return best / CALLS * 1e6


def report(name, q, backend="cpu", **options):
    target = _queue.choose(backend, None, ("q", q))
    prepared = _attention.Call(target, q, q, q, **options)
    function, handle, params, args = _ffi.library().cqsa_attention, target.context.handle, prepared.params, prepared.args
    bare = best_us(lambda: function(handle, params, args, target.stream))
    whole = best_us(lambda: cqsa.attention(q, q, q, backend=backend, **options))
    print(f"{name:44} {whole:7.1f} {bare:7.1f} {whole - bare:9.1f}")


def report_cuda(torch):
    """Host time of queued calls; too small to fill the device's queue. The bar is 15 us."""
    q = torch.ones(1, 1, 1, 64, dtype=torch.float16, device="cuda")
    report("torch float16 on cuda", q, backend="auto")
    report("torch float16 on cuda, out= (bar: 15)", q, backend="auto", out=torch.empty_like(q))
    with torch.cuda.stream(torch.cuda.Stream()):
        report("torch float16 on cuda, a stream, lse", q, backend="auto", return_lse=True)
    own = best_us(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q))
    print(f"{'torch.nn.functional.scaled_dot_product_attention':44} {own:7.1f}")


def imported(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def main():
    print(f"Python {platform.python_version()}, numpy {np.__version__}, cqsa {cqsa.__version__}; [1, 1, 1, 16], us per call, best of {REPEATS}")
    print(f"{'':44} {'call':>7} {'C':>7} {'overhead':>9}")
    q = np.ones((1, 1, 1, 16), np.float32)
    report("numpy float32 (bar: 10)", q)
    report("numpy float32, out=, causal, memory_limit", q, out=np.empty_like(q), causal="top_left", memory_limit=1 << 20)
    report("numpy float32, bshd, lse, softmax_scale", q, layout="bshd", return_lse=True, softmax_scale=0.25)
    report("numpy float32, strided", np.ones((1, 1, 2, 32), np.float32)[..., ::2, ::2])
    ml_dtypes, torch = imported("ml_dtypes"), imported("torch")
    if ml_dtypes is not None:
        report("ml_dtypes bfloat16", q.astype(ml_dtypes.bfloat16))
    if torch is not None:
        report(f"torch {torch.__version__} float32", torch.ones(1, 1, 1, 16))
        if torch.cuda.is_available():
            report_cuda(torch)


if __name__ == "__main__":
    main()
