# SPDX-License-Identifier: Apache-2.0
"""Every option of attention() against float64."""
import itertools

import numpy as np
import pytest

import cqsa
import exact


def problem(random, batch=2, heads=4, kv_heads=2, rows=37, keys=53, dim=40, dim_v=24):
    shapes = (batch, heads, rows, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, dim_v)
    return tuple(random.standard_normal(shape).astype(np.float32) for shape in shapes)


def check(q, k, v, **options):
    out, lse = cqsa.attention(q, k, v, return_lse=True, **options)
    wanted_out, wanted_lse = exact.attention(q, k, v, **options)
    exact.assert_close(out, wanted_out, q.dtype.name)
    exact.assert_close(lse, wanted_lse, "float64" if q.dtype == np.float64 else "float32")
    assert out.dtype == q.dtype and out.shape == wanted_out.shape


@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize("rows, keys", [(37, 53), (53, 37), (1, 70), (64, 64), (5, 1)])
def test_causal(random, causal, rows, keys):
    check(*problem(random, rows=rows, keys=keys), causal=causal)


@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize("window", [(3, 4), (-1, 2), (7, -1), (0, 0), (-1, -1), (1000, 1000)], ids=str)
def test_window(random, causal, window):
    check(*problem(random), causal=causal, window=window)


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (6, 6), (6, 3), (6, 1)])
def test_shared_key_heads(random, heads, kv_heads):
    check(*problem(random, heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize("dim, dim_v", [(1, 1), (8, 16), (64, 64), (128, 96), (192, 128), (576, 512)])
def test_head_dims(random, dim, dim_v):
    check(*problem(random, batch=1, rows=9, keys=33, dim=dim, dim_v=dim_v))


@pytest.mark.parametrize("options", [{"softmax_scale": 0.3}, {"softmax_scale": -0.1}, {"softcap": 2.5},
                                     {"softcap": 1.0, "softmax_scale": 1.0, "causal": "bottom_right"}])
def test_scale_and_softcap(random, options):
    check(*problem(random), **options)


def test_alibi(random):
    check(*problem(random), alibi_slopes=np.float32([0.5, 0.25, 0.1, 0]))
    check(*problem(random), alibi_slopes=random.random((2, 4), np.float32), causal="top_left")
    out = cqsa.attention(*problem(np.random.default_rng(3)), alibi_slopes=[0.5, 0.25, 0.125, 0])
    same = cqsa.attention(*problem(np.random.default_rng(3)), alibi_slopes=np.float64([0.5, 0.25, 0.125, 0]))
    np.testing.assert_array_equal(out, same)


def test_sinks(random):
    sinks = np.float32([1, -2, 0.5, 4])
    check(*problem(random), sinks=sinks)
    q, k, v = problem(random, rows=8, keys=3)
    out, lse = cqsa.attention(q, k, v, sinks=sinks, causal="bottom_right", return_lse=True)
    assert not out[:, :, :5].any()  # rows without a key
    np.testing.assert_allclose(lse[:, :, :5], np.broadcast_to(sinks[:, None], (2, 4, 5)), rtol=1e-6)


@pytest.mark.parametrize("shape", [(2, 4, 37, 53), (1, 4, 37, 53), (2, 1, 37, 53), (2, 4, 1, 53), (2, 4, 37, 1),
                                   (1, 1, 1, 1), (4, 37, 53), (37, 53), (1, 53), (53,), ()])
def test_mask_and_bias_broadcast_like_numpy(random, shape):
    q, k, v = problem(random)
    mask, bias = random.random(shape) > 0.3, random.standard_normal(shape).astype(np.float32)
    check(q, k, v, mask=mask)
    check(q, k, v, mask=np.where(mask, np.uint8(3), np.uint8(0)), bias=bias)
    check(q, k, v, bias=bias)
    check(q, k, v, mask=np.broadcast_to(mask, (2, 4, 37, 53)), bias=np.broadcast_to(bias, (2, 4, 37, 53)))


def test_mask_with_strides(random):
    q, k, v = problem(random)
    check(q, k, v, mask=(random.random((2, 4, 53, 37)) > 0.3).swapaxes(2, 3),
          bias=random.random((2, 4, 37, 106), np.float32)[..., ::-2])


def test_mask_uint8_keeps_its_meaning_with_dtype(random):
    q, k, v = problem(random)
    mask = (random.random((37, 53)) > 0.3).astype(np.uint8)
    out = cqsa.attention(q, k, v, mask=mask, dtype="float8_e4m3fn")
    np.testing.assert_array_equal(out, cqsa.attention(q, k, v, mask=mask))


@pytest.mark.parametrize("bias_dtype", [np.float16, np.float32])
def test_bias_dtypes(random, bias_dtype):
    q, k, v = (x.astype(np.float16) for x in problem(random))
    check(q, k, v, bias=random.standard_normal((4, 37, 53)).astype(bias_dtype))


def test_rows_without_keys(random):
    q, k, v = problem(random)
    mask = np.ones((2, 1, 37, 53), bool)
    mask[0, 0, 3:9] = False
    out, lse = cqsa.attention(q, k, v, mask=mask, return_lse=True)
    assert not out[0, :, 3:9].any() and np.isneginf(lse[0, :, 3:9]).all()
    check(q, k, v, mask=mask)


def test_hidden_keys_may_hold_nan(random):
    q, k, v = problem(random)
    wanted = cqsa.attention(q, k[:, :, :40], v[:, :, :40])
    k[:, :, 40:], v[:, :, 40:] = np.nan, np.inf
    exact.assert_close(cqsa.attention(q, k, v, mask=np.arange(53) < 40), wanted)


@pytest.mark.parametrize("batch, rows, keys", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (0, 0, 0)])
def test_empty_problems(random, batch, rows, keys):
    q, k, v = problem(random, batch=batch, rows=rows, keys=keys)
    out, lse = cqsa.attention(q, k, v, return_lse=True)
    assert out.shape == (batch, 4, rows, 24) and not out.any() and np.isneginf(lse).all()


# ------------------------------------------------------------------------------------------------------ element types


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_float_types(random, dtype):
    check(*(x.astype(dtype) for x in problem(random)), causal="bottom_right")


def test_bfloat16_as_uint16(random):
    q, k, v = (exact.to_bfloat16(x) for x in problem(random))
    out = cqsa.attention(q, k, v, dtype="bfloat16")
    assert out.dtype == np.uint16
    wanted, _ = exact.attention(*(exact.from_bfloat16(x) for x in (q, k, v)))
    exact.assert_close(exact.from_bfloat16(out), wanted, "bfloat16")
    wide = cqsa.attention(q, k, v, dtype="bfloat16", out=np.empty(out.shape, np.float32))
    exact.assert_close(wide, wanted, "bfloat16")  # the weights may have been rounded to bfloat16
    np.testing.assert_array_equal(exact.to_bfloat16(wide), out)


def test_float16_as_uint16(random):
    q, k, v = (x.astype(np.float16) for x in problem(random))
    out = cqsa.attention(*(x.view(np.uint16) for x in (q, k, v)), dtype=np.float16)
    np.testing.assert_array_equal(out.view(np.float16), cqsa.attention(q, k, v))


def test_ml_dtypes(random):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k, v = (x.astype(ml_dtypes.bfloat16) for x in problem(random))
    out = cqsa.attention(q, k, v)
    assert out.dtype == ml_dtypes.bfloat16
    same = cqsa.attention(*(x.view(np.uint16) for x in (q, k, v)), dtype="bfloat16")
    np.testing.assert_array_equal(out.view(np.uint16), same)
    assert cqsa.attention_plan(q, k, v).describe()["tasks"] >= 1
    k8, v8 = k.astype(ml_dtypes.float8_e4m3fn), v.astype(ml_dtypes.float8_e4m3fn)
    named = cqsa.attention(q.view(np.uint16), k8.view(np.uint8), v8.view(np.uint8), dtype=("bfloat16", "float8_e4m3fn"))
    np.testing.assert_array_equal(cqsa.attention(q, k8, v8).view(np.uint16), named)


@pytest.mark.parametrize("name, table, top", [("float8_e4m3fn", exact.e4m3fn_table(), 0x70), ("float8_e5m2", exact.e5m2_table(), 0x44)])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_float8(random, name, table, top, layout):
    q, _, _ = problem(random)
    k, v = (random.integers(0, top, (2, 2, 53, dim)).astype(np.uint8) | random.choice(np.uint8([0, 128]), (2, 2, 53, dim))
            for dim in (40, 24))
    scales = {"none": None, "one": 0.25, "heads": np.float32([0.25, 0.125]),
              "tokens": random.random((2, 2, 53), np.float32) / 4}
    turn = (lambda x: x.swapaxes(1, 2)) if layout == "bshd" else (lambda x: x)
    for k_scale, v_scale in itertools.product(scales.values(), scales.values()):
        def wide(x, scale):
            scale = 1.0 if scale is None else np.asarray(scale, np.float64)
            scale = scale[:, None, None] if np.ndim(scale) == 1 else scale[..., None] if np.ndim(scale) == 3 else scale
            return table[x] * scale

        def given(scale):
            return turn(scale) if np.ndim(scale) == 3 else scale

        out = cqsa.attention(turn(q), turn(k), turn(v), k_scale=given(k_scale), v_scale=given(v_scale), layout=layout,
                             dtype=name, softmax_scale=0.02)
        wanted, _ = exact.attention(q, wide(k, k_scale), wide(v, v_scale), softmax_scale=0.02)
        error = np.abs(turn(out) - wanted).max() / np.abs(wanted).max()
        assert error < 2e-5


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_int8(random, group, layout):
    q, _, _ = problem(random, dim=100)
    k, v = (random.integers(-127, 128, (2, 2, 53, dim)).astype(np.int8) for dim in (100, 70))
    scales = [(random.random((2, 2, 53, -(-dim // group))) / 64).astype(np.float16) for dim in (100, 70)]
    wide = [x * scale.astype(np.float64).repeat(group, -1)[..., :x.shape[-1]] for x, scale in zip((k, v), scales)]
    wanted, _ = exact.attention(q, *wide)
    turn = (lambda x: x.swapaxes(1, 2)) if layout == "bshd" else (lambda x: x)
    for kv_group in (group, None):
        out = cqsa.attention(turn(q), turn(k), turn(v), k_scale=turn(scales[0]), v_scale=turn(scales[1]), layout=layout,
                             kv_group=kv_group)
        exact.assert_close(turn(out), wanted)


# ------------------------------------------------------------------------------------------------------------- merge


def test_merge(random):
    q, k, v = problem(random)
    whole = cqsa.attention(q, k, v, return_lse=True)
    parts = [cqsa.attention(q, k[:, :, part], v[:, :, part], return_lse=True) for part in (slice(20), slice(20, None))]
    merged = cqsa.attention_merge(*parts[0], *parts[1])
    for got, wanted in zip(merged, whole):
        assert got.dtype == np.float32
        exact.assert_close(got, wanted)
    for got, wanted in zip(merged, cqsa.attention_merge(*parts[1], *parts[0])):
        np.testing.assert_array_equal(got, wanted)


def test_merge_with_an_empty_side(random):
    out, lse = random.random((3, 5, 7), np.float32), random.random((3, 5), np.float32)
    for nothing in (-np.inf, np.inf, np.nan):
        empty = np.full_like(out, np.nan), np.full_like(lse, nothing)
        for merged in (cqsa.attention_merge(out, lse, *empty), cqsa.attention_merge(*empty, out, lse)):
            np.testing.assert_array_equal(merged[0], out)
            np.testing.assert_array_equal(merged[1], lse)
    out, lse = cqsa.attention_merge(*empty, *empty)
    assert not out.any() and np.isneginf(lse).all()


def test_merge_takes_any_strides(random):
    out, lse = random.random((2, 5, 3, 7), np.float32), random.random((2, 5, 3), np.float32)
    got = cqsa.attention_merge(out[::-1].swapaxes(1, 2), lse[::-1].swapaxes(1, 2), out[:1, :3, :, ::-1].swapaxes(1, 2)[
        :, :, :1].repeat(5, 2).repeat(2, 0), np.broadcast_to(np.float32(0.5), (2, 3, 5)))
    packed = cqsa.attention_merge(out[::-1].swapaxes(1, 2).copy(), lse[::-1].swapaxes(1, 2).copy(),
                                  out[:1, :1, :, ::-1].swapaxes(1, 2).repeat(5, 2).repeat(2, 0).copy(),
                                  np.full((2, 3, 5), 0.5, np.float32))
    np.testing.assert_array_equal(got[0], packed[0])
    np.testing.assert_array_equal(got[1], packed[1])


def test_merge_refuses_wrong_shapes(random):
    out, lse = random.random((3, 5, 7), np.float32), random.random((3, 5), np.float32)
    with pytest.raises(ValueError) as caught:
        cqsa.attention_merge(out, lse, out[:2], lse[:2])
    assert caught.value.status_name == "CQSA_ERROR_SHAPE"
    with pytest.raises(ValueError) as caught:
        cqsa.attention_merge(out.astype(np.float64), lse, out, lse)
    assert caught.value.status_name == "CQSA_ERROR_DTYPE"
