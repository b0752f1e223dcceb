# SPDX-License-Identifier: Apache-2.0
"""A mixture-of-experts layer on the CPU beside a naive loop: each expert that has tokens is decoded to float32 (by cqsa.QuantTensor.dequantize, on all cores) and
multiplied by numpy, whose BLAS is named.

    PYTHONPATH=bindings/python CQSA_LIBRARY=$PWD/build/release/lib/libcqsa.so.0 python3 benchmarks/moe.py [--tokens 1,64,512] [--formats Q4_K,Q4_K,Q4_K] [--rounds 7]

Contenders take turns; medians and least times are printed. Every result is checked against the naive one before it is timed. The bar, at least twice the naive
loop's speed at 64 tokens, 64 experts, top 4, hidden 2048, inter 512, Q4_K, is checked where that is what runs: a miss or a wrong result makes the exit status 1.
"""
import argparse
import pathlib
import statistics
import sys
import time

import numpy as np

import cqsa

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tools"))
from make_gguf import FORMATS, blocks  # noqa: E402

ALLOWED = {"q8": 3e-2, "f16": 1e-4}
USUAL = dict(experts=64, topk=4, hidden=2048, inter=512)


def naive(x, ids, weights, w_gate, w_up, w_down):
    out = np.zeros_like(x)
    for e in np.unique(ids):
        tokens, slots = np.nonzero(ids == e)
        rows = x[tokens]
        g, u = rows @ w_gate[e].dequantize().T, rows @ w_up[e].dequantize().T
        y = (g / (1 + np.exp(-g)) * u) @ w_down[e].dequantize().T
        np.add.at(out, tokens, weights[tokens, slots, None] * y)
    return out


def blas_of_numpy():
    config = getattr(np.__config__, "CONFIG", {}).get("Build Dependencies", {}).get("blas", {})
    return " ".join(filter(None, (config.get("name"), config.get("version")))) or "unknown BLAS (see numpy.show_config())"


def weights_of(random, options):
    gate, up, down = options.formats.split(",")
    def make(format, rows, cols):
        data = np.stack([blocks(random, format, rows, cols, cols ** -0.5) for _ in range(options.experts)])
        return cqsa.QuantTensor(data, format, cols=cols)
    return make(gate, options.inter, options.hidden), make(up, options.inter, options.hidden), make(down, options.hidden, options.inter)


def timed(functions, rounds):
    """Seconds of each function, by turns: medians and least."""
    times = [[] for _ in functions]
    for turn in range(rounds):
        for i in range(len(functions)):
            i = (i + turn) % len(functions)
            begin = time.perf_counter()
            functions[i]()
            times[i].append(time.perf_counter() - begin)
    return [(statistics.median(t), min(t)) for t in times]


def row(options, random, w, tokens):
    """One line of the table; whether it is right and fast enough."""
    x = random.standard_normal((tokens, options.hidden)).astype(np.float32)
    ids, weights = cqsa.moe_route(random.standard_normal((tokens, options.experts)).astype(np.float32), options.topk, renormalise=True)
    wanted = naive(x, ids, weights, *w)
    runs, errors = [lambda: naive(x, ids, weights, *w)], []
    for precision in ("q8", "f16"):
        got = cqsa.moe_prefill(x, ids, weights, *w, precision=precision)
        errors.append(float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted)))
        runs.append(lambda precision=precision: cqsa.moe_prefill(x, ids, weights, *w, precision=precision))
    right = all(error <= allowed for error, allowed in zip(errors, ALLOWED.values()))
    slow, q8, f16 = timed(runs, options.rounds)
    usual = tokens == 64 and options.formats == "Q4_K,Q4_K,Q4_K" and all(getattr(options, name) == size for name, size in USUAL.items())
    enough = not usual or slow[0] >= 2 * q8[0]
    print("%6d  %9.2f %9.2f  %9.2f %9.2f  %9.2f %9.2f  %7.1fx  %.2e  %.2e  %s" % (
        tokens, *(1e3 * t for pair in (slow, q8, f16) for t in pair), slow[0] / q8[0], *errors,
        "ok" if right and enough else "WRONG" if not right else "BELOW THE BAR OF 2x"))
    return right and enough


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", default="1,8,64,512")
    for name, size in USUAL.items():
        parser.add_argument("--" + name, type=int, default=size)
    parser.add_argument("--formats", default="Q4_K,Q4_K,Q4_K", help="of gate, up and down (%(default)s), of " + ", ".join(FORMATS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    random = np.random.default_rng(options.seed)
    w = weights_of(random, options)
    one = np.zeros((1, options.hidden), np.float32)
    _, info = cqsa.moe_prefill(one, [[0]], [[1]], *w, return_info=True)
    print("%s, numpy %s with %s; %d experts, top %d, hidden %d, inter %d, %s" % (
        info.implementation, np.__version__, blas_of_numpy(), options.experts, options.topk, options.hidden, options.inter, options.formats))
    print("tokens  naive ms     least      q8 ms     least     f16 ms     least  naive/q8  error q8  error f16")
    return 0 if all([row(options, random, w, int(tokens)) for tokens in options.tokens.split(",")]) else 1


if __name__ == "__main__":
    sys.exit(main())
