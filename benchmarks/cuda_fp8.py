# SPDX-License-Identifier: Apache-2.0
"""FP8 quantization on a GPU: checks, then times beside a device copy of the same bytes in the same run.

    python3 benchmarks/cuda_fp8.py LIBRARY CUBINS [--samples 28] [--rounds 40] [--no-checks] [--no-times]

LIBRARY is built from benchmarks/cuda_fp8.cpp, CUBINS a folder of cubins of the kernels (docs/kernels/NOTES-fp8.md). Before every timed call the second
cache is overwritten; calls and copies take turns; medians.
"""
import argparse
import ctypes
import statistics

import torch

CURRENT, STATIC, RING = 0, 1, 2
NO_SATURATE, STAGE = 2, 4
P, I64, I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class Job(ctypes.Structure):
    _fields_ = [("rows", I64), ("columns", I64), ("x_stride", I64), ("x", P), ("out", P), ("turned", P), ("type", I32), ("format", I32), ("format_turned", I32),
                ("source", I32), ("block", I64 * 2), ("block_turned", I64 * 2), ("scale_in", P), ("scale_inv", P), ("scale_inv_turned", P), ("amax", P),
                ("counters", P), ("skip", P), ("ring", P), ("workspace", P), ("hist_len", I32), ("flags", I32), ("nan_policy", I32), ("margin", I32)]


def pointer(t):
    return None if t is None else t.data_ptr()


class Library:
    def __init__(self, path, folder, tell=True):
        self.c = ctypes.CDLL(path)
        self.c.bench_scale.restype = ctypes.c_float
        self.c.bench_scale.argtypes = [ctypes.c_float, ctypes.c_int, ctypes.c_int]
        self.c.bench_conversions.restype = self.c.bench_launches.restype = I64
        self.c.bench_load(folder.encode(), int(tell))
        self.workspace = self.new_workspace()

    def stream(self):
        return P(torch.cuda.current_stream().cuda_stream)

    def new_workspace(self):
        w = torch.full((4096,), 0x55, dtype=torch.uint8, device="cuda")
        self.c.bench_workspace_init(P(w.data_ptr()), ctypes.c_uint64(w.numel()), self.stream())
        return w

    def job(self, x, out=None, turned=None, source=STATIC, block=(0, 0), block_turned=(0, 0), scale_in=None, scale_inv=None, scale_inv_turned=None, amax=None,
            counters=None, skip=None, ring=None, workspace=None, fmt=0, fmt_turned=0, flags=0, nan_policy=0):
        j = Job(x.shape[0], x.shape[1], x.stride(0), pointer(x), pointer(out), pointer(turned), TYPES[x.dtype], fmt, fmt_turned, source, (I64 * 2)(*block),
                (I64 * 2)(*block_turned), pointer(scale_in), pointer(scale_inv), pointer(scale_inv_turned), pointer(amax), pointer(counters), pointer(skip),
                pointer(ring), pointer(self.workspace if workspace is None else workspace), 0 if ring is None else ring.numel() // 4 - 16, flags, nan_policy, 0)
        return j

    def run(self, *jobs):
        array = (Job * len(jobs))(*jobs)
        if self.c.bench_quantize(array, I64(len(jobs)), ctypes.c_uint64(4096), self.stream()):
            raise SystemExit("a call failed")

    def ring(self, hist_len, amax=0.0, fmt=0):
        memory = torch.zeros(64 + 4 * hist_len, dtype=torch.uint8, device="cuda")
        j = Job(ring=memory.data_ptr(), hist_len=hist_len, format=fmt)
        self.c.bench_ring_init(ctypes.byref(j), ctypes.c_float(amax), self.stream())
        return memory

    def scale(self, amax):
        return self.c.bench_scale(amax, 0, 0)


# ---- checks -----------------------------------------------------------------------------------------------------------------

BAD = []
DIRTY = True


def check(what, good):
    if not good:
        BAD.append(what)
    print(f"{'ok   ' if good else 'WRONG'} {what}", flush=True)


def codes(x, scale):
    """e4m3fn by torch; the products are f32."""
    y = (x.float() * scale).clamp(-448, 448)
    return y.to(torch.float8_e4m3fn).view(torch.uint8)


def ring_state(ring):
    f, i = ring.cpu().view(torch.float32), ring.cpu().view(torch.int32)
    return {"index": i[7].item(), "refused": i[8].item(), "staged": f[9].item(), "scale": f[10].item(), "history": f[16:].tolist()}


def empty_codes(*shape):
    return torch.full(shape, 0x5A, dtype=torch.uint8, device="cuda")


def check_granularities(lib, dtype, rows, columns):
    torch.manual_seed(rows + columns)
    x = (torch.randn(rows, columns, device="cuda") * torch.exp(torch.randn(rows, 1, device="cuda"))).to(dtype)
    out, turned, amax = empty_codes(rows, columns), empty_codes(columns, rows), torch.zeros(1, device="cuda")
    real = x.abs().max().float().item()
    name = f"{str(dtype)[6:]} {rows}x{columns}"
    blocks = [(0, 0), (1, 0), (1, 128), (128, 128), (1, 32), (0, 1)]
    for b in blocks:
        high, wide = b[0] or rows, b[1] or columns
        padded = torch.nn.functional.pad(x.abs().float(), (0, -columns % wide, 0, -rows % high))
        most = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide).amax((1, 3))
        scale = torch.tensor([lib.scale(v) for v in most.flatten().cpu().tolist()], device="cuda").view_as(most)
        full = scale.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:rows, :columns]
        scale_inv = torch.zeros_like(scale)
        out.fill_(0x5A), amax.fill_(-1)
        lib.run(lib.job(x, out, source=CURRENT, block=b, scale_inv=scale_inv, amax=amax))
        check(f"{name} current {b} row", torch.equal(out, codes(x, full)) and torch.equal(scale_inv, 1 / scale) and amax.item() == real)
        t = (b[1], b[0]) if b[0] == 1 else b
        if b == (0, 1):
            continue
        th, tw = t[0] or rows, t[1] or columns
        tp = torch.nn.functional.pad(x.abs().float(), (0, -columns % tw, 0, -rows % th))
        tm = tp.view(tp.shape[0] // th, th, tp.shape[1] // tw, tw).amax((1, 3))
        ts = torch.tensor([lib.scale(v) for v in tm.flatten().cpu().tolist()], device="cuda").view_as(tm)
        tf = ts.repeat_interleave(th, 0).repeat_interleave(tw, 1)[:rows, :columns]
        out.fill_(0x5A), turned.fill_(0x5A), amax.fill_(-1)
        lib.run(lib.job(x, out, turned, source=CURRENT, block=b, block_turned=t, amax=amax))
        check(f"{name} current {b} dual", torch.equal(out, codes(x, full)) and torch.equal(turned, codes(x, tf).T) and amax.item() == real)
    scale_in = torch.tensor([37.5], device="cuda")
    out.fill_(0x5A), turned.fill_(0x5A)
    lib.run(lib.job(x, out, turned, scale_in=scale_in, amax=amax))
    check(f"{name} static dual", torch.equal(out, codes(x, 37.5)) and torch.equal(turned, codes(x, 37.5).T) and amax.item() == real)


def check_rings(lib):
    x = torch.randn(8192, 256, device="cuda", dtype=torch.bfloat16)
    x[8190, 100] = 1000
    for sides in ("row", "turned", "dual"):
        ring, amax = lib.ring(16, 4.0), torch.zeros(1, device="cuda")
        out, turned = empty_codes(8192, 256), empty_codes(256, 8192)
        for _ in range(5):
            lib.run(lib.job(x, out if sides != "turned" else None, turned if sides != "row" else None, source=RING, ring=ring, amax=amax))
        s = ring_state(ring)
        check(f"tall tensor, {sides}: one fold a call", s["index"] == 5 and s["history"] == [1000.0] * 5 + [0.0] * 11 and amax.item() == 1000 and s["scale"] == lib.scale(1000.0))
    ring, out = lib.ring(1024), empty_codes(8192, 256)
    for bad, refused in ((float("nan"), 1), (float("inf"), 2)):
        y = x.clone()
        y[77, 7] = bad
        before = ring_state(ring)
        lib.run(lib.job(y, out, source=RING, ring=ring))
        s = ring_state(ring)
        check(f"{bad} in a ring's tensor", s["refused"] == refused and s["index"] == before["index"] and s["scale"] == before["scale"])
    lib.run(lib.job(torch.zeros_like(x), out, source=RING, ring=ring))
    check("zeros: the scale stays, the index moves", ring_state(ring)["scale"] == 1 and ring_state(ring)["index"] == 1)
    skip, before = torch.ones(1, dtype=torch.int32, device="cuda"), ring_state(ring)
    out.fill_(0x5A)
    lib.run(lib.job(x, out, source=RING, ring=ring, skip=skip))
    check("a skipped call", bool((out == 0x5A).all()) and ring_state(ring) == before)
    counters = torch.zeros(4, dtype=torch.int64, device="cuda")
    ring[0] ^= 1
    lib.run(lib.job(x, out, source=RING, ring=ring, counters=counters))
    check("a ring that is none", bool((out == 0x5A).all()) and counters.tolist() == [0, 0, 0, 1])
    lib.run(lib.job(x, out, source=STATIC, scale_in=torch.zeros(1, device="cuda"), counters=counters, amax=torch.zeros(1, device="cuda")))
    check("a static scale of 0", bool((out == 0x5A).all()) and counters.tolist() == [0, 0, 0, 2])
    y = x.clone()
    y[5, 5], y[6, 6] = float("nan"), float("-inf")
    lib.run(lib.job(y, out, source=STATIC, scale_in=torch.ones(1, device="cuda"), counters=counters))
    check("counters", counters.tolist() == [1, 1, int(((x.float().abs() > 464) & ~y.isnan() & ~y.isinf()).sum()), 2])
    rings = [lib.ring(16) for _ in range(20)]
    lib.run(*[lib.job(x[i * 64:i * 64 + 64], out[i * 64:i * 64 + 64], source=RING, ring=r) for i, r in enumerate(rings)])
    check("20 rings in one call", all(ring_state(r)["history"][0] == x[i * 64:i * 64 + 64].abs().max().item() for i, r in enumerate(rings)))


def check_graph(lib):
    x = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    out, turned, ring = empty_codes(1024, 1024), empty_codes(1024, 1024), lib.ring(4)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lib.run(lib.job(x, out, turned, source=RING, ring=ring))
    amaxes = []
    for n in range(7):
        x.copy_(torch.randn(1024, 1024, device="cuda") * 2 ** n)
        scale = ring_state(ring)["scale"]
        graph.replay()
        torch.cuda.synchronize()
        amaxes.append(x.abs().max().float().item())
        s = ring_state(ring)
        if not (torch.equal(out, codes(x, scale)) and torch.equal(turned, codes(x, scale).T) and s["index"] == (n + 1) % 4 and s["scale"] == lib.scale(max(amaxes[-4:]))):
            return check("ring in a replayed graph", False)
    check("ring in a replayed graph", True)
    streams = [torch.cuda.Stream() for _ in range(2)]
    rings, spaces = [lib.ring(8) for _ in range(2)], [lib.new_workspace() for _ in range(2)]
    xs = [torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) * (k + 1) for k in range(2)]
    outs = [empty_codes(2048, 2048) for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(100):
        for k in range(2):
            with torch.cuda.stream(streams[k]):
                lib.run(lib.job(xs[k], outs[k], source=RING, ring=rings[k], workspace=spaces[k]))
    torch.cuda.synchronize()
    good = True
    for k in range(2):
        amax = xs[k].abs().max().float().item()
        s = ring_state(rings[k])
        good = good and s["index"] == 100 % 8 and s["history"] == [amax] * 8 and torch.equal(outs[k], codes(xs[k], lib.scale(amax))) and not spaces[k][64:].any()
    check("two rings on two streams, 100 calls each", good)


# ---- times ------------------------------------------------------------------------------------------------------------------

def medians_us(functions, rounds):
    """Of several functions by turns, each with a cold second cache: full of lines that were only read (--flush read), or that are still to be written back."""
    flush = torch.empty(64 << 20, dtype=torch.float32, device="cuda")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = [[] for _ in functions]
    for function in functions:
        function()
    for turn in range(rounds):
        for i in range(len(functions)):
            i = (i + turn) % len(functions)
            flush.fill_(turn) if DIRTY else flush.amax()
            begin.record()
            functions[i]()
            end.record()
            end.synchronize()
            times[i].append(begin.elapsed_time(end) * 1e3)
    return [statistics.median(t) for t in times]


def copy_of(byte_count):
    """A device copy that moves this many bytes, reading and writing counted."""
    a = torch.empty(byte_count // 2, dtype=torch.uint8, device="cuda").random_()
    b = torch.empty_like(a)
    return lambda: b.copy_(a)


def times(lib, rounds):
    n = 8192
    x = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    out, turned = empty_codes(n, n), empty_codes(n, n)
    amax, one, ring = torch.zeros(1, device="cuda"), torch.ones(1, device="cuda"), lib.ring(16)
    scales, scales_t = torch.empty(n, 64, device="cuda"), torch.empty(64, n, device="cuda")
    small, small_out = torch.randn(512, 2048, device="cuda", dtype=torch.bfloat16), empty_codes(512, 2048)
    back, numbers = torch.empty_like(x), x.float()
    single, dual = 3 * n * n, 4 * n * n
    stream = torch.cuda.current_stream
    calls = [
        ("static row", single, 1.05, lib.job(x, out, scale_in=one)),
        ("static row, amax", single, 1.05, lib.job(x, out, scale_in=one, amax=amax)),
        ("ring row, amax", single, 1.05, lib.job(x, out, source=RING, ring=ring, amax=amax)),
        ("ring transposed", single, 1.08, lib.job(x, None, turned, source=RING, ring=ring, amax=amax)),
        ("ring dual, amax", dual, 1.10, lib.job(x, out, turned, source=RING, ring=ring, amax=amax)),
        ("current rows", single, 1.06, lib.job(x, out, source=CURRENT, block=(1, 0), scale_inv=scales)),
        ("current 1x128", single, 1.06, lib.job(x, out, source=CURRENT, block=(1, 128), scale_inv=scales)),
        ("current MX 1x32", single, 0, lib.job(x, out, source=CURRENT, block=(1, 32))),
        ("dual 1x128 + 128x1", dual, 1.15, lib.job(x, out, turned, source=CURRENT, block=(1, 128), block_turned=(128, 1), scale_inv=scales, scale_inv_turned=scales_t)),
        ("dual 128x128", dual, 0, lib.job(x, out, turned, source=CURRENT, block=(128, 128), block_turned=(128, 128), scale_inv=scales, scale_inv_turned=scales_t)),
        ("current tensor row", single, 0, lib.job(x, out, source=CURRENT, scale_inv=one)),
        ("current tensor dual", dual, 0, lib.job(x, out, turned, source=CURRENT, scale_inv=one)),
        ("columns", single, 0, lib.job(x, out, source=CURRENT, block=(0, 1))),
        ("amax alone", 2 * n * n, 0, lib.job(x, source=CURRENT, amax=amax)),
        ("f32 static row, amax", 5 * n * n, 0, lib.job(numbers, out, scale_in=one, amax=amax)),
        ("f32 ring dual, amax", 6 * n * n, 0, lib.job(numbers, out, turned, source=RING, ring=ring, amax=amax)),
        ("512x2048 static row", 3 << 20, 1.2, lib.job(small, small_out, scale_in=one)),
        ("512x2048 ring row, amax", 3 << 20, 1.2, lib.job(small, small_out, source=RING, ring=ring, amax=amax)),
    ]
    print(f"{'':26} {'us':>8} {'copy':>8} {'ratio':>7}  bar   TB/s")
    for name, moved, bar, job in calls:
        array = (Job * 1)(job)
        copy = copy_of(moved)

        def call():
            lib.c.bench_quantize(array, I64(1), ctypes.c_uint64(4096), P(stream().cuda_stream))
        us, peer = medians_us([call, copy], rounds)
        print(f"{name:26} {us:8.1f} {peer:8.1f} {us / peer:7.3f}  {bar or '':4}  {moved / us * 1e-6:.2f}", flush=True)
    p = ctypes.c_void_p

    def decode():
        lib.c.bench_dequantize(p(out.data_ptr()), 0, p(back.data_ptr()), 2, I64(n), I64(n), p(one.data_ptr()), P(stream().cuda_stream))

    def turn():
        lib.c.bench_transpose(p(out.data_ptr()), p(turned.data_ptr()), I64(n), I64(n), P(stream().cuda_stream))
    for name, moved, call in (("dequantize", single, decode), ("transpose", 2 * n * n, turn)):
        us, peer = medians_us([call, copy_of(moved)], rounds)
        print(f"{name:26} {us:8.1f} {peer:8.1f} {us / peer:7.3f}        {moved / us * 1e-6:.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("folder")
    parser.add_argument("--samples", type=int, default=28, help="2^N patterns of f32")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--flush", choices=("fill", "read"), default="fill")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--no-times", action="store_true")
    a = parser.parse_args()
    global DIRTY
    DIRTY = a.flush == "fill"
    torch.cuda.init()
    lib = Library(a.library, a.folder)
    if not a.no_checks:
        check("codes of all 16-bit and sampled f32 numbers", lib.c.bench_conversions(a.samples) == 0)
        for dtype in TYPES:
            for rows, columns in ((1024, 2048), (300, 1000), (129, 257)):
                check_granularities(lib, dtype, rows, columns)
        check_rings(lib)
        check_graph(lib)
        check("the workspace is as it was", not lib.workspace[64:].any())
    if not a.no_times:
        times(lib, a.rounds)
    print("WRONG: " + "; ".join(BAD) if BAD else "all right")


if __name__ == "__main__":
    main()
