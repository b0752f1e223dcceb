# SPDX-License-Identifier: Apache-2.0
"""Other processes take the card's memory, before a run and in the middle of one: the run finishes, right, within what is left.

    CQSA_LIBRARY=.../libcqsa.so.0 PYTHONPATH=bindings/python python3 tests/device/test_memory_pressure.py

Needs torch with CUDA, and a card that nobody else uses meanwhile. Another process is a real one: memory that this process' torch
holds would count as ours. It ends by itself after 85 s, whatever hangs.
"""
import faulthandler
import subprocess
import sys
import threading
import time

import torch

import cqsa

MIB = 1 << 20
RESERVE = 16 * MIB  # for what a driver takes beside our allocations: streams, events, tables of pages

# Takes all but so many bytes when it is told how many, in steps down to 2 MiB, and holds them until its input ends. Its context is
# made before that: it takes most of a second and half a GiB.
TAKER = """
import os, sys
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
import torch
torch.cuda.mem_get_info()
print("ready", flush=True)
line = sys.stdin.readline()
if not line:
    sys.exit()
leave, blocks, size = int(line), [], 8 << 30
while size >= 2 << 20:
    if torch.cuda.mem_get_info()[0] - leave < size:
        size //= 2
        continue
    try:
        blocks.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        size //= 2
print("taken", torch.cuda.mem_get_info()[0], flush=True)
sys.stdin.readline()
"""


class Taker:
    """A process that is ready to take the card's memory. Leaving the block ends it, and gives the memory back."""

    def __enter__(self):
        self.process = subprocess.Popen([sys.executable, "-c", TAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.read("ready")
        return self

    def read(self, word):
        line = self.process.stdout.readline()
        assert line.startswith(word), f"the other process said {line!r}, not {word}; status {self.process.poll()}"
        return line.split()

    def take_all_but(self, leave):
        """Bytes that are free then."""
        self.process.stdin.write(f"{leave}\n")
        self.process.stdin.flush()
        return int(self.read("taken")[1])

    def __exit__(self, *error):
        try:
            self.process.stdin.close()
            self.process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()


def operands(tokens, heads=8, dim=64):
    """Made on the card, since that takes seconds less; nothing of them stays there."""
    torch.manual_seed(tokens)
    made = [torch.randn(1, heads, tokens, dim, device="cuda", dtype=torch.float16).cpu() for _ in "qkv"]
    torch.cuda.empty_cache()
    return made


def check(out, q, k, v):
    """Sampled rows of two heads against float64, causal."""
    tokens = q.shape[2]
    for head in (0, q.shape[1] - 1):
        keys, values = k[0, head].double(), v[0, head].double()
        for row in torch.linspace(0, tokens - 1, 16).long().tolist():
            logits = keys[:row + 1] @ q[0, head, row].double() / q.shape[-1] ** 0.5
            error = (out[0, head, row].double() - torch.softmax(logits, 0) @ values[:row + 1]).abs().max().item()
            assert error < 2e-3, (head, row, error)


def warm_up(q, k, v):
    cqsa.attention(*(x[:, :, :256] for x in (q, k, v)), backend="cuda")  # context and code are there


def test_memory_taken_before():
    """The plan is made for a card that then turns out to be full: the run asks for less, and says so."""
    q, k, v = operands(131072)
    warm_up(q, k, v)
    wanted = cqsa.attention_plan(q, k, v, causal="top_left", backend="cuda").describe()["peak_device_bytes"]
    assert wanted > 4 * RESERVE, f"a plan of {wanted} bytes is too small to press"
    with Taker() as taker:
        free = taker.take_all_but(wanted // 2 + RESERVE)
        # The limit is twice what the plan wants, so that only the card stands in its way.
        out, info = cqsa.attention(q, k, v, causal="top_left", backend="cuda", memory_limit=2 * wanted, return_info=True)
    run = info["run"]
    print(f"    the plan wanted {wanted / MIB:.1f} MiB, {free / MIB:.1f} were free; the run took {run['peak_device_bytes'] / MIB:.1f} "
          f"after {run['retries']} retries")
    assert free < wanted, "the other process could not take the card"
    assert run["retries"] > 0, "the memory was to be had after all"
    assert run["peak_device_bytes"] <= free
    check(out, q, k, v)


def run_while_taken(taker, q, k, v):
    """A run, and the card taken once a tile of it is done. The result, and whether the run was still going on then."""
    begun, result = threading.Event(), {}
    ticks = [(0, 1)]

    def progress(done, total):
        ticks.append((done, total))
        if done > 0:
            begun.set()
        return 0

    def work():
        try:
            result["out"] = cqsa.attention(q, k, v, causal="top_left", backend="cuda", memory_limit="256MiB", progress=progress)
        except Exception as error:  # shown by the caller's thread
            result["error"] = error
        begun.set()

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    begun.wait()
    free = taker.take_all_but(64 * MIB)
    done, total = ticks[-1]
    print(f"    {q.shape[2]} tokens: {free / MIB:.1f} MiB are free since {done / total:.0%} of the run")
    worker.join()
    if "error" in result:
        raise result["error"]
    return result["out"], done < total


def test_memory_taken_in_the_middle():
    """A run has its memory from its beginning, and a full card changes nothing for it. Longer runs until one is still going on when
    the card is full: how long that takes depends on the kernel."""
    for tokens in (262144, 524288, 1048576):
        q, k, v = operands(tokens)
        warm_up(q, k, v)
        with Taker() as taker:
            out, in_the_middle = run_while_taken(taker, q, k, v)
        if in_the_middle:
            return check(out, q, k, v)
    raise AssertionError("every run had ended before the card was full")


def main():
    faulthandler.dump_traceback_later(85, exit=True)
    failures = []
    for name, test in sorted(globals().items()):
        if name.startswith("test_"):
            start = time.perf_counter()
            try:
                test()
                print(f"ok   {name} {time.perf_counter() - start:.1f} s", flush=True)
            except Exception as error:
                failures.append(name)
                print(f"FAIL {name}: {error!r}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
