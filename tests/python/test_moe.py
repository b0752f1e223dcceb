# SPDX-License-Identifier: Apache-2.0
"""moe_prefill() and its parts against numpy in float64, with weights as they decode, and what is refused."""
import subprocess
import sys

import numpy as np
import pytest

import cqsa
from test_quant import TOOLS

TOKENS, TOPK, EXPERTS, HIDDEN, INTER = 19, 3, 5, 256, 256


def refused(status, text, call, *arguments, **keywords):
    with pytest.raises((ValueError, MemoryError, NotImplementedError)) as caught:
        call(*arguments, **keywords)
    assert caught.value.status_name == "CQSA_ERROR_" + status and text in str(caught.value), str(caught.value)


def quantized(random, rows, cols, format, experts=EXPERTS):
    return cqsa.quantize_rows((random.standard_normal((experts, rows, cols)) / np.sqrt(cols)).astype(np.float32), format)


@pytest.fixture
def layer(random):
    """x, ids, weights, w_gate, w_up, w_down; expert 4 has no tokens."""
    x = random.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    ids = random.integers(-1, EXPERTS - 1, (TOKENS, TOPK)).astype(np.int32)
    weights = random.random((TOKENS, TOPK)).astype(np.float32)
    return [x, ids, weights, quantized(random, INTER, HIDDEN, "Q8_0"), quantized(random, INTER, HIDDEN, "Q4_0"), quantized(random, HIDDEN, INTER, "IQ4_NL")]


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def values(w, expert):
    return np.asarray(w[expert].dequantize() if isinstance(w[expert], cqsa.QuantTensor) else w[expert], np.float64)


def slots(x, ids, w_gate, w_up, w_down, act):
    """y of each slot, in float64."""
    y = np.zeros(ids.shape + (w_down[0].shape[0],))
    for t, s in np.argwhere(ids >= 0):
        e, row = ids[t, s], x[t].astype(np.float64)
        g = values(w_gate, e) @ row if w_gate is not None else None
        y[t, s] = values(w_down, e) @ act(g, values(w_up, e) @ row)
    return y


def swiglu(g, u):
    return g * sigmoid(g) * u


def relative(got, wanted):
    return np.linalg.norm(np.asarray(got, np.float64) - wanted) / np.linalg.norm(wanted)


def test_combined(layer):
    x, ids, weights, *w = layer
    wanted = (slots(x, ids, *w, swiglu) * weights[..., None]).sum(1)
    got, info = cqsa.moe_prefill(*layer, return_info=True)
    assert got.dtype == np.float32 and got.shape == x.shape
    assert relative(got, wanted) < 2e-2
    assert info.implementation.startswith("cpu_") and info.pieces == 1 and info.workspace_bytes > 0
    assert info.precision == {"w_gate": "int8 (q8)", "w_up": "int8 (q8)", "w_down": "int8 (q8)"}
    assert relative(cqsa.moe_prefill(*layer, precision="f16"), wanted) < 1e-3 ** 1.5
    assert relative(cqsa.moe_prefill(*layer, precision="q8", batch_invariant=True), wanted) < 2e-2
    out = np.full_like(x, np.nan)
    assert cqsa.moe_prefill(*layer, out=out) is out
    np.testing.assert_array_equal(out, got)


def test_per_slot_and_combine(layer):
    x, ids, weights, *w = layer
    y = cqsa.moe_prefill(x, ids, None, *w, output="per_slot", precision="f16")
    assert relative(y, slots(x, ids, *w, swiglu).reshape(-1, HIDDEN)) < 1e-5
    assert not y.reshape(TOKENS, TOPK, HIDDEN)[ids < 0].any()
    np.testing.assert_array_equal(cqsa.moe_combine(y, weights, ids), cqsa.moe_prefill(*layer, precision="f16"))
    np.testing.assert_array_equal(cqsa.moe_combine(y, weights), cqsa.moe_combine(y, weights, ids))
    half = cqsa.moe_combine(y, weights, ids, out_dtype="float16")
    assert half.dtype == np.float16


@pytest.mark.parametrize("activation, act", [
    ("geglu_tanh", lambda g, u: g / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g ** 3))) * u),
    ("silu", lambda g, u: u * sigmoid(u)),
    ("gelu_tanh", lambda g, u: u / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u ** 3)))),
    ("relu2", lambda g, u: np.maximum(u, 0) ** 2),
])
def test_activations(layer, activation, act):
    x, ids, weights, w_gate, w_up, w_down = layer
    if "geglu" not in activation:
        w_gate = None
    got = cqsa.moe_prefill(x, ids, weights, w_gate, w_up, w_down, activation=activation, precision="f16")
    assert relative(got, (slots(x, ids, w_gate, w_up, w_down, act) * weights[..., None]).sum(1)) < 1e-5


def test_erf_activations_are_between_their_tanh_kin(layer):
    """numpy has no erf: the two kinds differ by little, but they do."""
    x, ids, weights, w_gate, w_up, w_down = layer
    for kind, gate in (("geglu", w_gate), ("gelu", None)):
        exact = cqsa.moe_prefill(x, ids, weights, gate, w_up, w_down, activation=kind, precision="f16")
        near = cqsa.moe_prefill(x, ids, weights, gate, w_up, w_down, activation=kind + "_tanh", precision="f16")
        assert 1e-6 < relative(near, exact) < 5e-3


def test_swiglu_with_limits(layer):
    x, ids, weights, *w = layer
    def act(g, u):
        g = np.minimum(g, 0.7)
        return g * sigmoid(1.702 * g) * (np.clip(u, -0.7, 0.7) + 1)
    got = cqsa.moe_prefill(*layer, alpha=1.702, beta=1, limit=0.7, precision="f16")
    assert relative(got, (slots(x, ids, *w, act) * weights[..., None]).sum(1)) < 1e-5


def test_layouts(random):
    x, ids, weights = random.standard_normal((7, 64)).astype(np.float32), np.array([[0, 1]] * 7), np.full((7, 2), 0.5)
    gate, up, down = (random.standard_normal((2, *shape)).astype(np.float32) for shape in ((32, 64), (32, 64), (64, 32)))
    wanted = cqsa.moe_prefill(x, ids, weights, gate, up, down)
    concat = np.concatenate([gate, up], axis=1)
    mixed = np.empty_like(concat)
    mixed[:, 0::2], mixed[:, 1::2] = gate, up
    np.testing.assert_array_equal(cqsa.moe_prefill(x, ids, weights, concat, None, down, gate_up_layout="concat"), wanted)
    np.testing.assert_array_equal(cqsa.moe_prefill(x, ids, weights, mixed, None, down, gate_up_layout="interleaved"), wanted)
    biases = dict(b_gate=random.standard_normal((2, 64)), b_down=random.standard_normal((2, 64)))
    split = dict(b_gate=biases["b_gate"][:, :32], b_up=biases["b_gate"][:, 32:], b_down=biases["b_down"])
    np.testing.assert_array_equal(cqsa.moe_prefill(x, ids, weights, concat, None, down, gate_up_layout="concat", **biases),
                                  cqsa.moe_prefill(x, ids, weights, gate, up, down, **split))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_float_weights_and_types(random, dtype):
    x, ids, weights = random.standard_normal((9, 40)).astype(dtype), random.integers(0, 3, (9, 2)), random.random((9, 2))
    w = [(random.standard_normal((3, *shape)) / 6).astype(dtype) for shape in ((24, 40), (24, 40), (40, 24))]
    got = cqsa.moe_prefill(x, ids, weights, *w)
    assert got.dtype == x.dtype
    assert relative(got, (slots(x, ids, *w, swiglu) * weights[..., None]).sum(1)) < (2e-3 if dtype == "float16" else 1e-5)
    strided = [np.repeat(one, 2, axis=0)[::2] for one in w]  # experts apart
    np.testing.assert_array_equal(cqsa.moe_prefill(np.asfortranarray(x), ids, weights, *strided), got)


def test_lists_of_experts(layer):
    x, ids, weights, *w = layer
    wanted = cqsa.moe_prefill(*layer)
    lists = [list(one) for one in w]
    for one in lists:
        one[4] = None  # has no tokens
    np.testing.assert_array_equal(cqsa.moe_prefill(x, ids, weights, *lists), wanted)
    lists[0][0] = cqsa.quantize_rows(lists[0][0].dequantize(), "F32")  # formats may differ
    assert relative(cqsa.moe_prefill(x, ids, weights, *lists, precision="f16"), cqsa.moe_prefill(*layer, precision="f16")) < 1e-6
    ids[0, 0] = 4
    refused("NULL_POINTER", "args->w_gate: the data of expert 4 is NULL", cqsa.moe_prefill, x, ids, weights, *lists)


def test_expert_map(layer):
    x, ids, weights, *w = layer
    wanted = cqsa.moe_prefill(*layer)
    there = np.where(ids < 0, 0, ids + 1)
    np.testing.assert_array_equal(cqsa.moe_prefill(x, there, weights, *w, expert_map=[-1, 0, 1, 2, 3, 4]), wanted)


def test_shared_expert(layer, random):
    x, ids, weights, *w = layer
    shared = [quantized(random, 512, HIDDEN, "Q8_0", 1), quantized(random, 512, HIDDEN, "Q8_0", 1), quantized(random, HIDDEN, 512, "Q8_0", 1)]
    base = (slots(x, ids, *w, swiglu) * weights[..., None]).sum(1)
    more = slots(x, np.zeros((TOKENS, 1), int), *shared, swiglu)[:, 0]
    gate, logits = random.standard_normal(HIDDEN) / 16, random.standard_normal((TOKENS, 1))
    for given, factor in ((None, 1), (gate, sigmoid(x @ gate)[:, None]), (logits, sigmoid(logits))):
        got = cqsa.moe_prefill(*layer, shared=(*shared, given), precision="f16")
        assert relative(got, base + factor * more) < 1e-5
    named = dict(w_gate=shared[0][0], w_up=shared[1][0], w_down=shared[2][0], gate=gate)  # of two axes
    assert relative(cqsa.moe_prefill(*layer, shared=named, precision="f16"), base + sigmoid(x @ gate)[:, None] * more) < 1e-5


def test_memory_limit_and_prefixes(layer):
    x, ids, weights, *w = layer
    wanted, info = cqsa.moe_prefill(*layer, return_info=True)
    limit = info.workspace_bytes * 2 // 3
    got, small = cqsa.moe_prefill(*layer, memory_limit=limit, return_info=True)
    assert small.pieces > 1 and small.workspace_bytes <= limit
    np.testing.assert_array_equal(got, wanted)
    refused("BUDGET_TOO_SMALL", "the least that works is", cqsa.moe_prefill, *layer, memory_limit=100)
    for tokens in range(TOKENS):
        np.testing.assert_array_equal(cqsa.moe_prefill(x[:tokens], ids[:tokens], weights[:tokens], *w), wanted[:tokens])


def test_experts_of_a_gguf_file(tmp_path, random):
    path = tmp_path / "model.gguf"
    subprocess.run([sys.executable, TOOLS / "make_gguf.py", path], check=True)
    with cqsa.Gguf(path) as file:
        w = [file.tensor(f"blk.0.ffn_{name}_exps.weight") for name in ("gate", "up", "down")]
        x = random.standard_normal((11, w[0].cols)).astype(np.float32)
        ids, weights = cqsa.moe_route(random.standard_normal((11, w[0].experts)).astype(np.float32), 4, renormalise=True)
        wanted = (slots(x, ids, *w, swiglu) * weights[..., None]).sum(1)
        assert relative(cqsa.moe_prefill(x, ids, weights, *w), wanted) < 3e-2
        assert relative(cqsa.moe_prefill(x, ids, weights, *w, precision="f16"), wanted) < 1e-5


# ---------------------------------------------------------------------------------------------------------------------
# Parts
# ---------------------------------------------------------------------------------------------------------------------


def test_route(random):
    logits = random.standard_normal((31, 16)).astype(np.float32)
    logits[:, 9] = logits[:, 3]  # ties
    ids, weights = cqsa.moe_route(logits, 4)
    scores = np.exp(logits - logits.max(1, keepdims=True).astype(np.float64))
    scores /= scores.sum(1, keepdims=True)
    wanted = np.argsort(-logits, axis=1, kind="stable")[:, :4]
    np.testing.assert_array_equal(ids, wanted)
    np.testing.assert_allclose(weights, np.take_along_axis(scores, wanted, 1), rtol=1e-5)
    _, weights = cqsa.moe_route(logits, 4, renormalise=True, scale=2.5, scoring="sigmoid", id_dtype="int64")
    of_sigmoid = np.take_along_axis(sigmoid(logits.astype(np.float64)), wanted, 1)
    np.testing.assert_allclose(weights, 2.5 * of_sigmoid / of_sigmoid.sum(1, keepdims=True), rtol=1e-5)
    ids, _ = cqsa.moe_route(logits, 2, num_groups=4, topk_groups=1, group_score="top2")
    best = np.sort(scores.reshape(31, 4, 4), axis=2)[:, :, -2:].sum(2).argmax(1)
    np.testing.assert_array_equal(ids // 4, np.stack([best, best], 1))
    bias = np.zeros(16)
    bias[7] = 10
    ids, weights = cqsa.moe_route(logits, 1, bias=bias)
    assert (ids == 7).all()
    np.testing.assert_allclose(weights[:, 0], scores[:, 7], rtol=1e-5)


def test_group(layer):
    ids = layer[1]
    groups = cqsa.moe_group(ids, EXPERTS)
    flat = ids.reshape(-1)
    np.testing.assert_array_equal(groups.counts, [(flat == e).sum() for e in range(EXPERTS)])
    np.testing.assert_array_equal(groups.offsets, np.concatenate([[0], np.cumsum(groups.counts)]))
    order = np.concatenate([np.flatnonzero(flat == e) for e in range(EXPERTS)])
    np.testing.assert_array_equal(groups.order[:len(order)], order)
    assert (groups.order[len(order):] == -1).all()
    np.testing.assert_array_equal(groups.order[groups.places[ids >= 0]], np.flatnonzero(flat >= 0))
    assert (groups.places[ids < 0] == -1).all()
    refused("INDEX", "args->topk_ids[0, 0] is 9, wanted -1 to 4", cqsa.moe_group, [[9]], EXPERTS)


def test_quantize_activations(random):
    x = random.standard_normal((6, 96)).astype(np.float32)
    x[2] = 0
    codes, scales = cqsa.moe_quantize_activations(x)
    groups = x.reshape(6, 3, 32)
    most = np.abs(groups).max(2)
    np.testing.assert_array_equal(scales, most / np.float32(127))
    with np.errstate(divide="ignore", invalid="ignore"):
        wanted = np.rint(groups * (np.float32(127) / most)[..., None])
    np.testing.assert_array_equal(codes.reshape(6, 3, 32), np.nan_to_num(wanted))
    refused("SHAPE", "wanted rows of a multiple of 32", cqsa.moe_quantize_activations, x[:, :33])


# ---------------------------------------------------------------------------------------------------------------------
# Bad input
# ---------------------------------------------------------------------------------------------------------------------


def test_refusals(layer, random):
    x, ids, weights, *w = layer
    call = cqsa.moe_prefill
    refused("INVALID_ARGUMENT", "activation is 'relu', wanted one of 'swiglu'", call, *layer, activation="relu")
    refused("INVALID_ARGUMENT", "precision is 'int8'", call, *layer, precision="int8")
    refused("INVALID_ARGUMENT", "output is 'all'", call, *layer, output="all")
    refused("INVALID_ARGUMENT", "gate_up_layout is 'both'", call, *layer, gate_up_layout="both")
    refused("INVALID_ARGUMENT", "limit is 0.0, wanted a number above 0, or None", call, *layer, limit=0)
    refused("INVALID_ARGUMENT", "alpha is 0", call, *layer, alpha=0)
    refused("NULL_POINTER", "args->w_up is NULL", call, x, ids, weights, w[0], None, w[2])
    refused("NULL_POINTER", "args->topk_weights is NULL", call, x, ids, None, *w)
    refused("SHAPE", "wanted [tokens, hidden]", call, x[0], ids, weights, *w)
    refused("SHAPE", "args->topk_weights has shape [19, 2], wanted [19, 3]", call, x, ids, weights[:, :2], *w)
    refused("SHAPE", "args->w_up->num_experts is 4, wanted 5", call, x, ids, weights, w[0], list(w[1])[:4], w[2])
    refused("SHAPE", "args->w_down->rows is 256, wanted 200 (hidden, axis 1 of args->x)", call, x[:, :200], ids, weights, *w)
    refused("INDEX", "args->topk_ids[3, 1] is 5, wanted -1 to 4", call, x, np.where(np.arange(TOKENS * TOPK).reshape(TOKENS, TOPK) == 10, 5, ids), weights, *w)
    refused("DTYPE", "topk_ids is float64", call, x, ids.astype(float), weights, *w)
    refused("INVALID_ARGUMENT", "w_gate is a list, wanted a QuantTensor", call, x, ids, weights, [w[0]] * 5, w[1], w[2])
    refused("SHAPE", "w_gate[1] has shape [256, 128], wanted [256, 256] as the others", call, x, ids, weights,
            [w[0][0], quantized(random, 256, 128, "Q8_0", 1)[0]], w[1], w[2])
    refused("INVALID_ARGUMENT", "shared is neither", call, *layer, shared=3)
    refused("INVALID_ARGUMENT", "has no place for it", call, *layer, output="per_slot", shared=(w[0][0], w[1][0], w[2][0]))
    refused("OVERLAP", "args->out", call, *layer, out=x)
