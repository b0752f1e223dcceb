# SPDX-License-Identifier: Apache-2.0
"""cqsa against torch's CPU scaled_dot_product_attention in one process, two threads each; a markdown table.

    python3 benchmarks/torch_sdpa.py [--quick] [--threads N] [--heads N] [--seconds S] [--turns N]

The machine is shared and noisy: the two are timed alternately and the best of several counts. Every cell is checked: sampled rows of both
against float64. Exits 1 if a check fails; a cell where torch is faster is marked, and counted in the last line.
"""
import argparse
import datetime
import os
import sys
import time

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--quick", action="store_true", help="up to 4096 tokens")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--heads", type=int, help="in every cell (8, and fewer for long sequences)")
parser.add_argument("--seconds", type=float, default=1.0, help="for each cell, at least")
parser.add_argument("--turns", type=int, default=3)
options = parser.parse_args()
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:options.threads])  # cqsa takes one thread per core available

import numpy as np  # noqa: E402
import torch  # noqa: E402

import cqsa  # noqa: E402

torch.set_num_threads(options.threads)
sdpa = torch.nn.functional.scaled_dot_product_attention
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
MOST_RUNS = 40
PAUSE = 0.25  # longer than any OpenMP library spins by default


def heads_of(tokens):
    return options.heads or {1024: 8, 2048: 8, 4096: 4}.get(tokens, 2)


def best_seconds(calls):
    """The best time of each call, taken in turns of a few runs. A pause comes before each turn: the threads of an OpenMP library
    spin for a while after their work, on the cores that the other one then needs."""
    best, spent = [float("inf")] * len(calls), [0.0] * len(calls)
    for _ in range(options.turns):
        for index, call in enumerate(calls):
            time.sleep(PAUSE)
            for run in range(MOST_RUNS):
                start = time.perf_counter()
                call()
                seconds = time.perf_counter() - start
                best[index] = min(best[index], seconds)
                spent[index] += seconds
                if run > 0 and spent[index] > options.seconds / len(calls):
                    break
    return best


def largest_error(out, q, k, v, causal):
    """Over 16 rows of each of two heads, against float64."""
    worst = 0.0
    tokens = q.shape[2]
    rows = np.linspace(0, tokens - 1, 16).astype(int)
    for head in (0, q.shape[1] - 1):
        x, y, z = (t[0, head].double().numpy() for t in (q, k, v))
        logits = x[rows] @ y.T / np.sqrt(q.shape[-1])
        if causal:
            logits[np.arange(tokens) > rows[:, None]] = -np.inf
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        wanted = weights / weights.sum(-1, keepdims=True) @ z
        worst = max(worst, float(np.abs(out[0, head].double().numpy()[rows] - wanted).max()))
    return worst


def cell(dtype, dim, tokens, causal):
    torch.manual_seed(tokens + dim)
    heads = heads_of(tokens)
    q, k, v = (torch.randn(1, heads, tokens, dim).to(dtype) for _ in "qkv")
    rule = "top_left" if causal else "none"
    outs = sdpa(q, k, v, is_causal=causal), cqsa.attention(q, k, v, causal=rule, backend="cpu")
    errors = [largest_error(out, q, k, v, causal) for out in outs]
    theirs, ours = best_seconds([lambda: sdpa(q, k, v, is_causal=causal),
                                 lambda: cqsa.attention(q, k, v, causal=rule, backend="cpu")])
    rate = 4e-9 * heads * tokens * tokens * dim * (0.5 if causal else 1.0)
    right = errors[1] <= TOLERANCE[dtype]
    print(f"| {str(dtype)[6:]} | {dim} | {tokens} | {heads} | {'causal' if causal else 'full'} | {rate / theirs:.0f} | {rate / ours:.0f} | "
          f"{theirs / ours:.2f}{'' if ours < theirs else ' (torch faster)'} | {errors[0]:.1e} | {errors[1]:.1e}{'' if right else ' WRONG'} |",
          flush=True)
    return right, ours < theirs


def processor():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        return next((line.split(":")[1].strip() for line in file if line.startswith("model name")), "unknown processor")


def main():
    capability = getattr(torch.backends.cpu, "get_cpu_capability", lambda: "unknown")()
    taken = [cqsa.attention_plan((1, 1, 1024, 64), (1, 1, 1024, 64), dtype=name, backend="cpu").describe()["implementation"]
             for name in ("float32", "bfloat16")]
    print(f"{datetime.date.today()}, {processor()}, {options.threads} threads; torch {torch.__version__} ({capability}), cqsa {cqsa.__version__} "
          f"({' and '.join(taken)}); GFLOP/s, best of {options.turns} turns of 2 to {MOST_RUNS}\n")
    print("| type | D | N | heads | mask | torch | cqsa | cqsa/torch | torch error | cqsa error |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    results = [cell(dtype, dim, tokens, causal) for dtype in (torch.float32, torch.bfloat16) for dim in (64, 128)
               for tokens in (1024, 2048, 4096, 8192, 16384)[:3 if options.quick else 5] for causal in (False, True)]
    print(f"\ncqsa is faster in {sum(faster for _, faster in results)} of {len(results)} cells")
    return 0 if all(right for right, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
