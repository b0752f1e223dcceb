# SPDX-License-Identifier: Apache-2.0
"""The attention kernel of Hopper through the Python package: shapes with few tiles a head, equal bits over 20 runs, capture at the first
call, mixed lengths, pages. A plain script, for CI has no GPU; random problems are checked by benchmarks/cuda_attention.py.

    PYTHONPATH=bindings/python CQSA_LIBRARY=$PWD/build/release/lib/libcqsa.so.0 python3 tests/device/test_python_hopper.py [WORD ..]
"""
import math
import os
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import torch

import cqsa
import test_python_cuda as base

TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


def made(heads, kv_heads, rows, keys, dim, dtype, batch=1, seed=3):
    torch.manual_seed(seed)
    q = torch.randn(batch, heads, rows, dim, device="cuda", dtype=dtype)
    return (q, *(torch.randn(batch, kv_heads, keys, dim, device="cuda", dtype=dtype) for _ in range(2)))


def exact_at(q, k, v, causal, rows):
    """fp64 at some rows of the first and of the last head of the last batch item."""
    out = []
    for h in (0, q.shape[1] - 1):
        g = h // (q.shape[1] // k.shape[1])
        s = q[-1, h, rows].double() @ k[-1, g].double().T / math.sqrt(q.shape[3])
        if causal != "none":
            offset = k.shape[2] - q.shape[2] if causal == "bottom_right" else 0
            hidden = torch.arange(k.shape[2], device="cuda")[None] > rows[:, None] + offset
            s = s.masked_fill(hidden, -torch.inf)
        out.append(torch.nan_to_num(torch.softmax(s, 1)) @ v[-1, g].double())
    return torch.stack(out)


def test_shapes_with_few_tiles_a_head():
    for heads, kv_heads, rows, keys, dim in ((32, 32, 128, 32768, 128), (256, 32, 128, 8192, 128), (32, 32, 4096, 131072, 64),
                                             (8, 1, 100, 9000, 256), (3, 3, 1, 5000, 64), (16, 4, 129, 700, 96), (140, 140, 65, 65, 128)):
        for causal in ("none", "top_left", "bottom_right"):
            dtype = torch.bfloat16 if heads % 2 else torch.float16
            q, k, v = made(heads, kv_heads, rows, keys, dim, dtype)
            out, info = cqsa.attention(q, k, v, causal=causal, return_info=True)
            at = torch.unique(torch.cat([torch.arange(min(rows, 40)), torch.randint(0, rows, (40,)), torch.arange(max(0, rows - 40), rows)]))
            at = at.cuda()
            error = (torch.stack([out[-1, 0, at], out[-1, -1, at]]).double() - exact_at(q, k, v, causal, at)).abs().max().item()
            assert error < TOLERANCE[dtype] * 2, f"{heads}/{kv_heads} {rows}x{keys} D {dim} {causal}: {error:.2e} ({info['line']})"


def test_equal_bits_over_20_runs():
    for heads, kv_heads, rows, keys, dim, batch in ((16, 16, 2048, 2048, 64, 2), (16, 4, 2000, 3000, 128, 2), (8, 8, 1500, 1500, 256, 1),
                                                    (8, 8, 128, 32768, 128, 1)):
        for causal in ("none", "bottom_right"):
            q, k, v = made(heads, kv_heads, rows, keys, dim, torch.bfloat16, batch)
            first = [x.clone() for x in cqsa.attention(q, k, v, causal=causal, return_lse=True)]
            for _ in range(19):
                for want, got in zip(first, cqsa.attention(q, k, v, causal=causal, return_lse=True)):
                    assert torch.equal(want.view(torch.uint8), got.view(torch.uint8)), (heads, rows, keys, dim, causal)


def packed(lengths, heads, kv_heads, dim, dtype):
    starts = torch.tensor([0] + lengths).cumsum(0).tolist()
    torch.manual_seed(starts[-1])
    q = torch.randn(starts[-1], heads, dim, device="cuda", dtype=dtype)
    k, v = (torch.randn(starts[-1], kv_heads, dim, device="cuda", dtype=dtype) for _ in range(2))
    return q, k, v, starts, torch.tensor(starts, dtype=torch.int32, device="cuda")


LENGTHS = ([1] * 700, [0, 300, 0, 0, 77, 1, 1500, 640, 0], [5000] + [3] * 90, [0] * 40 + [129], [64, 192, 128, 127, 129, 193] * 20, [2, 2048, 4])


def test_mixed_lengths():
    for lengths in LENGTHS:
        for heads, kv_heads, dim in ((6, 6, 64), (8, 2, 128), (4, 1, 256)):
            for causal in ("none", "top_left", "bottom_right"):
                q, k, v, starts, cu = packed(lengths, heads, kv_heads, dim, torch.float16)
                out, lse = cqsa.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=causal, return_lse=True)
                for _ in range(3):
                    again = cqsa.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=causal, return_lse=True)
                    assert torch.equal(out.view(torch.uint8), again[0].view(torch.uint8)) and torch.equal(lse.view(torch.uint8), again[1].view(torch.uint8))
                for a, b in list(zip(starts, starts[1:]))[:60]:
                    if a < b:
                        one = base.exact(*(x[a:b].transpose(0, 1)[None] for x in (q, k, v)), causal=causal)[0].transpose(0, 1)
                        base.close(out[a:b], one)


def test_pages():
    for page_size, dim, heads, kv_heads in ((16, 64, 4, 2), (32, 128, 8, 1), (64, 128, 4, 4), (48, 64, 2, 2), (128, 256, 4, 2), (256, 128, 3, 3), (16, 256, 2, 1)):
        for causal in ("none", "bottom_right"):
            keys, rows, batch = 1000, 150, 3
            q, k, v = made(heads, kv_heads, rows, keys, dim, torch.bfloat16, batch)
            pages = -(-keys // page_size)
            order = torch.randperm(batch * pages + 5, generator=torch.Generator().manual_seed(page_size))[:batch * pages]
            pools = []
            for x in (k, v):
                pool = torch.full((batch * pages + 5, page_size, kv_heads, dim), torch.nan, device="cuda", dtype=x.dtype)
                padded = torch.nn.functional.pad(x.transpose(1, 2), (0, 0, 0, 0, 0, pages * page_size - keys), value=torch.nan)
                pool[order.cuda()] = padded.reshape(batch * pages, page_size, kv_heads, dim)
                pools.append(pool)
            table = order.reshape(batch, pages).int()
            missing = torch.rand(batch, pages, generator=torch.Generator().manual_seed(1)) < 0.15
            table[missing] = -1
            used = torch.tensor([keys, 700, 333], dtype=torch.int32)
            there = ~missing.repeat_interleave(page_size, 1)[:, None, None, :keys] & (torch.arange(keys)[None, None, None] < used[:, None, None, None])
            out = cqsa.attention(q, *pools, page_table=table.cuda(), seqused_k=used.cuda(), causal=causal)
            if causal != "none":
                offset = used[:, None, None, None] - rows
                there = there & (torch.arange(keys) <= torch.arange(rows)[:, None] + offset)
            base.close(out, base.exact(q, k, v, mask=there))


def test_the_first_call_of_a_process_can_be_captured():
    program = """if True:
        import torch, cqsa, math
        torch.manual_seed(1)
        q, k, v = (torch.randn(2, 4, 700, 128, device="cuda", dtype=torch.float16) for _ in range(3))
        out = torch.full_like(q, float("nan"))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            cqsa.attention(q, k, v, causal="top_left", out=out)
        graph.replay()
        torch.cuda.synchronize()
        s = (q.double() @ k.double().mT / math.sqrt(128)).masked_fill(torch.ones(700, 700, device="cuda").triu(1).bool(), -torch.inf)
        print((out.double() - torch.softmax(s, -1) @ v.double()).abs().max().item())"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert said.returncode == 0 and float(said.stdout) < 2e-3, said.stdout + said.stderr


if __name__ == "__main__":
    sys.exit(base.run(sys.argv[1:], globals()))
