# SPDX-License-Identifier: Apache-2.0
"""The attention leaves of sm_80 and of Hopper beside torch's FlashAttention-2 and cuDNN in one run: time, and error against fp64.

    python3 benchmarks/cuda_attention.py LIBRARY CUBINS [--tier 80|90] [--random SECONDS] [--cells quick|all|none] [--dims 64,128]
        [--tokens 1024] [--other LIBRARY:CUBINS[:TIER] ..]

LIBRARY is built from benchmarks/cuda_attention.cpp, CUBINS a folder of cubins of the kernels (docs/kernels/NOTES-attention-sm80.md).
Bursts of all contenders take turns, so that each finds the same temperature and clock.
"""
import argparse
import glob
import ctypes
import statistics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# head_dim, heads, key heads, tokens, batch: those of the comparison tables, bf16.
CELLS = [(64, 32, 32, 1024, 16), (64, 32, 32, 4096, 4), (64, 32, 32, 16384, 1),
         (128, 16, 16, 1024, 16), (128, 16, 16, 4096, 4), (128, 16, 16, 16384, 1), (128, 16, 16, 65536, 1),
         (256, 8, 8, 4096, 4), (256, 8, 8, 16384, 1),
         (128, 32, 8, 4096, 4), (128, 64, 8, 8192, 1), (128, 32, 8, 32768, 1)]
PEERS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
QUICK = [CELLS[0], CELLS[2], CELLS[3], CELLS[4], CELLS[5], CELLS[7], CELLS[8]]


def medians_ms(functions, rounds=6, burst=0.012):
    """Medians of event timings of several functions, in bursts by turns: what comes first after a pause finds a cool chip with a higher
    clock."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = [[] for _ in functions]
    for function in functions:
        function()
    for turn in range(rounds):
        for i in range(len(functions)):
            i = (i + turn) % len(functions)
            spent = 0
            for _ in range(30):
                begin.record()
                functions[i]()
                end.record()
                end.synchronize()
                times[i].append(begin.elapsed_time(end))
                spent += times[i][-1]
                if spent > burst * 1e3:
                    break
    return [statistics.median(t) for t in times]


class Leaf:
    def __init__(self, library, folder, tell):
        self.folder = folder
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


def one_cell(leaves, cell, causal, dtype=torch.bfloat16, ratios=None, peers=("flash", "cudnn")):
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
    leaves = [x for x in leaves if glob.glob(f"{x.folder}/*{'f16' if dtype == torch.float16 else 'bf16'}_d{d}*.cubin")]
    calls, errors, wrong = [], [], []
    for peer in peers:
        calls.append(torch_call(PEERS[peer], q, k, v, causal))
        errors.append(rms(calls[-1](), want, rows))
    for leaf in leaves:
        out.fill_(torch.nan)
        calls.append(lambda leaf=leaf: leaf.run(q, k, v, out, lse, causal))
        calls[-1]()
        errors.append(rms(out, want, rows))
        lse_error = (torch.stack([lse[0, 0, rows], lse[0, -1, rows]]).double() - want_lse).abs().max().item()
        wrong.append("" if errors[-1] < 6e-3 and lse_error < 1e-4 and not out.isnan().any() else f" WRONG lse {lse_error:.1e}")
    rates = [flops / ms * 1e-9 for ms in medians_ms(calls)]
    line += "".join(f" | {peer} {rate:5.0f} {error:.2e}" for peer, rate, error in zip(peers, rates, errors))
    for leaf, rate, error, bad in zip(leaves, rates[len(peers):], errors[len(peers):], wrong):
        name = leaf.folder.rstrip("/").split("/")[-1]
        of_peers = [rate / x for x in rates[:len(peers)]]
        line += f" | {name} {rate:5.0f} ({', '.join(f'{x:.2f}' for x in of_peers)}) {error:.2e}{bad}"
        if ratios is not None:
            ratios.setdefault(name, []).append(of_peers)
    print(line, flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("folder")
    parser.add_argument("--random", type=float, default=0)
    parser.add_argument("--cells", default="all")
    parser.add_argument("--other", nargs="*", default=[], metavar="LIBRARY:CUBINS[:TIER]", help="other versions, timed where they have the size")
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--peers", default="flash,cudnn", help="FlashAttention-2 and cuDNN, both as torch has them")
    parser.add_argument("--tokens", default="")
    parser.add_argument("--tier", type=int, default=80, help="80, or 90 for the Hopper kernels")
    a = parser.parse_args()
    leaf = Leaf(a.library, a.folder, True)
    leaf.library.bench_use(a.tier)
    if a.random and leaf.library.bench_random(a.random, 1):
        print("WRONG")
    leaves, peers = [leaf], a.peers.split(",")
    for other in a.other:
        library, folder, *tier = other.split(":")
        leaves.append(Leaf(library, folder, False))
        leaves[-1].library.bench_use(int(tier[0]) if tier else a.tier)
    ratios = {}
    for cell in QUICK if a.cells == "quick" else CELLS if a.cells == "all" else []:
        if str(cell[0]) not in a.dims.split(",") or (a.tokens and str(cell[3]) not in a.tokens.split(",")):
            continue
        for causal in (False, True):
            one_cell(leaves, cell, causal, ratios=ratios, peers=peers)
    for name, pairs in ratios.items():
        for peer, values in zip(peers, zip(*pairs)):
            print(f"{name}: geometric mean {statistics.geometric_mean(values):.3f} of {peer}, least {min(values):.3f}")


if __name__ == "__main__":
    main()
