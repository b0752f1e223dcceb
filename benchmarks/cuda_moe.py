# SPDX-License-Identifier: Apache-2.0
"""The mixtures of experts of the CUDA plugin in one run: errors against fp64 with dequantized weights, then times beside torch's grouped bf16 product
and a copy.

    python3 benchmarks/cuda_moe.py LIBRARY CUBINS [--tier 90] [--impl sm90,sm80,portable] [--formats Q2_0,..] [--tokens 1,256,2048,8192] [--no-check]

LIBRARY is built from benchmarks/cuda_moe.cpp, CUBINS a folder of cubins of the kernels (docs/kernels/NOTES-moe.md).
"""
import argparse
import ctypes
import statistics

import torch

# name: CQSA_QUANT_*, elements and bytes of a block, where its f16 scales are
FORMATS = {"F32": (1, 1, 4, ()), "F16": (2, 1, 2, ()), "BF16": (3, 1, 2, ()), "Q2_0": (5, 64, 18, (0,)), "Q4_0": (6, 32, 18, (0,)), "Q4_1": (7, 32, 20, (0, 2)),
           "Q5_0": (8, 32, 22, (0,)), "Q8_0": (10, 32, 34, (0,)), "Q2_K": (11, 256, 84, (80, 82)), "Q3_K": (12, 256, 110, (108,)), "Q4_K": (13, 256, 144, (0, 2)),
           "Q5_K": (14, 256, 176, (0, 2)), "Q6_K": (15, 256, 210, (208,)), "IQ1_S": (16, 256, 50, (0,)), "IQ2_XXS": (18, 256, 66, (0,)),
           "IQ2_XS": (19, 256, 74, (0,)), "IQ2_S": (20, 256, 82, (0,)), "IQ3_XXS": (21, 256, 98, (0,)), "IQ3_S": (22, 256, 110, (0,)),
           "IQ4_NL": (23, 32, 18, (0,)), "IQ4_XS": (24, 256, 136, (0,)), "TQ2_0": (26, 256, 66, (64,))}


class Call(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int64) for n in ("tokens", "topk", "hidden", "inter", "experts")] + [(n, ctypes.c_void_p) for n in ("x", "ids", "weights", "out")] + [
        ("matrix", ctypes.c_void_p * 3), ("lists", ctypes.c_void_p * 3), ("format", ctypes.c_int32 * 3), ("row_bytes", ctypes.c_int32 * 3)] + [
        (n, ctypes.c_int32) for n in ("x_type", "out_type", "layout", "activation", "precision", "output", "flags", "reserved")] + [
        ("workspace", ctypes.c_void_p), ("workspace_bytes", ctypes.c_uint64)]


TYPES = [torch.float32, torch.float16, torch.bfloat16]


class Matrix:
    """[experts, rows, elements] of random blocks whose elements have an RMS of 1 / sqrt(elements)."""

    def __init__(self, library, name, experts, rows, elements):
        self.library, self.name, self.experts, self.rows, self.elements = library, name, experts, rows, elements
        number, block, size, scales = FORMATS[name]
        self.format, self.row_bytes = number, elements // block * size
        if block == 1:
            self.data = (torch.randn(experts, rows, elements, device="cuda") / elements**0.5).to(TYPES[number - 1]).view(torch.uint8)
            return
        self.data = torch.randint(0, 256, (experts, rows, elements // block, size), dtype=torch.uint8, device="cuda")
        self.put(scales, 1.0)
        unit = self.expert(0).pow(2).mean().sqrt().item()
        self.put(scales, 1.0 / unit / elements**0.5)

    def put(self, scales, value):
        for at in scales:
            half = (torch.rand(self.data.shape[:3], device="cuda") + 0.5).mul_(value).half()
            self.data[..., at:at + 2] = half.unsqueeze(-1).view(torch.uint8)

    def expert(self, e):
        out = torch.empty(self.rows, self.elements, device="cuda")
        piece = self.data[e].contiguous()
        self.library.bench_dequantize(self.format, ctypes.c_void_p(piece.data_ptr()), ctypes.c_int64(self.rows), ctypes.c_int64(self.elements),
                                      ctypes.c_int64(self.row_bytes), ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        return out


class Layer:
    def __init__(self, library, experts, hidden, inter, gate, down):
        self.library, self.experts, self.hidden, self.inter = library, experts, hidden, inter
        self.w = [Matrix(library, gate, experts, inter, hidden), Matrix(library, gate, experts, inter, hidden), Matrix(library, down, experts, hidden, inter)]
        self.name = gate if gate == down else f"{gate}+{down}"
        self.workspace = None

    def bytes_of_expert(self):
        return sum(m.rows * m.row_bytes for m in self.w)

    def call(self, impl, x, ids, weights, out, precision, flags=0):
        """None when it declines."""
        c = Call(x.shape[0], ids.shape[1], self.hidden, self.inter, self.experts, x.data_ptr(), ids.data_ptr(), weights.data_ptr(), out.data_ptr())
        for i, m in enumerate(self.w):
            c.matrix[i], c.format[i], c.row_bytes[i] = m.data.data_ptr(), m.format, m.row_bytes
        c.x_type, c.out_type, c.precision, c.flags = TYPES.index(x.dtype), TYPES.index(out.dtype), precision, flags
        reason = ctypes.create_string_buffer(200)
        wanted = self.library.bench_workspace(impl.encode(), ctypes.byref(c), reason, ctypes.c_uint64(200))
        if not wanted:
            return None
        if self.workspace is None or self.workspace.numel() < wanted:
            self.workspace = torch.full((wanted,), 255, dtype=torch.uint8, device="cuda")
        c.workspace, c.workspace_bytes = self.workspace.data_ptr(), wanted
        return c

    def run(self, impl, c):
        status = self.library.bench_moe(impl.encode(), ctypes.byref(c), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        if status:
            raise RuntimeError(f"{impl}: status {status}")


def rounded_to_q8(x):
    groups = x.view(*x.shape[:-1], -1, 32)
    a = groups.abs().amax(-1, keepdim=True)
    return torch.where(a > 0, torch.round(groups * (127 / a)) * (a / 127), torch.zeros_like(groups)).view(x.shape)


def exact(layer, x, ids, weights, by_int8=False):
    """fp64, by expert."""
    take = rounded_to_q8 if by_int8 else (lambda t: t)
    x = x.double()
    out = torch.zeros(x.shape[0], layer.hidden, dtype=torch.float64, device="cuda")
    for e in ids.unique().tolist():
        gate, up, down = (m.expert(e).double() for m in layer.w)
        at = (ids == e).nonzero()
        rows = take(x[at[:, 0]])
        g, u = rows @ gate.t(), rows @ up.t()
        h = take(g * torch.sigmoid(g) * u)
        out.index_add_(0, at[:, 0], (h @ down.t()) * weights[at[:, 0], at[:, 1]].double().unsqueeze(1))
    return out


def problem(layer, tokens, topk, dtype=torch.bfloat16, skew=False):
    x = torch.randn(tokens, layer.hidden, device="cuda")
    x = torch.where(torch.rand_like(x) < 0.005, x * 12, x).to(dtype)
    logits = torch.randn(tokens, layer.experts, device="cuda")
    if skew:
        logits += torch.linspace(3, 0, layer.experts, device="cuda")
    weights, ids = torch.softmax(logits, -1).topk(topk, -1)
    return x, ids.int().contiguous(), (weights / weights.sum(-1, keepdim=True)).contiguous()


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def check(layer, impls, sizes, topk):
    wrong = 0
    for tokens in sizes:
        x, ids, weights = problem(layer, tokens, topk, torch.float32, skew=True)
        if tokens > 2:
            x[1] = 0
        few = torch.arange(0, tokens, max(1, tokens // 24), device="cuda")
        want, model = exact(layer, x[few], ids[few], weights[few]), exact(layer, x[few], ids[few], weights[few], True)
        allowed = relative(model, want)
        for impl in impls:
            for precision in (1, 2):
                out = torch.full((tokens, layer.hidden), torch.nan, device="cuda")
                c = layer.call(impl, x, ids, weights, out, precision)
                if c is None:
                    continue
                layer.run(impl, c)
                error = relative(out[few], want)
                again = out.clone()
                layer.run(impl, c)
                fine = error <= (1e-3 if precision == 2 else 1.05 * allowed + 1e-5) and bool(out.isfinite().all()) and torch.equal(out, again)
                wrong += not fine
                print(f"{'ok   ' if fine else 'WRONG'} {layer.name} T={tokens} {impl} {'q8' if precision == 1 else 'f16'}: relative {error:.3e} (roundings alone {allowed:.3e}), "
                      f"{int((~out.isfinite()).sum())} not finite, {'the same again' if torch.equal(out, again) else 'DIFFERENT AGAIN'}", flush=True)
    return wrong


def medians_ms(functions, rounds=6, burst=12.0):
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
                if spent > burst:
                    break
    return [statistics.median(t) for t in times]


def graph_of(functions):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        functions[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for function in functions:
            function()
    return graph


def copy_rate():
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() / medians_ms([lambda: b.copy_(a)])[0] * 1e-9


def torch_grouped(layer, x, ids, weights):
    """torch's grouped product in bf16 on weights that are dequantized beforehand, 30 GB for the large layer."""
    if not hasattr(torch, "_grouped_mm"):
        return None
    w = [torch.empty(layer.experts, m.rows, m.elements, dtype=torch.bfloat16, device="cuda") for m in layer.w]
    for m, to in zip(layer.w, w):
        for e in range(layer.experts):
            to[e] = m.expert(e)
    flat = ids.flatten().long()

    def call():
        order = flat.argsort(stable=True)
        offsets = torch.bincount(flat, minlength=layer.experts).cumsum(0).int()
        rows = x[order // ids.shape[1]]
        g, u = (torch._grouped_mm(rows, m.transpose(1, 2), offs=offsets) for m in w[:2])
        y = torch._grouped_mm(torch.nn.functional.silu(g) * u, w[2].transpose(1, 2), offs=offsets)
        out = torch.zeros_like(x)
        return out.index_add_(0, order // ids.shape[1], y * weights.flatten()[order].unsqueeze(1).to(y.dtype))
    return call


def times(layer, impls, tokens, topk, rate, with_torch):
    if tokens <= 8:
        return few_times(layer, impls, tokens, topk, rate)
    x, ids, weights = problem(layer, tokens, topk)
    calls = {}
    for impl in impls:
        for precision in (1, 2):
            out = torch.empty(tokens, layer.hidden, dtype=torch.bfloat16, device="cuda")
            c = layer.call(impl, x, ids, weights, out, precision)
            if c is not None:
                calls[f"{impl} {'q8' if precision == 1 else 'f16'}"] = lambda impl=impl, c=c, out=out: layer.run(impl, c)
    if with_torch:
        peer = torch_grouped(layer, x, ids, weights)
        if peer:
            calls["torch bf16"] = peer
    used = ids.unique().numel()
    flops = 6 * tokens * topk * layer.hidden * layer.inter
    for name, ms in zip(calls, medians_ms(list(calls.values()))):
        print(f"{layer.name} T={tokens} {name:14} {ms:8.3f} ms, {flops / ms * 1e-9:6.0f} TFLOP/s, {used * layer.bytes_of_expert() / ms * 1e-9:6.2f} TB/s of weights "
              f"(copy {rate:.2f})", flush=True)


def few_times(layer, impls, tokens, topk, rate):
    """Calls with other experts each, one after the other in a graph, so that weights come from memory."""
    problems = [problem(layer, tokens, topk) for _ in range(48)]
    for impl in impls:
        for precision in (1, 2):
            out = torch.empty(tokens, layer.hidden, dtype=torch.bfloat16, device="cuda")
            calls = [layer.call(impl, *p, out, precision) for p in problems]
            if any(c is None for c in calls):
                continue
            graph = graph_of([lambda c=c: layer.run(impl, c) for c in calls])
            us = medians_ms([graph.replay])[0] / len(problems) * 1e3
            used = statistics.mean(p[1].unique().numel() for p in problems)
            floor = used * layer.bytes_of_expert() / rate * 1e-6
            print(f"{layer.name} T={tokens} {impl} {'q8' if precision == 1 else 'f16'}: {us:.1f} us in a graph; weights {floor:.1f} us at the rate of a copy, bar {1.3 * floor + 10:.1f}",
                  flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("folder")
    parser.add_argument("--tier", type=int, default=90)
    parser.add_argument("--impl", default="portable")
    parser.add_argument("--formats", default="Q2_0,IQ2_S+Q2_0,Q4_K,Q8_0")
    parser.add_argument("--check-formats", default="")
    parser.add_argument("--tokens", default="1,8,64,256,2048,8192")
    parser.add_argument("--check", default="1,5,64,300,880,1100")
    parser.add_argument("--experts", type=int, default=512)
    parser.add_argument("--torch", action="store_true")
    a = parser.parse_args()
    torch.manual_seed(1)
    library = ctypes.CDLL(a.library)
    library.bench_workspace.restype = ctypes.c_uint64
    library.bench_load(a.folder.encode(), 1, a.tier)
    impls = a.impl.split(",")
    wrong = 0
    names = lambda text: [(n.split("+")[0], n.split("+")[-1]) for n in text.split(",") if n]
    for gate, down in names(a.check_formats or a.formats):
        wrong += check(Layer(library, 64, 1024, 768, gate, down), impls, [int(t) for t in a.check.split(",") if t], 8)
    print(f"{wrong} wrong")
    rate = copy_rate()
    for gate, down in names(a.formats):
        layer = Layer(library, a.experts, 2560, 640, gate, down)
        for tokens in [int(t) for t in a.tokens.split(",") if t]:
            times(layer, impls, tokens, 10, rate, a.torch and gate == "Q2_0")


if __name__ == "__main__":
    main()
