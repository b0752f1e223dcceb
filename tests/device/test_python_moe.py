# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts of the Python package on an NVIDIA GPU, with torch. A plain script, as test_python_cuda.py:

    PYTHONPATH=bindings/python CQSA_LIBRARY=$PWD/build/release/lib/libcqsa.so.0 python3 tests/device/test_python_moe.py [WORD ..]

Everything is compared with float64 on the GPU, with weights as they decode; what is exact, bit for bit with the CPU backend. What is large takes 25 GB.
"""
import sys
import time

import numpy as np
import torch

import cqsa
from test_python_cuda import CUDA, DTYPES, SLEEP_CYCLES, refused, run

F = torch.nn.functional
HIDDEN, INTER = 512, 256
BOUND = {"q8": 5e-4, "f16": 1e-6}  # of the mean square of errors, beside that of values
WEIGHTS = {}


def weight(format, experts, rows, cols, seed=1):
    """QuantTensor on the device, and the values it decodes to, in float64. Random blocks with sensible scales."""
    key = (format, experts, rows, cols, seed)
    if key not in WEIGHTS:
        make = torch.Generator().manual_seed(seed)
        values = torch.randn((experts, rows, cols), generator=make) / cols**0.5
        if cqsa.quant_formats()[format].can_quantize or format == "F32":
            host = cqsa.quantize_rows(values.numpy(), format)
            data = torch.from_numpy(np.array(host.data))
        else:
            data = random_blocks(format, experts, rows, cols, make)
        w = cqsa.QuantTensor(data.to(CUDA), format, cols=cols)
        WEIGHTS[key] = w, w.dequantize().double()
    return WEIGHTS[key]


SCALES = {"Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ2_XXS": (0,),
          "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ4_XS": (0,), "IQ1_S": (0,), "TQ1_0": (52,), "TQ2_0": (64,), "Q1_0": (0,)}


def random_blocks(format, experts, rows, cols, make):
    """Random bytes whose scales are such that elements have an RMS of 1 / sqrt(cols)."""
    block, size = cqsa.quant_formats()[format].block_elements, cqsa.quant_formats()[format].block_bytes
    data = torch.randint(0, 256, (experts * rows, cols // block, size), dtype=torch.uint8, generator=make)

    def put(value):
        for at in SCALES[format]:
            half = ((torch.rand(data.shape[:2], generator=make) + 0.5) * value).half()
            data[..., at:at + 2] = half.unsqueeze(-1).view(torch.uint8)

    put(1.0)
    unit = cqsa.QuantTensor(data[:64].reshape(-1, cols // block * size), format).dequantize(backend="cpu")
    put(1.0 / float(torch.as_tensor(unit).pow(2).mean().sqrt()) / cols**0.5)
    return data.reshape(experts, rows, cols // block * size)


def problem(tokens, experts=16, topk=3, formats=("Q8_0", "Q4_0", "IQ4_NL"), dtype=torch.float32, hidden=HIDDEN, inter=INTER, seed=5):
    make = torch.Generator().manual_seed(seed)
    x = torch.randn((tokens, hidden), generator=make)
    x[torch.rand(x.shape, generator=make) < 0.005] *= 12
    ids = torch.randint(-1, experts - 1, (tokens, topk), generator=make, dtype=torch.int32)  # the last expert has no tokens
    factors = torch.rand((tokens, topk), generator=make)
    shapes = ((inter, hidden), (inter, hidden), (hidden, inter))
    w = [weight(format, experts, *shape, seed=n) for n, (format, shape) in enumerate(zip(formats, shapes))]
    return x.to(dtype).to(CUDA), ids.to(CUDA), factors.to(CUDA), [a for a, _ in w], [b for _, b in w]


def swiglu(g, u):
    return F.silu(g) * u


def of_slots(x, ids, values, act=swiglu, biases=(None, None, None)):
    """y [tokens * k, hidden] in float64."""
    gate, up, down = values
    tokens, topk = ids.shape
    y = torch.zeros((tokens * topk, down.shape[1]), dtype=torch.float64, device=CUDA)
    flat, rows = ids.reshape(-1).long(), x.double()

    def product(a, w, b, e):
        return a @ w[e].T + (0 if b is None else b[e].double())

    for e in flat[flat >= 0].unique().tolist():
        at = (flat == e).nonzero()[:, 0]
        a = rows[at // topk]
        g = None if gate is None else product(a, gate, biases[0], e)
        y[at] = product(act(g, product(a, up, biases[1], e)), down, biases[2], e)
    return y


def summed(y, factors):
    return (y.view(*factors.shape, -1) * factors.double()[..., None]).sum(1)


def close(got, wanted, bound):
    error = (got.double() - wanted).pow(2).sum() / wanted.pow(2).sum().clamp_min(1e-300)
    assert error <= bound, f"mean square of errors {error.item():.3g}, wanted at most {bound:.3g}"


def same(one, other, what=""):
    one, other = (x.contiguous().cpu().view(torch.uint8) for x in (one, other))
    assert torch.equal(one, other), f"{what}: {(one != other).sum().item()} of {one.numel()} bytes differ"


# ------------------------------------------------------------------------------------------------------------- operator


def test_tokens_and_precisions():
    x, ids, factors, w, values = problem(700)
    wanted = summed(of_slots(x, ids, values), factors)
    for tokens in (0, 1, 2, 3, 4, 7, 8, 15, 16, 21, 22, 33, 64, 65, 128, 130, 300, 700):
        for precision, bound in BOUND.items():
            got = cqsa.moe_prefill(x[:tokens], ids[:tokens], factors[:tokens], *w, precision=precision)
            assert got.device == CUDA and got.dtype == torch.float32 and got.shape == (tokens, HIDDEN)
            if tokens:
                close(got, wanted[:tokens], bound)
            same(cqsa.moe_prefill(x[:tokens], ids[:tokens], factors[:tokens], *w, precision=precision), got, f"{tokens} tokens, once more")


def test_every_format():
    names = [name for name in cqsa.quant_formats() if name in SCALES or cqsa.quant_formats()[name].can_quantize]
    assert len(names) >= 20
    for tokens in (2, 40, 600):
        for name in names:
            block = cqsa.quant_formats()[name].block_elements
            x, ids, factors, w, values = problem(tokens, experts=6, topk=2, formats=(name, name, name if INTER % block == 0 else "Q8_0"))
            wanted = summed(of_slots(x, ids, values), factors)
            for precision, bound in BOUND.items():
                try:
                    close(cqsa.moe_prefill(x, ids, factors, *w, precision=precision), wanted, bound)
                except AssertionError as error:
                    raise AssertionError(f"{name} {tokens} {precision}: {error}") from None


def test_formats_of_an_expert_list():
    x, ids, factors, w, values = problem(90, experts=5)
    other, its = weight("Q6_K", 5, INTER, HIDDEN, 7)
    gates = [other[e] if e % 2 else w[0][e] for e in range(5)]
    mixed = torch.stack([its[e] if e % 2 else values[0][e] for e in range(5)])
    lists = [gates, list(w[1]), list(w[2])]
    for one in lists:
        one[4] = None  # has no tokens
    wanted = summed(of_slots(x, ids, [mixed, *values[1:]]), factors)
    for tokens in (1, 90):
        close(cqsa.moe_prefill(x[:tokens], ids[:tokens], factors[:tokens], *lists, precision="f16"), wanted[:tokens], BOUND["f16"])


def test_plain_weights_and_types():
    for dtype in DTYPES:
        x, ids, factors, _, _ = problem(50, dtype=dtype)
        make = torch.Generator().manual_seed(2)
        w = [(torch.randn((16, *shape), generator=make) / shape[1]**0.5).to(dtype).to(CUDA) for shape in ((INTER, HIDDEN), (INTER, HIDDEN), (HIDDEN, INTER))]
        wanted = summed(of_slots(x, ids, [one.double() for one in w]), factors)
        got = cqsa.moe_prefill(x, ids, factors, *w, precision="f16")
        assert got.dtype == dtype
        close(got, wanted, {torch.float32: 1e-6, torch.float16: 2e-6, torch.bfloat16: 1e-5}[dtype])
        far = torch.full((50, 2 * HIDDEN + 2), 7.0, dtype=dtype, device=CUDA)
        out = far[:, 1:2 * HIDDEN + 1:2]
        assert cqsa.moe_prefill(x.T.contiguous().T, ids, factors, *w, precision="f16", out=out) is out
        same(out, got, "strides")
        out.fill_(7.0)
        assert bool((far == 7).all()), "wrote beside out"


def test_activations():
    x, ids, factors, w, values = problem(80)
    acts = {"geglu": lambda g, u: F.gelu(g) * u, "geglu_tanh": lambda g, u: F.gelu(g, approximate="tanh") * u, "silu": lambda _, u: F.silu(u),
            "gelu": lambda _, u: F.gelu(u), "gelu_tanh": lambda _, u: F.gelu(u, approximate="tanh"), "relu2": lambda _, u: F.relu(u).square()}
    for tokens in (2, 80):
        for name, act in acts.items():
            gated = name.startswith("geglu")
            wanted = summed(of_slots(x[:tokens], ids[:tokens], [values[0] if gated else None, *values[1:]], act), factors[:tokens])
            got = cqsa.moe_prefill(x[:tokens], ids[:tokens], factors[:tokens], w[0] if gated else None, *w[1:], activation=name, precision="f16")
            close(got, wanted, BOUND["f16"])

        def limited(g, u):
            g = g.clamp(max=0.7)
            return g * torch.sigmoid(1.702 * g) * (u.clamp(-0.7, 0.7) + 1)

        got = cqsa.moe_prefill(x[:tokens], ids[:tokens], factors[:tokens], *w, alpha=1.702, beta=1, limit=0.7, precision="f16")
        close(got, summed(of_slots(x[:tokens], ids[:tokens], values, limited), factors[:tokens]), BOUND["f16"])


def test_biases_layouts_and_maps():
    x, ids, factors, w, values = problem(80, formats=("Q8_0", "Q8_0", "Q8_0"))
    make = torch.Generator().manual_seed(3)
    biases = [torch.randn((16, n), generator=make).to(CUDA) for n in (INTER, INTER, HIDDEN)]
    named = dict(zip(("b_gate", "b_up", "b_down"), biases))
    size = values[0].shape[2] // 32 * 34

    def bytes_of(format, rows, cols, seed):
        host = cqsa.quantize_rows((torch.randn((16, rows, cols), generator=torch.Generator().manual_seed(seed)) / cols**0.5).numpy(), format)
        return torch.from_numpy(np.array(host.data)).to(CUDA)

    gate, up = (bytes_of("Q8_0", INTER, HIDDEN, seed) for seed in (0, 1))
    concat = cqsa.QuantTensor(torch.cat([gate, up], 1), "Q8_0", cols=HIDDEN)
    rows = cqsa.QuantTensor(torch.stack([gate, up], 2).view(16, 2 * INTER, size), "Q8_0", cols=HIDDEN)
    both = torch.cat(biases[:2], 1)
    mixed = torch.stack(biases[:2], 2).view(16, -1)
    renamed = torch.where(ids < 0, ids, (ids + 3) % 19)
    map_of = torch.tensor([(n - 3) % 19 if (n - 3) % 19 < 16 else -1 for n in range(19)], dtype=torch.int32, device=CUDA)
    for tokens in (1, 3, 80):
        a, b, c = x[:tokens], ids[:tokens], factors[:tokens]
        wanted = summed(of_slots(a, b, values, biases=biases), c)
        got = cqsa.moe_prefill(a, b, c, *w, precision="f16", **named)
        close(got, wanted, BOUND["f16"])
        close(cqsa.moe_prefill(a, b, c, concat, None, w[2], gate_up_layout="concat", precision="f16", b_gate=both, b_down=biases[2]), wanted, BOUND["f16"])
        close(cqsa.moe_prefill(a, b, c, rows, None, w[2], gate_up_layout="interleaved", precision="f16", b_gate=mixed, b_down=biases[2]), wanted, BOUND["f16"])
        same(cqsa.moe_prefill(a, renamed[:tokens], c, *w, precision="f16", expert_map=map_of, **named), got, "expert_map")
        same(cqsa.moe_prefill(a, b.long(), c, *w, precision="f16", **named), got, "int64 ids")


def test_ids_that_contribute_nothing():
    x, ids, factors, w, values = problem(60)
    make = torch.Generator().manual_seed(3)
    named = dict(b_down=torch.randn((16, HIDDEN), generator=make).to(CUDA))
    for tokens in (1, 4, 60):
        none = torch.full((tokens, 3), -1, dtype=torch.int32, device=CUDA)
        assert not cqsa.moe_prefill(x[:tokens], none, factors[:tokens], *w, **named).any()
        got = cqsa.moe_prefill(x[:tokens], ids[:tokens], factors[:tokens], *w, **named)
        wild = torch.where(ids[:tokens] < 0, 4000, ids[:tokens])  # skipped, as a device's ids cannot be looked at
        same(cqsa.moe_prefill(x[:tokens], wild, factors[:tokens], *w, **named), got, "out of range")
        zero = factors[:tokens].clone()
        zero[:, 1] = 0
        part = torch.where(torch.arange(3, device=CUDA) == 1, -1, ids[:tokens])
        close(cqsa.moe_prefill(x[:tokens], ids[:tokens], zero, *w), cqsa.moe_prefill(x[:tokens], part, zero, *w).double(), 1e-12)
        twice = ids[:tokens, :1].expand(-1, 3).contiguous().clamp_min(0)
        wanted = summed(of_slots(x[:tokens], twice, values), factors[:tokens])
        close(cqsa.moe_prefill(x[:tokens], twice, factors[:tokens], *w, precision="f16"), wanted, BOUND["f16"])


def test_shared_expert_and_slots():
    x, ids, factors, w, values = problem(70)
    shared = [weight(f, 1, *shape, seed=20 + n) for n, (f, shape) in enumerate((("Q8_0", (512, HIDDEN)), ("Q8_0", (512, HIDDEN)), ("Q4_0", (HIDDEN, 512))))]
    gate = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(4)).to(CUDA) / 16
    for tokens in (1, 5, 70):
        a, b, c = x[:tokens], ids[:tokens], factors[:tokens]
        y = of_slots(a, b, values)
        more = of_slots(a, torch.zeros((tokens, 1), dtype=torch.int32, device=CUDA), [s[1] for s in shared])
        for given, factor in ((None, 1), (gate, torch.sigmoid(a.double() @ gate.double())[:, None])):
            got = cqsa.moe_prefill(a, b, c, *w, shared=(*(s[0] for s in shared), given), precision="f16")
            close(got, summed(y, c) + factor * more, BOUND["f16"])
        slots = cqsa.moe_prefill(a, b, None, *w, output="per_slot", precision="f16")
        close(slots, y, BOUND["f16"])
        assert not slots[(b < 0).view(-1)].any()
        same(cqsa.moe_combine(slots, c, b), cqsa.moe_prefill(a, b, c, *w, precision="f16"), "combine")


def test_what_does_not_depend_on_the_others():
    for formats in (("Q8_0", "Q4_0", "IQ4_NL"), ("Q2_0", "Q2_0", "Q2_0")):
        x, ids, factors, w, _ = problem(400, formats=formats)
        for precision in BOUND:
            whole = cqsa.moe_prefill(x, ids, factors, *w, precision=precision, batch_invariant=True)
            for tokens in (1, 2, 5, 64, 130):
                got = cqsa.moe_prefill(x[:tokens], ids[:tokens], factors[:tokens], *w, precision=precision, batch_invariant=True)
                same(got, whole[:tokens], f"{formats} {precision} {tokens} tokens")


def test_limits():
    x, ids, factors, w, _ = problem(600)
    wanted, info = cqsa.moe_prefill(x, ids, factors, *w, batch_invariant=True, return_info=True)
    limit = info.workspace_bytes // 3
    got, small = cqsa.moe_prefill(x, ids, factors, *w, batch_invariant=True, memory_limit=limit, return_info=True)
    assert small.pieces > 1 and small.workspace_bytes <= limit
    same(got, wanted, "in pieces")
    refused("BUDGET_TOO_SMALL", lambda: cqsa.moe_prefill(x, ids, factors, *w, memory_limit=100), "the least that works is")


def test_nan_poisons_its_expert_alone():
    for tokens in (4, 200):
        x, ids, factors, w, values = problem(tokens)
        host = cqsa.quantize_rows(values[2].float().cpu().numpy(), "IQ4_NL")
        data = torch.from_numpy(np.array(host.data))
        data[3, 17, 0:2] = torch.tensor([0x00, 0x7e], dtype=torch.uint8)
        got = cqsa.moe_prefill(x, ids, factors, w[0], w[1], cqsa.QuantTensor(data.to(CUDA), "IQ4_NL", cols=INTER))
        assert torch.equal(got.isnan().any(1), (ids == 3).any(1)), tokens
        assert torch.equal(got.isnan()[:, 17], (ids == 3).any(1)) and not got[:, :17].isnan().any(), tokens


# ------------------------------------------------------------------------------------------------------- streams, graphs


def test_graphs():
    for tokens in (1, 4, 40, 500):
        x, ids, factors, w, values = problem(tokens)
        out, graph, stream = torch.empty_like(x), torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            cqsa.moe_prefill(x, ids, factors, *w, out=out, precision="f16")
        other, others, _, _, _ = problem(tokens, seed=77)
        x.copy_(other)
        ids.copy_(others)
        graph.replay()
        torch.cuda.synchronize()
        close(out, summed(of_slots(x, ids, values), factors), BOUND["f16"])


def test_queued_work():
    x, ids, factors, w, values = problem(300)
    other, _, _, _, _ = problem(300, seed=9)
    wanted = summed(of_slots(other, ids, values), factors)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        x.copy_(other)
        got = cqsa.moe_prefill(x, ids, factors, *w, precision="f16")
        assert not stream.query(), "the call waited"
    stream.synchronize()
    close(got, wanted, BOUND["f16"])


# ---------------------------------------------------------------------------------------------------------------- parts


def test_parts_have_the_bits_of_the_cpu():
    make = torch.Generator().manual_seed(6)
    for tokens, experts, topk in ((1, 1, 1), (7, 16, 4), (333, 128, 8), (4096, 512, 10), (50, 4096, 64)):
        logits = torch.randn((tokens, experts), generator=make).half().float()  # with ties
        for scoring, renormalise in (("softmax", False), ("sigmoid", True)):
            ids, factors = cqsa.moe_route(logits.to(CUDA), topk, scoring=scoring, renormalise=renormalise)
            host, weights = cqsa.moe_route(logits, topk, scoring=scoring, renormalise=renormalise, backend="cpu")
            same(ids, torch.as_tensor(host), f"ids of {tokens} x {experts}")
            assert torch.allclose(factors.cpu(), torch.as_tensor(weights), rtol=1e-5, atol=0)
        ids[torch.rand(ids.shape, generator=make).to(CUDA) < 0.1] = -1
        for one, other in zip(cqsa.moe_group(ids, experts), cqsa.moe_group(ids.cpu(), experts, backend="cpu")):
            same(one, torch.as_tensor(other), f"groups of {tokens} x {experts}")
    for dtype in DTYPES:
        x = (torch.randn((57, 1120), generator=make) * 3).to(dtype)
        x[3] = 0
        for one, other in zip(cqsa.moe_quantize_activations(x.to(CUDA)), cqsa.moe_quantize_activations(x, backend="cpu")):
            same(one, torch.as_tensor(other), f"activations {dtype}")
    y, factors = torch.randn((300 * 5, 777), generator=make), torch.rand((300, 5), generator=make)
    ids = torch.randint(-1, 4, (300, 5), generator=make)
    same(cqsa.moe_combine(y.to(CUDA), factors.to(CUDA), ids.to(CUDA)), torch.as_tensor(cqsa.moe_combine(y, factors, ids, backend="cpu")), "combine")


def test_more_than_2_31_elements_of_slots():
    tokens, topk = 90_000, 10
    x, ids, factors, w, values = problem(tokens, experts=64, topk=topk, formats=("Q2_0", "Q2_0", "Q2_0"), hidden=2560, inter=640)
    got = cqsa.moe_prefill(x, ids, factors, *w, precision="f16")
    at = torch.tensor([0, 1, 41_000, 83_886, 83_887, 89_999], device=CUDA)
    close(got[at], summed(of_slots(x[at], ids[at], values), factors[at]), BOUND["f16"])
    y = cqsa.moe_prefill(x, ids, None, *w, output="per_slot", precision="f16")
    close(y.view(tokens, topk, -1)[at].flatten(0, 1), of_slots(x[at], ids[at], values), BOUND["f16"])


def test_what_is_refused():
    x, ids, factors, w, _ = problem(5)
    refused("DEVICE", lambda: cqsa.moe_prefill(x, ids, factors, *w, out=torch.empty(5, HIDDEN)), "out")
    refused("SHAPE", lambda: cqsa.moe_prefill(x, ids, factors[:, :2], *w), "topk_weights")
    refused("SHAPE", lambda: cqsa.moe_prefill(x[:, :200], ids, factors, *w), "w_down")
    got = cqsa.moe_prefill(x, ids, factors, *w)
    assert not got.isnan().any()


if __name__ == "__main__":
    begun = time.perf_counter()
    code = run(sys.argv[1:], globals())
    print(f"{time.perf_counter() - begun:.1f} s")
    sys.exit(code)
