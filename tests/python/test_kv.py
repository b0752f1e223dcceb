# SPDX-License-Identifier: Apache-2.0
"""Key-value caches: numpy's own words for the formats, ggml's decoder and quantizer where gguf is installed, and bad input."""
import numpy as np
import pytest

import cqsa

PAGES, SIZE, HEADS = 5, 4, 2


def rotation(n):
    sign = np.array([[(-1.0) ** bin(a & b).count("1") for b in range(n)] for a in range(n)])
    return sign / np.sqrt(n)


def places(random, rows):
    """A table with a hole and a page twice as far as it should be, and cells that have no place; which rows have one, and where."""
    table = np.array([3, -1, 0, PAGES, 4])
    cells = random.permutation(5 * SIZE + 2)[:rows] - 1
    there = [(n, table[c // SIZE], c % SIZE) for n, c in enumerate(cells)
             if 0 <= c < 5 * SIZE and 0 <= table[c // SIZE] < PAGES]
    return table, cells, there


def close(got, wanted, most):
    np.testing.assert_allclose(got.astype(np.float64), wanted.astype(np.float64), rtol=0, atol=most)


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_elements_there_and_back(random, kind):
    x = random.standard_normal((15, HEADS, 33)).astype(np.float32)
    table, cells, there = places(random, 15)
    pool = np.full((PAGES, SIZE, HEADS, 33), 7, kind)
    wanted, back = pool.copy(), np.zeros_like(x, kind)
    for n, page, row in there:
        wanted[page, row], back[n] = x[n], x[n]
    assert cqsa.kv_append(x, pool, table, cells) is None
    np.testing.assert_array_equal(pool, wanted)
    got = cqsa.kv_gather(pool, table, cells)
    assert got.dtype == kind
    np.testing.assert_array_equal(got, back)
    np.testing.assert_array_equal(cqsa.kv_gather(pool, list(table), list(cells), out=np.full(x.shape, np.nan, np.float32)), back)


def test_bfloat16_by_name(random):
    x = random.standard_normal((4, HEADS, 8)).astype(np.float32)
    pool = np.zeros((1, 4, HEADS, 8), np.uint16)
    cqsa.kv_append(x, pool, [0], [0, 1, 2, 3], dtype="bfloat16")
    bits = x.view(np.uint32)
    wanted = ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(pool[0], wanted)
    got = cqsa.kv_gather(pool, [0], [3, 2, 1, 0], dtype="bfloat16")
    assert got.dtype == np.uint16
    np.testing.assert_array_equal(got, wanted[::-1])
    with pytest.raises(ValueError) as caught:
        cqsa.kv_append(x, pool, [0], [0, 1, 2, 3])
    assert caught.value.status_name == "CQSA_ERROR_DTYPE" and str(caught.value).startswith("pool is uint16")


@pytest.mark.parametrize("group", [32, None, 128])
def test_int8(random, group):
    step = group or 64
    dim = 100
    x = (random.standard_normal((15, HEADS, dim)) * 3).astype(np.float16)
    table, cells, there = places(random, 15)
    pool = random.integers(-128, 128, (PAGES, HEADS, SIZE, dim)).astype(np.int8).swapaxes(1, 2)  # page, head, row
    scale = np.full((PAGES, SIZE, HEADS, -(-dim // step)), 9, np.float16)
    codes, scales, back = pool.copy(), scale.copy(), np.zeros(x.shape, np.float32)
    for n, page, row in there:
        for c in range(0, dim, step):
            part = x[n, :, c:c + step].astype(np.float32)
            factor = (np.abs(part).max(-1) / np.float32(127)).astype(np.float16)
            scales[page, row, :, c // step] = factor
            code = np.clip(np.rint(part / factor.astype(np.float32)[:, None]), -127, 127)
            codes[page, row, :, c:c + step] = code
            back[n, :, c:c + step] = code * factor.astype(np.float32)[:, None]
    cqsa.kv_append(x, pool, table, cells, scale=scale, kv_group=group)
    np.testing.assert_array_equal(pool, codes)
    np.testing.assert_array_equal(scale, scales)
    got = cqsa.kv_gather(pool, table, cells, scale=scale, kv_group=group)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, back)


def test_q4_0_rotates(random):
    x = random.standard_normal((6, HEADS, 128)).astype(np.float32)
    pool = np.zeros((2, 3, HEADS, 72), np.uint8)
    cqsa.kv_append(x, pool, [1, 0], range(6), format="q4_0")
    rotated = cqsa.kv_gather(pool, [1, 0], range(6), format="q4_0")
    turned = x @ rotation(128)
    close(rotated, turned, np.abs(turned).max() / 7)  # blocks by their largest, a code is an eighth of it
    assert np.corrcoef(rotated.ravel(), turned.ravel())[0, 1] > 0.99
    close(cqsa.hadamard(rotated), rotated @ rotation(128), 1e-5)


def test_q4_0_is_that_of_ggml(random):
    """Bytes and values of blocks by the decoder and quantizer of gguf, an implementation of its own."""
    quants = pytest.importorskip("gguf.quants", reason="pip install gguf")
    from gguf.constants import GGMLQuantizationType

    size = 10.0 ** random.integers(-4, 4, (500, 1, 1))
    x = (random.standard_normal((500, 1, 256)) * size).astype(np.float32)
    x[7] = 0
    x[8], x[9] = np.sign(x[8]), np.round(x[9] * 2) / 2  # equals, and ties
    pool = np.zeros((1, 500, 1, 144), np.uint8)
    cqsa.kv_append(x, pool, [0], range(500), format="q4_0")
    turned = cqsa.hadamard(x)
    np.testing.assert_array_equal(pool[0, :, 0], quants.quantize(turned[:, 0], GGMLQuantizationType.Q4_0))
    decoded = quants.dequantize(pool[0, :, 0], GGMLQuantizationType.Q4_0)
    np.testing.assert_array_equal(cqsa.kv_gather(pool, [0], range(500), format="q4_0")[:, 0], decoded)


def test_hadamard(random):
    for n in (1, 2, 8, 64, 512):
        x = random.standard_normal((3, 2, n)).astype(np.float32)
        turned = cqsa.hadamard(x)
        close(turned, x @ rotation(n), 3e-6)
        close(cqsa.hadamard(turned), x, 3e-6)
        assert cqsa.hadamard(x, out=x) is x
        np.testing.assert_array_equal(x, turned)
        half = cqsa.hadamard(x[:, ::-1], out=np.empty((3, 2, n), np.float16))
        np.testing.assert_array_equal(half, cqsa.hadamard(x[:, ::-1].copy()).astype(np.float16))


def test_attention_over_a_cache(random):
    """A sequence appended to pools, and attention over them: int8 as attention reads it itself."""
    k, v = (random.standard_normal((19, HEADS, 64)).astype(np.float32) for _ in "kv")
    q = random.standard_normal((1, 2, 3, 64)).astype(np.float32)
    table = np.array([[4, 0, 2, 3, 1]], np.int32)
    pools, scales = [], []
    for x in (k, v):
        pools.append(np.zeros((5, 4, HEADS, 64), np.int8))
        scales.append(np.zeros((5, 4, HEADS, 1), np.float16))
        cqsa.kv_append(x, pools[-1], table[0], range(19), scale=scales[-1])
    out = cqsa.attention(q, *pools, k_scale=scales[0], v_scale=scales[1], page_table=table, seqused_k=[19])
    rows = [cqsa.kv_gather(pool, table[0], range(19), scale=scale).swapaxes(0, 1)[None] for pool, scale in zip(pools, scales)]
    close(out, cqsa.attention(q, *rows), 1e-5)


@pytest.mark.parametrize("name, text, call", [
    ("INVALID_ARGUMENT", "format is 'q8_0', wanted one of 'elements', 'q4_0'", {"format": "q8_0"}),
    ("INVALID_ARGUMENT", "kv_group is 48, wanted 32, 64 or 128", {"kv_group": 48}),
    ("INVALID_ARGUMENT", "args->kv_group is 32, but args->pool is f32, which has no scales", {"kv_group": 32}),
    ("INVALID_ARGUMENT", "args->scale is given, but args->pool is f32", {"scale": np.zeros((1, 4, 2, 1), np.float16)}),
    ("DTYPE", "pool is float32, wanted uint8 for format='q4_0'", {"format": "q4_0"}),
    ("DTYPE", "cells is float64, wanted int32 or int64", {"cells": [0.5, 1.0]}),
    ("SHAPE", "args->cells has shape [1], wanted [2] (rows)", {"cells": [1]}),
    ("INDEX", "page_table has the id -2", {"page_table": [-2]}),
])
def test_bad_input(name, text, call):
    pool = np.full((1, 4, 2, 8), 5, np.float32)
    arguments = {"page_table": [0], "cells": [0, 1], **call}
    with pytest.raises(ValueError) as caught:
        cqsa.kv_append(np.ones((2, 2, 8), np.float32), pool, **arguments)
    assert caught.value.status_name == "CQSA_ERROR_" + name and text in str(caught.value), str(caught.value)
    assert (pool == 5).all()


def test_outputs_must_be_writable():
    pool = np.zeros((1, 4, 2, 8), np.float32)
    pool.flags.writeable = False
    with pytest.raises(ValueError, match="pool is read-only"):
        cqsa.kv_append(np.ones((2, 2, 8), np.float32), pool, [0], [0, 1])
    with pytest.raises(ValueError, match="power of two"):
        cqsa.hadamard(np.ones((3, 12), np.float32))


def test_torch(random):
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(random.standard_normal((3, 2, 64)).astype(np.float32)).bfloat16()
    pool = torch.zeros(2, 2, 2, 64, dtype=torch.bfloat16)
    version = pool._version
    cqsa.kv_append(x, pool, torch.tensor([1, 0]), torch.tensor([2, 0, 1]))
    assert pool._version > version
    assert torch.equal(pool[0, 0], x[0]) and torch.equal(pool[1], x[1:])
    back = cqsa.kv_gather(pool, torch.tensor([1, 0]), torch.tensor([2, 0, 1]))
    assert type(back) is torch.Tensor and torch.equal(back, x)
    turned = cqsa.hadamard(x)
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned.double(), x.double() @ torch.from_numpy(rotation(64)), rtol=0.01, atol=0.01)
