# SPDX-License-Identifier: Apache-2.0
"""The sm_80 attention leaf beside torch's FlashAttention-2 and cuDNN in one run: time, and error against fp64.

    python3 benchmarks/sm80_attention.py LIBRARY CUBINS [--random SECONDS] [--cells quick|all] [--other CUBINS ..]

LIBRARY is built from benchmarks/sm80_attention.cpp, CUBINS a folder of cubins of the kernels; docs/kernels/NOTES-attention-sm80.md.
"""
import argparse
import ctypes
import statistics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# head_dim, heads, key heads, tokens, batch: those of the comparison tables, bf16.
CELLS = [(64, 32, 32, 1024, 16), (64, 32, 32, 4096, 4), (64, 32, 32, 16384, 1),
         (128, 16, 16, 1024, 16), (128, 16, 16, 4096, 4), (128, 16, 16, 16384, 1), (128, 16, 16, 65536, 1),
         (256, 8, 8, 4096, 4), (256, 8, 8, 16384, 1),
         (128, 32, 8, 4096, 4), (128, 64, 8, 8192, 1), (128, 32, 8, 32768, 1)]
QUICK = [CELLS[0], CELLS[2], CELLS[3], CELLS[5], CELLS[8]]


def median_ms(function, least=0.06):
    """Median of event timings; as many as fit `least` seconds, between 5 and 30."""
    function()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    while len(times) < 5 or (sum(times) < least * 1e3 and len(times) < 30):
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


class Leaf:
    def __init__(self, library, folder, tell):
        self.library = ctypes.CDLL(library)
        self.library.bench_random.argtypes = [ctypes.c_double, ctypes.c_uint64]
        self.load(folder, tell)

    def load(self, folder, tell=False):
        self.library.bench_load(folder.encode(), int(tell))

    def run(self, q, k, v, out, lse, causal):
        p, i = ctypes.c_void_p, ctypes.c_int64
        b, h, n, d = q.shape
        status = self.library.bench_attention(p(q.data_ptr()), p(k.data_ptr()), p(v.data_ptr()), p(out.data_ptr()), p(lse.data_ptr()),
                                              1 if q.dtype == torch.float16 else 2, i(b), i(h), i(k.shape[1]), i(n), i(d), i(v.shape[3]),
                                              int(causal), p(torch.cuda.current_stream().cuda_stream))
        if status:
            raise SystemExit(f"status {status}")


def exact_rows(q, k, v, causal, rows):
    """The operator in fp64 at some rows of the first batch item, first and last head."""
    parts = []
    for h in (0, q.shape[1] - 1):
        g = h // (q.shape[1] // k.shape[1])
        s = q[0, h, rows].double() @ k[0, g].double().T / q.shape[3] ** 0.5
        if causal:
            s = s.masked_fill(torch.arange(k.shape[2], device=s.device)[None] > rows[:, None], -torch.inf)
        parts.append((torch.softmax(s, 1) @ v[0, g].double(), torch.logsumexp(s, 1)))
    return torch.stack([x[0] for x in parts]), torch.stack([x[1] for x in parts])


def rms(got, want, rows):
    mine = torch.stack([got[0, 0, rows], got[0, -1, rows]]).double()
    return ((mine - want).norm() / want.norm()).item()


def torch_call(backend, q, k, v, causal):
    def call():
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return call


def one_cell(leaf, folders, cell, causal, dtype=torch.bfloat16, ratios=None):
    d, h, g, n, b = cell
    torch.manual_seed(n + d)
    q = torch.randn(b, h, n, d, device="cuda", dtype=dtype)
    k, v = (torch.randn(b, g, n, d, device="cuda", dtype=dtype) for _ in range(2))
    out = torch.full_like(q, torch.nan)
    lse = torch.empty(b, h, n, device="cuda", dtype=torch.float32)
    flops = 4 * b * h * n * n * d / (2 if causal else 1)
    rows = torch.cat([torch.arange(0, 70), torch.randint(0, n, (64,)), torch.arange(n - 70, n)]).cuda()
    want, want_lse = exact_rows(q, k, v, causal, rows)
    line = f"{'f16 ' if dtype == torch.float16 else 'bf16'} D={d:<3} H={h}/{g} N={n:<5} B={b:<2} {'causal' if causal else 'full  '}"
    rates = {}
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        call = torch_call(backend, q, k, v, causal)
        error = rms(call(), want, rows)
        rates[name] = flops / median_ms(call) * 1e-9
        line += f" | {name} {rates[name]:5.0f} {error:.2e}"
    for folder in folders:
        leaf.load(folder)
        out.fill_(torch.nan)
        call = lambda: leaf.run(q, k, v, out, lse, causal)
        call()
        error = rms(out, want, rows)
        lse_error = (torch.stack([lse[0, 0, rows], lse[0, -1, rows]]).double() - want_lse).abs().max().item()
        rate = flops / median_ms(call) * 1e-9
        line += f" | {folder.rstrip('/').split('/')[-1]} {rate:5.0f} ({rate / rates['flash']:.2f}x) {error:.2e}"
        if not (error < 6e-3 and lse_error < 1e-4 and not out.isnan().any()):
            line += f" WRONG lse {lse_error:.1e}"
        if ratios is not None:
            ratios.setdefault(folder, []).append(rate / rates["flash"])
    print(line, flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("folder")
    parser.add_argument("--random", type=float, default=0)
    parser.add_argument("--cells", default="all")
    parser.add_argument("--other", nargs="*", default=[])
    parser.add_argument("--tier", type=int, default=80, help="80, or 90 for the Hopper kernels")
    a = parser.parse_args()
    leaf = Leaf(a.library, a.folder, True)
    leaf.library.bench_use(a.tier)
    if a.random and leaf.library.bench_random(a.random, 1):
        print("WRONG")
    ratios = {}
    for cell in QUICK if a.cells == "quick" else CELLS if a.cells == "all" else []:
        for causal in (False, True):
            one_cell(leaf, [a.folder, *a.other], cell, causal, ratios=ratios)
    for folder, all_ratios in ratios.items():
        print(f"{folder}: geometric mean {statistics.geometric_mean(all_ratios):.3f}x of flash, least {min(all_ratios):.3f}x")


if __name__ == "__main__":
    main()
