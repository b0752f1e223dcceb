# SPDX-License-Identifier: Apache-2.0
"""FP8: tables of codes in numpy's own words, ml_dtypes where it is installed, rings against lists, products against float64, and bad input."""
import copy
import pickle
import threading

import numpy as np
import pytest

import cqsa

FORMATS = {"e4m3fn": (3, 7, 448.0), "e5m2": (2, 15, 57344.0), "e4m3fnuz": (3, 8, 240.0), "e5m2fnuz": (2, 16, 57344.0)}


def table(name):
    """The values of the codes 0 to 127 that are finite."""
    bits, bias, largest = FORMATS[name]
    code = np.arange(128)
    exponent, mantissa = code >> bits, (code & (1 << bits) - 1).astype(np.float64)
    value = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias - bits), (mantissa + (1 << bits)) * 2.0 ** (exponent - bias - bits))
    return value[value <= largest]


def decoded(codes, name):
    codes = np.asarray(codes).view(np.uint8)
    values = table(name)
    full = np.full(256, np.nan)
    full[:len(values)] = values
    full[128:128 + len(values)] = -values
    if name == "e5m2":
        full[[0x7C, 0xFC]] = np.inf, -np.inf
    if name.endswith("fnuz"):
        full[0x80] = np.nan
    return full[codes]


def encoded(x, name):
    """Nearest of the table, ties to even codes, saturated; NaN is 0x7f or 0x80."""
    values, x = table(name), np.asarray(x, np.float32)
    size = np.minimum(np.nan_to_num(np.abs(x).astype(np.float64), nan=0, posinf=values[-1]), values[-1])
    above = np.clip(np.searchsorted(values, size), 1, len(values) - 1)
    low, high = values[above - 1], values[above]
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    code = np.where(up, above, above - 1)
    negative = np.signbit(x) & ((code > 0) | (not name.endswith("fnuz")))
    code = (code + 128 * negative).astype(np.uint8)
    return np.where(np.isnan(x), 0x80 if name.endswith("fnuz") else 0x7F, code).astype(np.uint8)


def rows(random, shape=(70, 96), spread=6):
    return (random.standard_normal(shape) * 2.0 ** random.integers(-spread, spread, shape)).astype(np.float32)


def per_element(scales, block, shape):
    down, across = (size if step == 0 else step for size, step in zip(shape, block))
    return np.repeat(np.repeat(scales.reshape(-(-shape[0] // down), -(-shape[1] // across)), down, 0), across, 1)[:shape[0], :shape[1]]


def amaxes(x, block):
    down, across = (size if step == 0 else step for size, step in zip(x.shape, block))
    return np.array([[np.abs(x[r:r + down, c:c + across]).max() for c in range(0, x.shape[1], across)] for r in range(0, x.shape[0], down)])


# ------------------------------------------------------------------------------------------------------------- codes


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_comes_back(name):
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    values = cqsa.fp8_dequantize(codes, format=name)
    np.testing.assert_array_equal(values, decoded(codes, name).astype(np.float32))
    finite = np.isfinite(values)
    back = cqsa.fp8_quantize(np.where(finite, values, 0), format=name, scale=1.0)
    np.testing.assert_array_equal(back.data[finite], codes[finite])


@pytest.mark.parametrize("name", FORMATS)
def test_ties_and_neighbours(name):
    values = table(name)
    middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    x = np.concatenate([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf)), [1e30, np.inf, np.nan, 0, 1e-45]])
    x = np.stack([x, -x]).astype(np.float32)
    q = cqsa.fp8_quantize(x, format=name, scale=1.0)
    wanted = encoded(x, name)
    same = (q.data == wanted) | (np.isnan(decoded(q.data, name)) & np.isnan(x))
    assert same.all(), (x[~same], q.data[~same], wanted[~same])


@pytest.mark.parametrize("name", FORMATS)
def test_ml_dtypes_says_the_same(random, name):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="pip install ml_dtypes")
    kind = np.dtype(getattr(ml_dtypes, "float8_" + name))
    largest = FORMATS[name][2]
    x = np.clip(random.integers(0, 1 << 32, (512, 512), dtype=np.uint32).view(np.float32), -largest, largest)
    x[np.isnan(x)] = 1
    out = np.empty(x.shape, kind)
    q = cqsa.fp8_quantize(x, format=kind, scale=1.0, out=out)
    assert q.data is out and q.format == name
    np.testing.assert_array_equal(out.view(np.uint8), x.astype(kind).view(np.uint8))
    np.testing.assert_array_equal(cqsa.fp8_dequantize(out), out.astype(np.float32))


def test_without_saturation():
    x = np.array([[500, -500, 1e30, np.inf, 448, 1]], np.float32)
    assert np.isnan(decoded(cqsa.fp8_quantize(x, scale=1.0, saturate=False).data, "e4m3fn")).sum() == 4
    wide = cqsa.fp8_quantize(x * 1000, format="e5m2", scale=1.0, saturate=False).data
    np.testing.assert_array_equal(np.isinf(decoded(wide, "e5m2")), [[True, True, True, True, True, False]])


# ------------------------------------------------------------------------------------------------------------- scales

BLOCKS = [("tensor", (0, 0)), ("row", (1, 0)), ("col", (0, 1)), ("1x128", (1, 128)), ("128x128", (128, 128)), ("1x48", (1, 48)), ((16, 1), (16, 1))]


@pytest.mark.parametrize("kind", ["float32", "float16"])
@pytest.mark.parametrize("granularity, block", BLOCKS)
@pytest.mark.parametrize("layout", ["row", "transposed", "dual"])
def test_granularities(random, granularity, block, layout, kind):
    x = rows(random, (150, 201)).astype(kind)
    q = cqsa.fp8_quantize(x, granularity=granularity, layout=layout, format_transposed="e5m2")
    for matrix, codes, inverse, name in ((x, q.data, q.scale_inv, q.format), (x.T, q.data_t, q.scale_inv_t, q.format_t)):
        if codes is None:
            continue
        most = amaxes(matrix.astype(np.float32), block)
        scale = np.float32(FORMATS[name][2]) / most
        np.testing.assert_array_equal(np.asarray(inverse).reshape(most.shape), np.float32(1) / scale)
        product = matrix.astype(np.float32) * per_element(scale, block, matrix.shape)
        np.testing.assert_array_equal(codes, encoded(product, name))
        assert codes.dtype == np.uint8 and codes.shape == matrix.shape
    assert (q.data is None) == (layout == "transposed") and (q.data_t is None) == (layout == "row")
    assert q.amax == np.abs(x).max() and q.amax.dtype == np.float32 and q.flags is None
    first = q.scale_inv if q.data is not None else q.scale_inv_t
    np.testing.assert_array_equal(np.float32(1) / q.scale, first)
    back = cqsa.fp8_dequantize(q, out_dtype=kind)
    assert back.shape == x.shape and back.dtype == kind
    assert np.abs(back - x).max() <= np.abs(x).max() / 7
    if layout == "dual":
        np.testing.assert_array_equal(cqsa.fp8_dequantize(q.t), (decoded(q.data_t, "e5m2").astype(np.float32) *
                                                                 per_element(np.asarray(q.scale_inv_t), block, x.T.shape)))


def test_powers_of_two(random):
    x = rows(random, (64, 160))
    q = cqsa.fp8_quantize(x, granularity="1x32", pow2=True)
    wanted = 2.0 ** np.ceil(np.log2(amaxes(x, (1, 32)).astype(np.float64) / 448))
    np.testing.assert_array_equal(q.scale_inv, wanted.astype(np.float32))
    mx = cqsa.fp8_quantize(x, granularity="mx")
    assert mx.scale_inv.dtype.itemsize == 1 and mx.granularity == "mx"
    np.testing.assert_array_equal(mx.data, q.data)
    np.testing.assert_array_equal(2.0 ** (mx.scale_inv.view(np.uint8).astype(int) - 127), wanted)
    np.testing.assert_array_equal(cqsa.fp8_dequantize(mx), cqsa.fp8_dequantize(q))


@pytest.mark.parametrize("layout", ["columns", "packed", "tiled"])
@pytest.mark.parametrize("which", ["row", "transposed", "dual"])
def test_scale_layouts(random, layout, which):
    x = rows(random, (150, 300))
    granularity = "1x128" if layout == "columns" else "mx"
    plain = cqsa.fp8_quantize(x, granularity=granularity, layout=which)
    q = cqsa.fp8_quantize(x, granularity=granularity, layout=which, scale_layout=layout)
    np.testing.assert_array_equal(cqsa.fp8_dequantize(q), cqsa.fp8_dequantize(plain))
    for shape, one, other in (((150, 300), q.scale_inv, plain.scale_inv), ((300, 150), q.scale_inv_t, plain.scale_inv_t)):
        if one is None:
            continue
        grid = shape[0], -(-shape[1] // (128 if layout == "columns" else 32))
        if layout == "columns":
            assert one.strides == (4, -(-grid[0] // 4) * 16)
            np.testing.assert_array_equal(one, other)
        for dtype in ("float32", "e8m0") if layout != "columns" else ("float32",):
            back = cqsa.fp8_scale_relayout(one, *grid, layout=layout, dtype_out=dtype)
            wanted = other if dtype == "e8m0" or other.dtype == np.float32 else np.ldexp(np.float32(1), other.view(np.uint8).astype(int) - 127)
            np.testing.assert_array_equal(back.view(np.uint8) if dtype == "e8m0" else back, wanted.view(np.uint8) if dtype == "e8m0" else wanted)
        if layout == "packed":
            bytes_of = np.ascontiguousarray(one).view(np.uint8)
            np.testing.assert_array_equal(bytes_of[:, :grid[1]], other.view(np.uint8))
        if layout == "tiled":
            r, c = np.indices(grid)
            at = (r // 128 * -(-grid[1] // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
            np.testing.assert_array_equal(one.view(np.uint8)[at], other.view(np.uint8))


def test_margin_eps_limit_and_given_scales(random):
    x = rows(random, (20, 64), 1)
    most = np.abs(x).max()
    np.testing.assert_array_equal(cqsa.fp8_quantize(x, margin=2).scale, np.float32(448) / most / 4)
    np.testing.assert_array_equal(cqsa.fp8_quantize(x, eps=100.0).scale, np.float32(4.48))
    np.testing.assert_array_equal(cqsa.fp8_quantize(x, amax_limit=0.5).scale, np.float32(896))
    given = (random.random((20, 1)) * 100 + 1).astype(np.float32)
    q = cqsa.fp8_quantize(x, scale=given, granularity="row")
    assert q.scale is given
    np.testing.assert_array_equal(q.scale_inv, 1 / given)
    np.testing.assert_array_equal(q.data, encoded(x * given, "e4m3fn"))
    both = cqsa.fp8_quantize(x, scale=np.ones((1, 1), np.float32) * 3, granularity="128x128", layout="dual")
    np.testing.assert_array_equal(both.data_t, both.data.T)
    scale, inverse = cqsa.fp8_scale_from_amax(np.array([[2.0, 0.0, np.inf]], np.float32), format="e5m2", margin=1)
    np.testing.assert_array_equal(scale, [[14336, 1, 1]])
    np.testing.assert_array_equal(inverse, np.float32(1) / scale)


def test_amax_and_nan(random):
    x = rows(random, (30, 256))
    np.testing.assert_array_equal(cqsa.fp8_amax(x, granularity="1x128"), amaxes(x, (1, 128)))
    assert cqsa.fp8_amax(x) == np.abs(x).max()
    x[3, 5], x[4, 6], x[7, 8] = np.nan, np.inf, 1e30
    assert np.isnan(cqsa.fp8_amax(x)) and cqsa.fp8_amax(x, nan="ignore") == np.float32(1e30)
    q = cqsa.fp8_quantize(x, nan="flag", scale=1.0)
    assert np.isnan(q.amax) and q.flags.dtype == np.int64
    rest = np.isfinite(x) & (np.abs(x) > 464)
    np.testing.assert_array_equal(q.flags, [1, 1, rest.sum(), 0])
    cqsa.fp8_quantize(x, flags=q.flags, scale=1.0)
    np.testing.assert_array_equal(q.flags, [2, 2, 2 * rest.sum(), 0])
    ignoring = cqsa.fp8_quantize(x, nan="ignore", return_amax=False)
    assert ignoring.amax is None and ignoring.scale == np.float32(448) / np.float32(1e30)
    assert np.isnan(cqsa.fp8_dequantize(ignoring)[3, 5])


def test_skip_sums_groups_and_random_rounding(random):
    x = rows(random, (24, 40), 2)
    out, sums = np.full(x.shape, 9, np.uint8), np.zeros(40, np.float32)
    q = cqsa.fp8_quantize(x, skip=np.ones(1, np.int32), out=out)
    assert (out == 9).all() and q.data is out
    cqsa.fp8_quantize(x, skip=[0], out=out, column_sum=sums)
    np.testing.assert_allclose(sums, x.sum(0), rtol=1e-5, atol=1e-4)
    grouped = cqsa.fp8_quantize(x, groups=[0, 7, 7, 20], out=np.full(x.shape, 9, np.uint8))
    assert grouped.scale_inv.shape == (3, 1) and (grouped.data[20:] == 9).all()
    one = cqsa.fp8_quantize(x[7:20])
    np.testing.assert_array_equal(grouped.data[7:20], one.data)
    np.testing.assert_array_equal(grouped.scale_inv[2, 0], one.scale_inv)
    back = cqsa.fp8_dequantize(grouped, out=np.zeros_like(x))
    np.testing.assert_array_equal(back[7:20], cqsa.fp8_dequantize(one))
    many = np.full((64, 512), 1.0 + 1 / 32, np.float32)  # a quarter of the way from 1 to 1.125
    drawn = cqsa.fp8_quantize(many, scale=1.0, rng=(5, 0))
    again = cqsa.fp8_quantize(many, scale=1.0, rng=np.array([5, 0]))
    np.testing.assert_array_equal(drawn.data, again.data)
    assert set(np.unique(drawn.data)) == {0x38, 0x39} and 0.22 < (drawn.data == 0x39).mean() < 0.28
    assert (cqsa.fp8_quantize(many, scale=1.0, rng=(6, 0)).data != drawn.data).any()
    unsigned = cqsa.fp8_quantize(many, scale=1.0, rng=[2**63, 2**64 - 8])
    np.testing.assert_array_equal(unsigned.data, cqsa.fp8_quantize(many, scale=1.0, rng=np.array([-2**63, -8])).data)


@pytest.mark.parametrize("scale_layout", ["rows", "columns", "packed", "tiled"])
def test_groups_of_transposed_codes(random, scale_layout):
    x = rows(random, (20, 40), 2)
    options = {"groups": [0, 7, 7, 20], "pow2": True, **({"scale_dtype": "e8m0"} if scale_layout in ("packed", "tiled") else {})}
    wanted = cqsa.fp8_dequantize(cqsa.fp8_quantize(x, **options))
    for layout in ("transposed", "dual"):
        q = cqsa.fp8_quantize(x, layout=layout, scale_layout=scale_layout, **options)
        np.testing.assert_array_equal(cqsa.fp8_dequantize(q), wanted)
        np.testing.assert_array_equal(cqsa.fp8_dequantize(q.t), wanted.T)
        with pytest.raises(ValueError, match="each group of rows"):
            cqsa.fp8_requantize(q)


def test_silu(random):
    x, up = rows(random, (20, 64), 2), rows(random, (20, 64), 2)
    q = cqsa.fp8_quantize(x, up=up)
    product = x / (1 + np.exp(-x.astype(np.float64))) * up
    np.testing.assert_allclose(q.amax, np.abs(product).max(), rtol=1e-5)
    assert np.abs(cqsa.fp8_dequantize(q) - product).max() <= np.abs(product).max() / 15


# ------------------------------------------------------------------------------------------------------------- shapes


def test_batches_strides_and_empty(random):
    x = rows(random, (3, 20, 64))
    q = cqsa.fp8_quantize(x, layout="dual")
    flat = cqsa.fp8_quantize(x.reshape(60, 64), layout="dual")
    assert q.data.shape == x.shape and q.data_t.shape == (64, 60) and q.shape == x.shape
    np.testing.assert_array_equal(q.data.reshape(60, 64), flat.data)
    np.testing.assert_array_equal(q.data_t, flat.data_t)
    only = cqsa.fp8_quantize(x, layout="transposed")
    np.testing.assert_array_equal(cqsa.fp8_dequantize(only), cqsa.fp8_dequantize(q))
    view = rows(random, (80, 130))[::-2, 1::2].T
    np.testing.assert_array_equal(cqsa.fp8_quantize(view, layout="dual").data, cqsa.fp8_quantize(view.copy(), layout="dual").data)
    out = np.zeros((65, 90), np.uint8)[:, 3:43]
    cqsa.fp8_quantize(view, out=out)
    np.testing.assert_array_equal(out, cqsa.fp8_quantize(view.copy()).data)
    for shape in ((0, 5), (5, 0)):
        empty = cqsa.fp8_quantize(np.empty(shape, np.float32), layout="dual")
        assert empty.data.shape == shape and empty.data_t.shape == shape[::-1] and empty.amax == 0 and empty.scale == 1


def test_transpose_and_requantize(random):
    x = rows(random, (70, 129))
    q = cqsa.fp8_quantize(x, granularity="row")
    np.testing.assert_array_equal(cqsa.fp8_transpose(q.data), q.data.T)
    r = cqsa.fp8_requantize(q, format="e5m2", layout="dual")
    values = cqsa.fp8_dequantize(q)
    wanted = cqsa.fp8_quantize(values, format="e5m2", layout="dual")
    np.testing.assert_array_equal(r.data, wanted.data)
    np.testing.assert_array_equal(r.data_t, wanted.data_t)
    raw = cqsa.fp8_requantize(q.data, scale_inv=q.scale_inv, source_format="e4m3fn", format="e5m2")
    np.testing.assert_array_equal(raw.data, wanted.data)
    listed = cqsa.fp8_requantize(cqsa.fp8_quantize(x, granularity="row").data, scale_inv=[[2.0]] * len(x), source_format="e4m3fn", granularity="row")
    assert listed.scale_inv.shape == (len(x), 1)
    mx = cqsa.fp8_requantize(cqsa.fp8_quantize(x, granularity="mx"), granularity="1x128")
    assert mx.data.shape == x.shape


def test_many(random):
    xs = [rows(random, (n, 48)) for n in (3, 70, 20)]
    rings = [cqsa.Ring(4, amax=float(n + 1)) for n in range(3)]
    together = cqsa.fp8_quantize_many(xs, scale=rings, layout="dual")
    for n, (x, q) in enumerate(zip(xs, together)):
        alone = cqsa.fp8_quantize(x, scale=cqsa.Ring(4, amax=float(n + 1)), layout="dual")
        np.testing.assert_array_equal(q.data, alone.data)
        np.testing.assert_array_equal(q.data_t, alone.data_t)
        assert q.amax == alone.amax == rings[n].read().history[0]
    assert cqsa.fp8_quantize_many([]) == []
    for name, array in (("flags", np.zeros(4, np.int64)), ("column_sum", np.zeros(64, np.float32))):
        with pytest.raises(ValueError, match=f"{name} is one array"):
            cqsa.fp8_quantize_many(xs, **{name: array})


@pytest.mark.parametrize("granularity", ["tensor", "row", "col", "1x128", "128x128", "mx"])
@pytest.mark.parametrize("shape", [(64, 130), (2, 32, 130)])
def test_requantize_transposed_codes_alone(random, granularity, shape):
    x = rows(random, shape, 2)
    q = cqsa.fp8_quantize(x, layout="transposed", granularity=granularity)
    numbers = cqsa.fp8_dequantize(q).reshape(64, 130)
    got, wanted = cqsa.fp8_requantize(q, granularity="1x64"), cqsa.fp8_quantize(numbers, granularity="1x64")
    np.testing.assert_array_equal(got.data, wanted.data)
    np.testing.assert_array_equal(got.scale_inv, wanted.scale_inv)
    np.testing.assert_array_equal(cqsa.fp8_requantize(q.t, granularity="1x64").data, cqsa.fp8_quantize(numbers.T, granularity="1x64").data)


# ------------------------------------------------------------------------------------------------------------- rings


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("margin, pow2", [(0, False), (1, False), (-1, True)])
def test_ring_is_a_list(random, algo, margin, pow2):
    ring = cqsa.Ring(3, "e5m2", margin, algo, pow2=pow2, amax=2.0)
    history, index, refused = np.zeros(3, np.float32), 0, 0
    scale = cqsa.fp8_scale_from_amax([2.0], format="e5m2", margin=margin, pow2=pow2)[0][0]
    for turn in range(8):
        x = rows(random, (20, 33), 1) * np.float32(2.0 ** random.integers(-8, 8))
        if turn == 4:
            x[:] = 0
        if turn == 6:
            x[3, 3] = np.inf
        q = cqsa.fp8_quantize(x, format="e5m2", scale=ring)
        assert q.scale == scale and q.scale_inv == np.float32(1) / scale
        np.testing.assert_array_equal(q.data, encoded(x * scale, "e5m2"))
        most = np.abs(x).max()
        assert q.amax == most
        if np.isfinite(most):
            history[index], index = most, (index + 1) % 3
            decisive = history.max() if algo == "max" else most
            if decisive > 0:
                scale = cqsa.fp8_scale_from_amax([decisive], format="e5m2", margin=margin, pow2=pow2)[0][0]
        else:
            refused += 1
        info = ring.read()
        assert (info.index, info.refused, info.staged, info.scale) == (index, refused, 0, scale)
        np.testing.assert_array_equal(info.history, history)


def test_stage_and_fold(random):
    rings = [cqsa.Ring(4).begin(np.empty(0, np.float32)), cqsa.Ring(4).begin(np.empty(0, np.float32)), cqsa.Ring(4).begin(np.empty(0, np.float32))]
    most = np.zeros(3, np.float32)
    for n in (0, 0, 1):
        x = rows(random)
        cqsa.fp8_quantize(x, scale=rings[n], stage=True)
        most[n] = max(most[n], np.abs(x).max())
    np.testing.assert_array_equal(cqsa.fp8_ring_staged(rings), most)
    cqsa.fp8_ring_fold(rings)
    assert [ring.read().index for ring in rings] == [1, 1, 0]
    assert [ring.read().history[0] for ring in rings] == list(most)
    np.testing.assert_array_equal(cqsa.fp8_ring_staged(rings, out=np.ones(3, np.float32)), np.zeros(3))
    cqsa.fp8_quantize(rows(random), scale=rings[2], stage=True)
    cqsa.fp8_ring_fold(rings, np.array([7, 8, 9], np.float32))  # as after an all-reduce
    assert [ring.read().history.max() for ring in rings] == [max(most[0], 7), max(most[1], 8), 9]
    assert rings[2].read().staged == 0
    cqsa.fp8_ring_fold([])
    with pytest.raises(ValueError, match="twice|same|named|and rings"):
        cqsa.fp8_ring_fold([rings[0], rings[0]])


def test_ring_is_saved_and_restored(random):
    ring = cqsa.Ring(5, margin=1)
    fresh = copy.deepcopy(ring)
    assert fresh.save() == b"" and fresh.margin == 1
    for _ in range(3):
        cqsa.fp8_quantize(rows(random), scale=ring)
    state, twin = ring.save(), pickle.loads(pickle.dumps(ring))
    x = rows(random)
    np.testing.assert_array_equal(cqsa.fp8_quantize(x, scale=ring).data, cqsa.fp8_quantize(x, scale=twin).data)
    assert ring.save() == twin.save() != state
    ring.load(state)
    assert ring.save() == state
    cqsa.fp8_quantize(x, scale=ring)
    assert ring.save() == twin.save()
    with pytest.raises(ValueError, match="another hist_len"):
        cqsa.Ring(6).load(state)


def test_rings_of_threads(random):
    x = rows(random, (200, 300))
    rings = [cqsa.Ring(4) for _ in range(8)]
    failures = []

    def work(ring):
        try:
            for _ in range(5):
                cqsa.fp8_quantize(x, scale=ring, layout="dual")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(ring,)) for ring in rings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len({ring.save() for ring in rings}) == 1


# ------------------------------------------------------------------------------------------------------------- products


def product_of(a, b, **options):
    return cqsa.fp8_gemm(a, b, out_dtype="float32", **options)


def close(got, wanted, most=1e-5):
    assert np.sqrt(np.mean((got - wanted) ** 2)) <= most * np.sqrt(np.mean(wanted**2)), np.abs(got - wanted).max()


@pytest.mark.parametrize("granularity_a, granularity_b", [("tensor", "tensor"), ("row", "row"), ("1x128", "128x128"), ("1x128", "1x128"), ("mx", "tensor")])
def test_gemm(random, granularity_a, granularity_b):
    a, b = rows(random, (37, 300), 1), rows(random, (65, 300), 1)
    qa, qb = cqsa.fp8_quantize(a, granularity=granularity_a), cqsa.fp8_quantize(b, granularity=granularity_b, format="e5m2")
    if granularity_a == "mx":
        with pytest.raises(ValueError):
            product_of(qa, qb)
        return
    wanted = cqsa.fp8_dequantize(qa).astype(np.float64) @ cqsa.fp8_dequantize(qb).astype(np.float64).T
    close(product_of(qa, qb), wanted)
    close(product_of(qa.data, qb.data, scale_inv_a=qa.scale_inv, scale_inv_b=qb.scale_inv, format_a="e4m3fn", format_b="e5m2"), wanted)
    bias = random.standard_normal(65).astype(np.float32)
    out = np.empty((37, 65), np.float16)
    assert cqsa.fp8_gemm(qa, qb, bias=bias, out=out, alpha=0.5) is out
    close(out.astype(np.float64), wanted / 2 + bias, 1e-3)
    c = random.standard_normal((37, 65)).astype(np.float32)
    close(product_of(qa, qb, c=c), wanted + c)
    close(product_of(qa, qb, c=c, beta=-2.0), wanted - 2 * c)
    assert cqsa.fp8_gemm_explain(qa, qb).startswith("impl=")


def test_gemm_of_both_sides_and_batches(random):
    x, dy = rows(random, (60, 70), 1), rows(random, (60, 40), 1)
    qx, qdy = cqsa.fp8_quantize(x, layout="dual"), cqsa.fp8_quantize(dy, layout="dual", format="e5m2")
    close(product_of(qdy.t, qx.t), cqsa.fp8_dequantize(qdy).astype(np.float64).T @ cqsa.fp8_dequantize(qx))
    a = rows(random, (4, 20, 48), 1)
    qa, qb = cqsa.fp8_quantize(a), cqsa.fp8_quantize(rows(random, (30, 48), 1))
    got = product_of(qa, qb)
    assert got.shape == (4, 20, 30)
    close(got, cqsa.fp8_dequantize(qa).astype(np.float64) @ cqsa.fp8_dequantize(qb).T)
    bits = cqsa.fp8_gemm(qa, qb)
    assert bits.shape == got.shape and bits.dtype.itemsize == 2


def test_gemm_to_codes(random):
    a, b = cqsa.fp8_quantize(rows(random, (20, 64), 1)), cqsa.fp8_quantize(rows(random, (30, 64), 1))
    exact = product_of(a, b)
    codes, amax = cqsa.fp8_gemm(a, b, out_dtype="e5m2", scale_out=2.0, return_amax=True)
    np.testing.assert_allclose(amax, np.abs(exact).max(), rtol=1e-6)
    assert codes.dtype == np.uint8
    np.testing.assert_allclose(decoded(codes, "e5m2") / 2, exact, rtol=0.13, atol=1e-4)
    empty = cqsa.fp8_gemm(np.empty((5, 0), np.uint8), np.empty((6, 0), np.uint8), format_a="e4m3fn", format_b="e4m3fn", out_dtype="float32",
                          bias=np.arange(6, dtype=np.float32))
    np.testing.assert_array_equal(empty, np.broadcast_to(np.arange(6), (5, 6)))


# ------------------------------------------------------------------------------------------------------------- arrays


def test_outputs_of_the_caller(random):
    x = rows(random)
    first = cqsa.fp8_quantize(x, layout="dual", nan="flag")
    other = rows(random)
    second = cqsa.fp8_quantize(other, layout="dual", out=first, flags=first.flags)
    for field in ("data", "data_t", "scale", "scale_inv", "scale_inv_t", "amax"):
        assert getattr(second, field) is getattr(first, field), field
    np.testing.assert_array_equal(cqsa.fp8_dequantize(first), cqsa.fp8_dequantize(cqsa.fp8_quantize(other)))
    pair = np.empty(x.shape, np.uint8), np.empty(x.shape[::-1], np.uint8)
    q = cqsa.fp8_quantize(x, layout="dual", out=pair)
    assert q.data is pair[0] and q.data_t is pair[1]
    np.testing.assert_array_equal(pair[0].T, pair[1])


def test_bfloat16_bits(random):
    x = rows(random)
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)
    q = cqsa.fp8_quantize(bits, dtype="bfloat16")
    np.testing.assert_array_equal(q.data, cqsa.fp8_quantize((bits.astype(np.uint32) << 16).view(np.float32)).data)


def test_torch(random):
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(rows(random))
    q = cqsa.fp8_quantize(x.bfloat16(), layout="dual", granularity="1x128")
    assert type(q.data) is torch.Tensor and q.data.dtype == torch.uint8 and q.scale_inv.dtype == torch.float32
    np.testing.assert_array_equal(q.data.numpy(), cqsa.fp8_quantize(x.bfloat16().float().numpy(), granularity="1x128").data)
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    version = out._version
    q = cqsa.fp8_quantize(x, out=out, scale=1.0)
    assert out._version > version and torch.equal(out.view(torch.uint8), x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    y = cqsa.fp8_gemm(out, out, out_dtype=torch.bfloat16)
    assert y.dtype == torch.bfloat16
    ring = cqsa.Ring(4)
    cqsa.fp8_quantize(x, scale=ring)
    assert ring.read().history[0] == x.abs().max()


# ------------------------------------------------------------------------------------------------------------- bad input

ONES = np.ones((4, 64), np.float32)


@pytest.mark.parametrize("name, text, options", [
    ("DTYPE", "format is 'e3m4', wanted one of 'e4m3fn'", {"format": "e3m4"}),
    ("INVALID_ARGUMENT", "granularity is 'each'", {"granularity": "each"}),
    ("INVALID_ARGUMENT", "layout is 'both'", {"layout": "both"}),
    ("INVALID_ARGUMENT", "nan is 'loud'", {"nan": "loud"}),
    ("INVALID_ARGUMENT", "scale_layout is 'spiral'", {"scale_layout": "spiral"}),
    ("SHAPE", "x has shape [4]", {"x": np.ones(4, np.float32)}),
    ("DTYPE", "x is int32", {"x": np.ones((4, 4), np.int32)}),
    ("SHAPE", "scale", {"scale": np.ones((3, 1), np.float32), "granularity": "row"}),
    ("INVALID_ARGUMENT", "scale", {"scale": -1.0}),
    ("INVALID_ARGUMENT", "scale", {"scale": float("nan")}),
    ("DTYPE", "the ring is of e5m2, but the codes are e4m3fn", {"scale": cqsa.Ring(4, "e5m2")}),
    ("INVALID_ARGUMENT", "CQSA_FP8_RING", {"scale": cqsa.Ring(4), "granularity": "row"}),
    ("DTYPE", "out is float32", {"out": np.ones((4, 64), np.float32)}),
    ("SHAPE", "out", {"out": np.ones((64, 4), np.uint8)}),
    ("INVALID_ARGUMENT", "out is one array, wanted (data, data_t)", {"out": np.ones((4, 64), np.uint8), "layout": "dual"}),
    ("INVALID_ARGUMENT", "margin", {"margin": 65}),
    ("INVALID_ARGUMENT", "margin is 'a', wanted an integer", {"margin": "a"}),
    ("INVALID_ARGUMENT", "eps", {"eps": -1.0}),
])
def test_bad_input(name, text, options):
    arguments = {"x": ONES, **options}
    with pytest.raises(ValueError) as caught:
        cqsa.fp8_quantize(arguments.pop("x"), **arguments)
    assert caught.value.status_name == "CQSA_ERROR_" + name and text in str(caught.value), str(caught.value)


def test_other_bad_input():
    q = cqsa.fp8_quantize(ONES)
    with pytest.raises(ValueError, match="its bytes are"):
        cqsa.fp8_dequantize(q.data)
    with pytest.raises(ValueError, match="there are no transposed codes"):
        q.t
    with pytest.raises(ValueError, match="k"):
        cqsa.fp8_gemm(q, cqsa.fp8_quantize(ONES[:, :32].copy()))
    with pytest.raises(ValueError, match="out_dtype is 'int8'"):
        cqsa.fp8_gemm(q, q, out_dtype="int8")
    with pytest.raises(ValueError, match="alpha is 0"):
        cqsa.fp8_gemm(q, q, alpha=0)
    with pytest.raises(ValueError, match="accumulate is 'exact'"):
        cqsa.fp8_gemm(q, q, accumulate="exact")
    with pytest.raises(ValueError, match="say the granularity"):
        cqsa.fp8_gemm(q, q, scale_inv_a=np.ones((2, 7), np.float32))
    with pytest.raises(ValueError, match="wanted 1 to 1024"):
        cqsa.Ring(0)
    with pytest.raises(ValueError, match="has not been used yet"):
        cqsa.Ring(4).read()
    with pytest.raises(ValueError, match="wanted a Ring"):
        cqsa.fp8_ring_fold([cqsa.Ring(4)])
    with pytest.raises(ValueError, match="one-byte"):
        cqsa.fp8_transpose(ONES)
    with pytest.raises(ValueError, match="no keyword"):
        cqsa.fp8_quantize_many([ONES], colour=1)
    with pytest.raises(ValueError, match="entries"):
        cqsa.fp8_quantize_many([ONES], scale=[1.0, 2.0])
