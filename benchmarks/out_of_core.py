#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Attention of files larger than the budget, against the same problem in memory.

    python3 benchmarks/out_of_core.py [--tool build/bin/cqsa] [--tokens 1048576] [--window 4096] [--dtype f16]
                                      [--memory 64MiB] [--folder DIR] [--repeat 2]

One head of D = 64 with a causal window. The command runs twice on the same files: with the budget (pages of the files count
and are let go), and without one (everything stays in memory). Prints and checks: peak resident memory of the process (VmHWM,
by wait4), sampled rows against fp64, and the rate as a share of the rate in memory. Exit status 1 when a bar is missed.
The bars are those of 1M tokens and 64 MiB: resident <= budget + 32 MiB, rate >= 0.8 of that in memory.
"""
import argparse
import json
import os
import struct
import sys
import tempfile
from pathlib import Path

HEAD_DIM = 64
ELEMENT = {"f16": 2, "f32": 4}
CODE = {"f16": "F16", "f32": "F32"}


def write_inputs(path, tokens, dtype):
    """q, k, v of pseudo-random values in [-2, 2), a piece at a time; no numpy needed."""
    import random

    random.seed(1)
    size = tokens * HEAD_DIM * ELEMENT[dtype]
    info = {name: {"dtype": CODE[dtype], "shape": [1, 1, tokens, HEAD_DIM], "data_offsets": [i * size, (i + 1) * size]}
            for i, name in enumerate("qkv")}
    header = json.dumps(info).encode()
    header += b" " * (-len(header) % 8)
    numbers = [random.uniform(-2, 2) for _ in range(1 << 16)]
    pool = struct.pack("<%d%s" % (len(numbers), "e" if dtype == "f16" else "f"), *numbers)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        left = 3 * size
        while left:
            begin = random.randrange(len(numbers) // 2) * ELEMENT[dtype]  # not periodic in any tile
            piece = pool[begin : begin + min(left, len(pool) // 2)]
            file.write(piece)
            left -= len(piece)
        os.fsync(file.fileno())


def measure(command):
    """The command's JSON and its peak resident bytes."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 1)
        os.close(read)
        os.execv(command[0], command)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status, usage = os.wait4(child, 0)
    if status:
        sys.exit(f"{' '.join(command)} failed with wait status {status}")
    return json.loads(text), usage.ru_maxrss * 1024


def bytes_of(text):
    number = text.rstrip("KMGTiB")
    return int(float(number) * 1024 ** " KMGT".index(text[len(number) : len(number) + 1] or " "))


def run(arguments, folder, memory):
    command = [arguments.tool, "attention", str(folder / "in.safetensors"), "-o", str(folder / "out.safetensors"), "--backend", "cpu",
               "--causal", "bottom_right", "--window", f"{arguments.window - 1},0", "--json", "--quiet", "--check"]
    return measure(command + (["--memory", memory] if memory else []))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", default=str(Path(__file__).resolve().parents[1] / "build/bin/cqsa"))
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--dtype", choices=sorted(ELEMENT), default="f16")
    parser.add_argument("--memory", default="64MiB")
    parser.add_argument("--folder", help="where the files go (default: a new one in the temporary folder)")
    parser.add_argument("--repeat", type=int, default=2, help="runs of each kind; the fastest counts")
    arguments = parser.parse_args()
    budget = bytes_of(arguments.memory)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        write_inputs(folder / "in.safetensors", arguments.tokens, arguments.dtype)
        within, inside = [], []
        for _ in range(arguments.repeat):  # alternating, so that a busy moment hits both
            within.append(run(arguments, folder, arguments.memory))
            inside.append(run(arguments, folder, None))
    report, resident = min(within, key=lambda r: r[0]["run"]["seconds"])[0], max(r[1] for r in within)
    seconds, in_memory = report["run"]["seconds"], min(r[0]["run"]["seconds"] for r in inside)
    files = 4 * arguments.tokens * HEAD_DIM * ELEMENT[arguments.dtype]
    checks = {
        "resident": resident <= budget + (32 << 20),
        "planned": report["run"]["peak_host_bytes"] <= report["plan"]["peak_host_bytes"] <= budget,
        "rows": all(r[0]["check"]["pass"] for r in within),
        "rate": in_memory / seconds >= 0.8,
    }
    print(f"{arguments.tokens} tokens, 1 head, D={HEAD_DIM}, {arguments.dtype}, causal window {arguments.window}: files of "
          f"{files / 2**20:.0f} MiB, budget {arguments.memory}")
    print(f"  resident   {resident / 2**20:.1f} MiB at most (in memory: {max(r[1] for r in inside) / 2**20:.1f} MiB); library "
          f"{report['run']['peak_host_bytes'] / 2**20:.1f} MiB, planned {report['plan']['peak_host_bytes'] / 2**20:.1f} MiB")
    print(f"  time       {seconds:.2f} s, in memory {in_memory:.2f} s: {in_memory / seconds:.2f} of the rate, "
          f"{report['plan']['flops'] / seconds / 1e9:.0f} GFLOP/s")
    print(f"  rows       {report['check']['rows']} sampled, max abs {report['check']['max_abs']:.3g}, allowed "
          f"{report['check']['allowed_max_abs']:.3g}")
    print("  " + ", ".join(f"{name} {'ok' if good else 'MISSED'}" for name, good in checks.items()))
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
