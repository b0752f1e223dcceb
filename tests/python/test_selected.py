# SPDX-License-Identifier: Apache-2.0
"""attention_selected(): numpy's own words for it, what it takes for operands, and bad input."""
import numpy as np
import pytest

import cqsa


def problem(random, kind="float32", queries=5, heads=6, kv_heads=2, dim=40, pages=6, size=4, width=9):
    """q, k, v, page table, cells and counts; the table has a hole."""
    q = random.standard_normal((queries, heads, dim)).astype(np.float32)
    k, v = (random.standard_normal((pages, kv_heads, size, dim)).astype(kind).swapaxes(1, 2) for _ in range(2))  # page, head, row
    table = random.permutation(pages).astype(np.int32)
    table[1] = -1
    counts = random.integers(0, width + 1, queries).astype(np.int32)
    cells = np.stack([np.sort(random.permutation(pages * size)[:width]) for _ in range(queries)]).astype(np.int32)
    return q, k, v, table, cells, counts


def naive(q, k, v, table, cells, counts, scale=None):
    queries, heads, dim = q.shape
    kv_heads, size = k.shape[2], k.shape[1]
    out, lse = np.zeros((queries, heads, v.shape[3])), np.full((heads, queries), -np.inf)
    for i in range(queries):
        row = table if table.ndim == 1 else table[i]
        there = [(row[c // size], c % size) for c in cells[i, :counts[i]] if row[c // size] >= 0]
        for h in range(heads if there else 0):
            g = h // (heads // kv_heads)
            keys = np.stack([k[p, r, g] for p, r in there]).astype(np.float64)
            s = keys @ q[i, h].astype(np.float64) * (scale or dim ** -0.5)
            p = np.exp(s - s.max())
            out[i, h] = p @ np.stack([v[page, r, g] for page, r in there]).astype(np.float64) / p.sum()
            lse[h, i] = s.max() + np.log(p.sum())
    return out, lse


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_against_numpy(random, kind):
    operands = problem(random, kind)
    out, lse = cqsa.attention_selected(*operands, return_lse=True, check=True)
    wanted, wanted_lse = naive(*operands)
    assert out.dtype == lse.dtype == np.float32 and out.shape == wanted.shape
    np.testing.assert_allclose(out, wanted, atol=2e-5)
    np.testing.assert_allclose(lse, wanted_lse, atol=2e-5)


def test_lists_scale_and_outputs(random):
    q, k, v, table, cells, counts = problem(random)
    wanted, wanted_lse = naive(q, k, v, table, cells, counts, 0.3)
    per_query = np.stack([table] * len(q))
    out, lse = np.empty(wanted.shape, np.float16), np.empty(wanted_lse.shape, np.float32)
    made = cqsa.attention_selected(q, k, v, per_query.tolist(), cells.astype(np.int64), counts.tolist(), softmax_scale=0.3, out=(out, lse),
                                   return_lse=True, precision="f32")
    assert made[0] is out and made[1] is lse
    np.testing.assert_allclose(out, wanted, atol=2e-3)
    np.testing.assert_allclose(lse, wanted_lse, atol=2e-5)
    for precision in ("default", "fast", "split"):  # the CPU computes them all in f32
        np.testing.assert_array_equal(cqsa.attention_selected(q, k, v, table, cells, counts, softmax_scale=0.3, precision=precision),
                                      cqsa.attention_selected(q, k, v, table, cells, counts, softmax_scale=0.3))


@pytest.mark.parametrize("group", [32, None, 128])
def test_int8(random, group):
    q, k, v, table, cells, counts = problem(random, dim=100)
    codes = [random.integers(-127, 128, k.shape).astype(np.int8) for _ in range(2)]
    scales = [random.uniform(0.005, 0.03, (*k.shape[:3], -(-100 // (group or 64)))).astype(np.float16) for _ in range(2)]
    k, v = (c * np.repeat(s.astype(np.float32), group or 64, axis=3)[..., :100] for c, s in zip(codes, scales))
    out = cqsa.attention_selected(q, *codes, table, cells, counts, k_scale=scales[0], v_scale=scales[1], kv_group=group)
    np.testing.assert_allclose(out, naive(q, k, v, table, cells, counts)[0], atol=5e-5)


def test_kv_append_fills_what_it_reads(random):
    rows = random.standard_normal((24, 2, 64)).astype(np.float32)
    pools = [np.zeros((6, 4, 2, 64), np.float16) for _ in range(2)]
    table = np.array([5, 3, 1, 0, 2, 4], np.int32)
    for pool, x in zip(pools, (rows, 2 * rows)):
        cqsa.kv_append(x, pool, table, np.arange(24))
    q = random.standard_normal((1, 4, 64)).astype(np.float32)
    cells = np.arange(24, dtype=np.int32)[None]
    out = cqsa.attention_selected(q, *pools, table, cells, [24])
    np.testing.assert_allclose(out, naive(q, *pools, table, cells, np.array([24]))[0], atol=2e-5)


def test_torch(random):
    torch = pytest.importorskip("torch")
    operands = problem(random)
    wanted = naive(*operands)[0]
    q, k, v, *lists = map(torch.from_numpy, map(np.ascontiguousarray, operands))
    out = cqsa.attention_selected(q, k, v, *lists)
    assert isinstance(out, torch.Tensor) and out.dtype == torch.float32
    np.testing.assert_allclose(out.numpy(), wanted, atol=2e-5)
    half = cqsa.attention_selected(q.bfloat16(), k.bfloat16(), v.bfloat16(), *lists)
    assert half.dtype == torch.bfloat16
    np.testing.assert_allclose(half.float().numpy(), wanted, atol=0.05)


def test_bfloat16_by_name(random):
    q, k, v, table, cells, counts = problem(random)
    bits = [(np.ascontiguousarray(x).view(np.uint32) >> 16).astype(np.uint16) for x in (q, k, v)]
    cut = [(x.astype(np.uint32) << 16).view(np.float32) for x in bits]
    out = cqsa.attention_selected(*bits, table, cells, counts, dtype="bfloat16")
    assert out.dtype == np.uint16
    np.testing.assert_allclose((out.astype(np.uint32) << 16).view(np.float32), naive(*cut, table, cells, counts)[0], atol=0.02)


def test_wrong_lists_are_skipped_or_raised(random):
    q, k, v, table, cells, counts = problem(random)
    counts[:] = 9
    cells[2, 4] = cells[2, 3]
    without = np.delete(cells[2], 4)
    out = cqsa.attention_selected(q, k, v, table, cells, counts)
    np.testing.assert_allclose(out[2:3], naive(q[2:3], k, v, table, without[None], np.array([8]))[0], atol=2e-5)
    with pytest.raises(ValueError, match=r"args->cells\[2\]\[4\] is \d+, wanted more than the entry before it") as caught:
        cqsa.attention_selected(q, k, v, table, cells, counts, check=True)
    assert caught.value.status_name == "CQSA_ERROR_INDEX"


@pytest.mark.parametrize("change, text", [
    ({"precision": "f16"}, "precision is 'f16', wanted one of 'default', 'fast', 'split', 'f32'"),
    ({"kv_group": 48}, "kv_group is 48"),
    ({"kv_group": 64}, "args->kv_group is 64, wanted 0"),
    ({"softmax_scale": 0}, "softmax_scale is 0"),
    ({"softmax_scale": float("nan")}, "args->softmax_scale is nan"),
    ({"cells": np.zeros((5, 9))}, "cells is float64, wanted int32"),
    ({"cells": [[1 << 31] * 9] * 5}, "cells has 2147483648, which is no int32"),
    ({"counts": [1, 2]}, "args->counts has shape [2], wanted [5]"),
    ({"q": np.zeros((5, 6, 40), np.int8)}, "args->q is i8"),
    ({"q": np.zeros((5, 6), np.float32)}, "q has shape [5, 6]"),
    ({"q": np.zeros((5, 5, 40), np.float32)}, "is 5, wanted a multiple"),
    ({"out": np.zeros((5, 6, 39), np.float32)}, "args->out has shape [5, 6, 39]"),
    ({"out": np.zeros((5, 6, 40), np.float32), "return_lse": True}, "out is one array, wanted (out, lse)"),
    ({"k_scale": np.zeros((6, 4, 2, 1), np.float16)}, "args->k_scale is given, wanted NULL"),
])
def test_refusals(random, change, text):
    names = ("q", "k", "v", "page_table", "cells", "counts")
    operands = dict(zip(names, problem(random)), **change)
    with pytest.raises(cqsa.CqsaError) as caught:
        cqsa.attention_selected(**operands)
    assert text in str(caught.value)
