# SPDX-License-Identifier: Apache-2.0
"""Other processes take the card's memory, before a run and in the middle of one: the run finishes, right, within what is left.

    CQSA_LIBRARY=.../libcqsa.so.0 PYTHONPATH=bindings/python python3 tests/device/test_memory_pressure.py

Needs torch with CUDA. Another process is a real one: memory that this process' torch holds would count as ours.
"""
import subprocess
import sys
import threading
import time

import torch

import cqsa

TAKER = """
import os, sys
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
import torch
leave = int(sys.argv[1])
torch.cuda.init()
print("ready", flush=True)
sys.stdin.readline()
blocks, size = [], 8 << 30
while size >= 2 << 20:
    free = torch.cuda.mem_get_info()[0]
    if free - leave < size:
        size //= 2
        continue
    try:
        blocks.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:  # torch takes small blocks from pieces of 20 MiB
        size //= 2
print("taken", torch.cuda.mem_get_info()[0], flush=True)
sys.stdin.readline()
"""


class Taker:
    """A process that, once told to, leaves `leave` bytes of the card free until it is told to end. Starting it takes seconds, so it
    is made ready before the run that it is to disturb."""

    def __init__(self, leave):
        self.process = subprocess.Popen([sys.executable, "-c", TAKER, str(leave)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "ready\n"

    def __enter__(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line.startswith("taken"), line
        print(f"    another process leaves {int(line.split()[1]) >> 20} MiB free")
        return self

    def __exit__(self, *error):
        self.process.stdin.close()
        self.process.wait()


def operands(tokens, heads=8, dim=64):
    torch.manual_seed(tokens)
    return [torch.randn(1, heads, tokens, dim).to(torch.float16) for _ in "qkv"]


def check(out, q, k, v):
    """Sampled rows of two heads against float64, causal."""
    tokens = q.shape[2]
    for head in (0, q.shape[1] - 1):
        for row in torch.linspace(0, tokens - 1, 24).long().tolist():
            logits = k[0, head, :row + 1].double() @ q[0, head, row].double() / q.shape[-1] ** 0.5
            wanted = torch.softmax(logits, 0) @ v[0, head, :row + 1].double()
            error = (out[0, head, row].double() - wanted).abs().max().item()
            assert error < 2e-3, (head, row, error)


def test_memory_taken_before():
    """The plan is made for a card that then turns out to be full: the run asks for less, and says so."""
    q, k, v = operands(131072)
    cqsa.attention(*(x[:, :, :256] for x in (q, k, v)), backend="cuda")  # context and code are there
    plan = cqsa.attention_plan(q, k, v, causal="top_left", backend="cuda")
    wanted = plan.describe()["peak_device_bytes"]
    with Taker(leave=wanted // 2 + (4 << 20)):
        out, info = cqsa.attention(q, k, v, causal="top_left", backend="cuda", memory_limit=2 * wanted, return_info=True)
    print(f"    the plan wanted {wanted / 2**20:.1f} MiB; the run took {info['run']['peak_device_bytes'] / 2**20:.1f} MiB after {info['run']['retries']} retries")
    assert info["run"]["retries"] > 0, "the memory was to be had after all"
    check(out, q, k, v)


def test_memory_taken_in_the_middle():
    q, k, v = operands(524288)  # some ten seconds of the portable kernel
    taker = Taker(leave=64 << 20)
    ticks = []
    seen = threading.Event()

    def progress(done, total):
        ticks.append((done, total))
        if done > 0:
            seen.set()
        return 0

    result = {}

    def work():
        result["out"], result["info"] = cqsa.attention(q, k, v, causal="top_left", backend="cuda", memory_limit="256MiB", progress=progress,
                                                       return_info=True)

    worker = threading.Thread(target=work)
    worker.start()
    assert seen.wait(60)
    with taker:
        done, total = ticks[-1]
        print(f"    the card is full since {done} of {total} tiles")
        worker.join()
    assert done < total, "the run had ended before the card was full"
    assert "out" in result, "the run failed"
    check(result["out"], q, k, v)


def main():
    failures = []
    for name, test in sorted(globals().items()):
        if name.startswith("test_"):
            start = time.perf_counter()
            try:
                test()
                print(f"ok   {name} {time.perf_counter() - start:.1f} s")
            except Exception as error:
                failures.append(name)
                print(f"FAIL {name}: {error!r}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
