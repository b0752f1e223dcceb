# SPDX-License-Identifier: Apache-2.0
"""The attention kernel of Hopper through the Python package: shapes with few tiles a head, equal bits over 20 runs, capture at the first
call. A plain script, for CI has no GPU; random problems are checked by benchmarks/cuda_attention.py.

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
