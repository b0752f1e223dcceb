# SPDX-License-Identifier: Apache-2.0
"""Sequences of mixed lengths packed end to end beside a dense call over about as many pairs of rows and keys, on a GPU, through the package.

    PYTHONPATH=bindings/python CQSA_LIBRARY=$PWD/build/release/lib/libcqsa.so.0 python3 benchmarks/varlen.py

The same segments once more with keys on pages of PAGES keys (default 16,64,128), in random order. All times are medians of bursts by turns;
every segment of the packed result is compared with a call of its own.

    .. benchmarks/varlen.py [PAGES]
"""
import math
import sys

import torch

import cqsa
from cuda_attention import medians_ms

LENGTHS = [8192, 300, 4096, 1000, 6000, 2048, 77, 3100, 5000, 1500, 7000, 512, 2600, 4500, 900, 3700]


def on_pages(x, starts, size):
    """The pool of a packed tensor's segments, in random order, and the table."""
    counts = [-(-(b - a) // size) for a, b in zip(starts, starts[1:])]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(size)).tolist()
    pool = torch.zeros(sum(counts), size, *x.shape[1:], device="cuda", dtype=x.dtype)
    table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
    for n, (a, b) in enumerate(zip(starts, starts[1:])):
        for i in range(counts[n]):
            page = table[n, i] = order.pop()
            rows = x[a + i * size:min(b, a + (i + 1) * size)]
            pool[page, :len(rows)] = rows
    return pool, table.cuda()


def main():
    sizes = [int(x) for x in sys.argv[1].split(",")] if len(sys.argv) > 1 else [16, 64, 128]
    for dim, heads, kv_heads in ((64, 32, 32), (128, 16, 16), (128, 32, 8), (256, 8, 8)):
        for causal in ("none", "top_left"):
            torch.manual_seed(dim)
            starts = torch.tensor([0] + LENGTHS).cumsum(0).tolist()
            q = torch.randn(starts[-1], heads, dim, device="cuda", dtype=torch.bfloat16)
            k, v = (torch.randn(starts[-1], kv_heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            out = torch.empty_like(q)
            pairs = sum(n * n for n in LENGTHS)
            length = round(math.sqrt(pairs / 4) / 64) * 64
            dense = torch.randn(4, heads, length, dim, device="cuda", dtype=torch.bfloat16)
            dense_k, dense_v = (torch.randn(4, kv_heads, length, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            dense_out = torch.empty_like(dense)
            cu = torch.tensor(starts, dtype=torch.int32, device="cuda")
            calls = [lambda: cqsa.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=causal, out=out),
                     lambda: cqsa.attention(dense, dense_k, dense_v, causal=causal, out=dense_out)]
            used = torch.tensor(LENGTHS, dtype=torch.int32, device="cuda")
            for size in sizes:
                (pool_k, table), (pool_v, _) = (on_pages(x, starts, size) for x in (k, v))
                calls.append(lambda pool_k=pool_k, pool_v=pool_v, table=table: cqsa.attention(
                    q, pool_k, pool_v, cu_seqlens_q=cu, seqused_k=used, page_table=table, causal=causal))
            mixed, whole, *paged = medians_ms(calls)
            wrong = 0
            for a, b in zip(starts, starts[1:]):
                one = cqsa.attention(*(x[a:b].transpose(0, 1)[None].contiguous() for x in (q, k, v)), causal=causal)[0].transpose(0, 1)
                wrong = max(wrong, (one.float() - out[a:b].float()).abs().max().item())
            work = 4 * heads * dim * (1 if causal == "none" else 0.5) * 1e-9
            rates = work * pairs / mixed, work * 4 * length * length / whole
            print(f"D={dim:<3} H={heads}/{kv_heads} {causal:<8} mixed {rates[0]:5.0f} TFLOP/s, dense 4 x {length} {rates[1]:5.0f}: "
                  f"{rates[0] / rates[1]:.3f}, largest difference from single calls {wrong:.1e}"
                  + "".join(f", pages of {size} {mixed / ms:.2f} of packed" for size, ms in zip(sizes, paged)), flush=True)
            for call in calls[2:]:
                assert (call().float() - out.float()).abs().max().item() < 1e-2
            assert wrong < 1e-2


if __name__ == "__main__":
    main()
