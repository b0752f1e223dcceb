# SPDX-License-Identifier: Apache-2.0
"""The FP8 products of the CUDA plugin beside torch._scaled_mm in one run: random problems and errors against fp64, then rates.

    python3 benchmarks/cuda_fp8_gemm.py LIBRARY CUBINS [--check SECONDS] [--impl sm90,cublaslt,f16,portable] [--cells quick|all|none]
        [--other LIBRARY:CUBINS ..]

LIBRARY is built from benchmarks/cuda_fp8_gemm.cpp, CUBINS a folder of cubins of the kernels (docs/kernels/NOTES-fp8-gemm.md).
Bursts of all contenders take turns, so that each finds the same temperature and clock.
"""
import argparse
import ctypes
import random
import statistics
import time

import torch

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
TYPES = FLOATS + FORMATS
MAGIC = 0x57465143


class Call(ctypes.Structure):
    _fields_ = [("batch", ctypes.c_int64), ("m", ctypes.c_int64), ("n", ctypes.c_int64), ("k", ctypes.c_int64),
                ("data", ctypes.c_void_p * 4), ("stride", ctypes.c_int64 * 3 * 4), ("type", ctypes.c_int32 * 4),
                ("scale", ctypes.c_void_p * 2), ("scale_stride", ctypes.c_int64 * 3 * 2), ("block", ctypes.c_int64 * 2 * 2),
                ("bias", ctypes.c_void_p), ("bias_stride", ctypes.c_int64), ("bias_type", ctypes.c_int32), ("accumulate", ctypes.c_int32),
                ("d_scale", ctypes.c_void_p), ("d_amax", ctypes.c_void_p), ("alpha", ctypes.c_double), ("beta", ctypes.c_double),
                ("workspace", ctypes.c_void_p), ("workspace_bytes", ctypes.c_uint64)]


class Gemm:
    """One library with its cubins."""

    def __init__(self, library, folder, tell=False):
        self.folder = folder
        self.library = ctypes.CDLL(library)
        self.library.bench_last_kernel.restype = ctypes.c_char_p
        self.library.bench_load(folder.encode(), int(tell))
        self.workspace = torch.zeros(1 << 12, dtype=torch.int32, device="cuda")
        self.workspace[0] = MAGIC

    def call(self, a, b, d, scale_a=None, scale_b=None, block_a=(0, 0), block_b=(0, 0), bias=None, c=None, fast=False, d_scale=None, d_amax=None,
             alpha=1.0, beta=0.0):
        """a [batch, m, k], b [batch, n, k]; scales [batch, block rows, block columns]. Keeps nothing alive."""
        x = Call(d.shape[0], d.shape[1], d.shape[2], a.shape[2])
        for i, t in enumerate((a, b, c, d)):
            if t is None:
                continue
            x.data[i], x.type[i] = t.data_ptr(), TYPES.index(t.dtype)
            for j in range(3):
                x.stride[i][j] = t.stride(j)
        for i, (t, block) in enumerate(((scale_a, block_a), (scale_b, block_b))):
            if t is None:
                continue
            x.scale[i] = t.data_ptr()
            for j in range(3):
                x.scale_stride[i][j] = t.stride(j)
            x.block[i][0], x.block[i][1] = block
        if bias is not None:
            x.bias, x.bias_stride, x.bias_type = bias.data_ptr(), bias.stride(0), TYPES.index(bias.dtype)
        x.accumulate, x.alpha, x.beta = int(fast), alpha, beta
        x.d_scale = d_scale.data_ptr() if d_scale is not None else None
        x.d_amax = d_amax.data_ptr() if d_amax is not None else None
        x.workspace, x.workspace_bytes = self.workspace.data_ptr(), self.workspace.numel() * 4
        return x

    def run(self, impl, x, probe=True):
        """"" or why it was declined."""
        reason = ctypes.create_string_buffer(200)
        status = self.library.bench_gemm(impl.encode(), ctypes.byref(x), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), reason,
                                         ctypes.c_uint64(200 if probe else 0))
        if status >= 2:
            raise RuntimeError(f"{impl}: status {status}")
        return reason.value.decode() if status else ""


def blocks_of(rows, columns, block):
    return (-(-rows // (block[0] or rows or 1)), -(-columns // (block[1] or columns or 1)))


def spread(scale, rows, columns, block):
    """Scales of blocks, one for each element."""
    return scale.repeat_interleave(block[0] or max(rows, 1), -2)[..., :rows, :].repeat_interleave(block[1] or max(columns, 1), -1)[..., :columns]


def exact(a, b, scale_a, scale_b, block_a, block_b, alpha, beta, c, bias, absolute=False):
    change = torch.abs if absolute else (lambda t: t)
    x, y = a.float().double(), b.float().double()
    if scale_a is not None:
        x = x * spread(scale_a.double(), a.shape[1], a.shape[2], block_a)
    if scale_b is not None:
        y = y * spread(scale_b.double(), b.shape[1], b.shape[2], block_b)
    out = abs(alpha) * (change(x) @ change(y).transpose(1, 2)) if absolute else alpha * (x @ y.transpose(1, 2))
    if c is not None:
        out = out + change(beta * c.double())
    if bias is not None:
        out = out + change(bias.double())
    return out


def rms(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


# ------------------------------------------------------------------------------------------------------------------------ random problems

def random_codes(r, rows, k, batch, dtype, wild):
    shared = r.random() < 0.2
    pad = r.choice([0, 0, 16, 48]) + (-k) % 16 if not wild else r.randrange(5)
    memory = (torch.randn(1 if shared else batch, rows, k + pad, device="cuda") * 8).clamp(-200, 200).to(dtype).view(torch.uint8)
    if wild and r.random() < 0.5:
        memory = memory.transpose(1, 2).contiguous().transpose(1, 2)
    view = memory[:, :, :k].view(dtype)
    return view.expand(batch, rows, k) if shared else view


def random_scale(r, rows, k, batch, block):
    count = blocks_of(rows, k, block)
    if r.random() < 0.5:
        scale = torch.rand(batch, count[1], -(-count[0] // 4) * 4, device="cuda").transpose(1, 2)[:, :count[0]]
    else:
        scale = torch.rand(batch, *count, device="cuda")
    return scale * 0.9 + 0.1 if r.random() < 0.3 else scale.add_(0.1)


def one_random(gemm, impl, r):
    """None when it was declined, else "" or what is wrong."""
    wild = impl in ("portable", "f16") or r.random() < 0.1
    batch, m, n = r.choice([1, 1, 1, 2, 3]), r.choice([1, 7, 16, 64, 100, 128, 200, 256, 300, 700]), r.choice([1, 8, 33, 64, 128, 160, 256, 520, 1000])
    k = r.choice([0, 1, 15, 16, 32, 100, 128, 144, 256, 384, 1000, 1024, 2048])
    if r.random() < 0.05:
        m = 0
    formats = FORMATS if wild else FORMATS[:2]
    a, b = random_codes(r, m, k, batch, r.choice(formats), wild), random_codes(r, n, k, batch, r.choice(formats), wild)
    block_a, block_b = r.choice([(0, 0), (1, 0), (1, 128)]), r.choice([(0, 0), (1, 0), (1, 128), (128, 128)])
    scale_a = random_scale(r, m, k, batch, block_a) if r.random() < 0.8 else None
    scale_b = random_scale(r, n, k, batch, block_b) if r.random() < 0.8 else None
    d_type = r.choice(FLOATS + FORMATS[:2])
    pad = r.choice([0, 0, 3, 8])
    memory = torch.full((batch, m + 1, n + pad), 77.0, device="cuda").to(d_type)
    d = memory[:, :m, :n]
    c = torch.randn(batch, m, n, device="cuda").to(r.choice(FLOATS)) if r.random() < 0.3 else None
    if c is not None and d_type in FLOATS and r.random() < 0.5:
        c = c.to(d_type)
    bias = torch.randn(n, device="cuda").to(r.choice([d_type] * 3 + FLOATS) if d_type in FLOATS else r.choice(FLOATS)) if r.random() < 0.5 else None
    d_scale = torch.rand(1, device="cuda") * 0.01 if d_type not in FLOATS else None
    d_amax = torch.full((1,), -1.0, device="cuda") if r.random() < 0.3 else None
    alpha, beta, fast = r.choice([1.0, 1.0, -0.5]), r.choice([1.0, 0.3]) if c is not None else 0.0, r.random() < 0.3
    x = gemm.call(a, b, d, scale_a, scale_b, block_a, block_b, bias, c, fast, d_scale, d_amax, alpha, beta)
    what = f"batch {batch} m {m} n {n} k {k} {a.dtype} {b.dtype} -> {d_type} blocks {block_a} {block_b} fast {fast}"
    shape = lambda t: "none" if t is None else f"{t.dtype} {list(t.shape)} by {list(t.stride())}"
    details = f"a {shape(a)} b {shape(b)} c {shape(c)} d {shape(d)} bias {shape(bias)} scales {shape(scale_a)}, {shape(scale_b)} alpha {alpha} beta {beta}"
    try:
        told = gemm.run(impl, x)
    except RuntimeError as error:
        return f"{error}: {what} {details}"
    if told:
        return None
    torch.cuda.synchronize()
    kernel = gemm.library.bench_last_kernel().decode()
    if impl == "cublaslt" and kernel and one_random.refused < 10:
        one_random.refused += 1
        print(f"cublasLtMatmul refused, {kernel} ran: {what} {details}", flush=True)
    what = f"{impl} {kernel} {what}"
    if int(gemm.workspace[0]) != MAGIC or int(gemm.workspace.count_nonzero()) != 1:
        return what + ": the workspace has changed"
    if (memory[:, m:].float() != memory[0, m, 0].float()).any() or (memory[..., n:].float() != memory[0, m, 0].float()).any():
        return what + ": wrote beside d"
    args = (a, b, scale_a, scale_b, block_a, block_b, alpha, beta, c, bias)
    want, size = exact(*args), exact(*args, absolute=True)
    got = d.float().double()
    # Of the sum of magnitudes; the FP8 unit cuts each sum of 32 products to some 14 bits.
    tolerance = {"portable": 5e-6, "f16": 1e-5}.get(impl, 4e-3 if fast else 6e-4) * size + 1e-6
    if d_type not in FLOATS:
        top = torch.finfo(d_type).max
        want, tolerance = (want * d_scale.double()).clamp(-top, top), tolerance * d_scale.double()
    relative = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float8_e4m3fn: 0.08, torch.float8_e5m2: 0.15}[d_type]
    smallest = {torch.float8_e4m3fn: 2e-3, torch.float8_e5m2: 2e-5}.get(d_type, 1e-6)
    bad = ~((got - want).abs() <= tolerance + relative * want.abs() + smallest)
    if bad.any():
        at = bad.nonzero()[0].tolist()
        return f"{what}: {int(bad.sum())} wrong, first {at}: {got[tuple(at)].item():.6g}, wanted {want[tuple(at)].item():.6g}"
    if d_amax is not None:
        largest = exact(*args).abs().max().item() if m else 0.0
        if not abs(d_amax.item() - largest) <= 4e-3 * largest + 1e-6:
            return f"{what}: amax {d_amax.item()}, wanted {largest}"
    return ""


one_random.refused = 0


def check(gemm, impl, seconds):
    r, end, count, declined, wrong = random.Random(1), time.time() + seconds, 0, 0, 0
    torch.manual_seed(1)
    while time.time() < end:
        text = one_random(gemm, impl, r)
        count += 1
        declined += text is None
        if text:
            wrong += 1
            if wrong <= 10:
                print("WRONG", text, flush=True)
    print(f"{impl}: {count} random problems, {declined} declined, {wrong} wrong", flush=True)


def accuracy(gemm, impls):
    """Relative RMS against fp64, f32 out."""
    for k in (1024, 4096, 16384):
        a, b = (torch.randn(1, n, k, device="cuda").to(torch.float8_e4m3fn) for n in (512, 768))
        want = exact(a, b, None, None, (0, 0), (0, 0), 1.0, 0.0, None, None)
        line = f"K={k}"
        for impl in impls:
            for fast in (False, True):
                d = torch.full((1, 512, 768), torch.nan, device="cuda")
                told = gemm.run(impl, gemm.call(a, b, d, fast=fast))
                line += f" | {impl} {'fast' if fast else 'promoted'} " + (told or f"{rms(d, want):.2e}")
        print(line, flush=True)
    a[0, 3, 5] = torch.tensor([0x7f], dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)[0]
    for impl in impls:
        d = torch.zeros(1, 512, 768, device="cuda")
        gemm.run(impl, gemm.call(a, b, d))
        rows = d.isnan().all(2)[0].nonzero().flatten().tolist()
        print(f"{impl}: a NaN in row 3 is seen in rows {rows}, {int(d.isnan().sum())} elements")


# ------------------------------------------------------------------------------------------------------------------------------- rates

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


CELLS = [(8192, 8192, 8192), (4096, 4096, 4096), (2048, 8192, 4096), (16384, 4096, 14336), (1024, 8192, 8192), (128, 8192, 8192), (64, 8192, 8192),
         (16, 8192, 8192), (1, 8192, 8192)]
QUICK = [CELLS[0], CELLS[1], CELLS[4], CELLS[6]]


def scales_for(m, n, k):
    """name: scales and blocks of a and of b."""
    one = lambda rows, columns: torch.rand(1, rows, columns, device="cuda") + 0.5
    by_m = lambda rows: (torch.rand(1, k // 128, -(-rows // 4) * 4, device="cuda") + 0.5).transpose(1, 2)[:, :rows]
    squares = torch.rand(1, -(-n // 128), -(-(k // 128) // 4) * 4, device="cuda")[:, :, :k // 128] + 0.5
    return {"tensor": (one(1, 1), one(1, 1), (0, 0), (0, 0)), "outer": (one(m, 1), one(n, 1), (1, 0), (1, 0)),
            "1x128x128x128": (by_m(m), squares, (1, 128), (128, 128)), "1x128x1x128": (by_m(m), by_m(n), (1, 128), (1, 128))}


def torch_calls(a, b, scales):
    """torch._scaled_mm of what of it this torch has."""
    out, a, b = {}, a[0], b[0].t()
    (sa, sb, _, _), (ra, rb, _, _), (ba, bb, _, _), (ca, cb, _, _) = scales.values()
    tries = {"torch tensor fast": (sa.view(1), sb.view(1), True), "torch tensor": (sa.view(1), sb.view(1), False), "torch outer fast": (ra[0], rb[0].t(), True),
             "torch outer": (ra[0], rb[0].t(), False), "torch 1x128x128x128": (ba[0], bb[0].t(), False), "torch 1x128x1x128": (ca[0], cb[0].t(), False)}
    for name, (x, y, fast) in tries.items():
        def call(x=x, y=y, fast=fast):
            return torch._scaled_mm(a, b, scale_a=x, scale_b=y, out_dtype=torch.bfloat16, use_fast_accum=fast)
        try:
            call()
            out[name] = call
        except Exception as error:
            if not torch_calls.told.get(name):
                print(f"{name}: {str(error).splitlines()[0][:150]}")
            torch_calls.told[name] = True
    return out


torch_calls.told = {}


def one_cell(gemms, impls, cell):
    m, n, k = cell
    a, b = (torch.randn(1, rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
    scales = scales_for(m, n, k)
    calls = torch_calls(a, b, scales)
    keep, wrong = [], []
    rows = torch.randint(0, m, (min(m, 64),), device="cuda")
    for gemm in gemms:
        for impl in impls:
            for name, (sa, sb, block_a, block_b) in scales.items():
                for fast in (True, False) if name == "tensor" else (False,):
                    d = torch.full((1, m, n), torch.nan, device="cuda", dtype=torch.bfloat16)
                    x = gemm.call(a, b, d, sa, sb, block_a, block_b, fast=fast)
                    told = gemm.run(impl, x)
                    label = f"{impl}{'' if gemm is gemms[0] else ' ' + gemm.folder.rstrip('/').split('/')[-1]} {name}{' fast' if fast else ''}"
                    if told:
                        if m == 8192:
                            print(f"{label}: {told}")
                        continue
                    pick = lambda s: s[:, rows] if s.shape[1] == m and m > 1 and s.shape[1] != 1 else s
                    want = exact(a[:, rows], b, pick(sa), sb, block_a, block_b, 1.0, 0.0, None, None)
                    error = rms(d[:, rows], want)
                    if not error < 4e-3:
                        wrong.append(f"{label} WRONG {error:.2e}")
                    keep.append((d, x))
                    calls[label] = lambda gemm=gemm, impl=impl, x=x: gemm.run(impl, x, probe=False)
    times = dict(zip(calls, medians_ms(list(calls.values()))))
    print(f"--- {m} x {n} x {k}, bf16 out")
    for name, ms in times.items():
        fast = " fast" if "fast" in name else ""
        kind = "outer" if "outer" in name else "tensor"
        peer = times.get(f"torch {kind}{fast}", times.get("torch tensor"))
        print(f"{name:28} {ms * 1e3:9.1f} us {2 * m * n * k / ms * 1e-9:7.0f} TFLOP/s" + (f"  {peer / ms:.3f} of torch {kind}{fast}" if peer else ""), flush=True)
    for text in wrong:
        print(text)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("folder")
    parser.add_argument("--check", type=float, default=20)
    parser.add_argument("--impl", default="sm90,cublaslt")
    parser.add_argument("--cells", default="quick")
    parser.add_argument("--other", nargs="*", default=[], metavar="LIBRARY:CUBINS", help="other versions, timed only")
    a = parser.parse_args()
    gemm, impls = Gemm(a.library, a.folder, True), a.impl.split(",")
    print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name())
    for impl in impls:
        if a.check > 0:
            check(gemm, impl, a.check)
    accuracy(gemm, impls)
    gemms = [gemm] + [Gemm(*other.split(":")) for other in a.other]
    for cell in QUICK if a.cells == "quick" else CELLS if a.cells == "all" else []:
        one_cell(gemms, impls, cell)


if __name__ == "__main__":
    main()
