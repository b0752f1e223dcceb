# SPDX-License-Identifier: Apache-2.0
"""Arrays as they come: strides, the caller's outputs, array-likes, and what is refused."""
import array as plain_array

import numpy as np
import pytest

import cqsa
import exact


@pytest.fixture
def packed(random):
    shapes = (2, 4, 19, 32), (2, 2, 23, 32), (2, 2, 23, 32)
    return tuple(random.standard_normal(shape).astype(np.float32) for shape in shapes)


def strided(x, how):
    """The same values behind other strides."""
    if how == "transposed":
        return x.swapaxes(1, 3).copy().swapaxes(1, 3)
    if how == "reversed":
        return x[::-1, ::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1, ::-1]
    if how == "gaps":
        wide = np.full([3 * size for size in x.shape], np.nan, x.dtype)
        wide[1::3, 1::3, 1::3, 1::3] = x
        return wide[1::3, 1::3, 1::3, 1::3]
    if how == "misaligned":
        raw = np.zeros(x.nbytes + 1, np.uint8)
        view = raw[1:].view(x.dtype).reshape(x.shape)
        view[...] = x
        return view
    if how == "read-only":
        x = x.copy()
        x.flags.writeable = False
        return x
    raise AssertionError(how)


HOW = ["transposed", "reversed", "gaps", "misaligned", "read-only"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_strided_is_packed(packed, how, dtype):
    q, k, v = (x.astype(dtype) for x in packed)
    wanted = cqsa.attention(q, k, v, causal="bottom_right")
    got = cqsa.attention(*(strided(x, how) for x in (q, k, v)), causal="bottom_right")
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("how", HOW[:-1])
def test_strided_outputs(packed, how):
    wanted, wanted_lse = cqsa.attention(*packed, return_lse=True)
    out = strided(np.full(wanted.shape, np.nan, np.float32), how)
    lse = strided(np.full((1,) + wanted_lse.shape, np.nan, np.float32), how)[0]
    result = cqsa.attention(*packed, out=(out, lse), return_lse=True)
    assert result[0] is out and result[1] is lse
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(lse, wanted_lse)


def test_zero_strides(packed):
    q, k, v = packed
    k, v = (np.broadcast_to(x[:1, :1], (2, 2, 23, 32)) for x in (k, v))
    np.testing.assert_array_equal(cqsa.attention(q, k, v), cqsa.attention(q, k.copy(), v.copy()))


def test_bshd(packed):
    wanted, wanted_lse = cqsa.attention(*packed, return_lse=True)
    turned = [x.swapaxes(1, 2) for x in packed]
    for arrays in (turned, [x.copy() for x in turned]):
        out, lse = cqsa.attention(*arrays, layout="bshd", return_lse=True)
        assert out.flags.c_contiguous
        np.testing.assert_array_equal(out, wanted.swapaxes(1, 2))
        np.testing.assert_array_equal(lse, wanted_lse)
    out = np.empty((2, 19, 4, 32), np.float32)
    assert cqsa.attention(*turned, layout="bshd", out=out) is out
    np.testing.assert_array_equal(out, wanted.swapaxes(1, 2))


def test_parts_of_one_buffer(random):
    qkv = random.standard_normal((2, 19, 3, 4, 32)).astype(np.float32)
    q, k, v = (qkv[:, :, i] for i in range(3))
    wanted = cqsa.attention(q.copy(), k.copy(), v.copy(), layout="bshd")
    np.testing.assert_array_equal(cqsa.attention(q, k, v, layout="bshd"), wanted)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_out_of_another_type(packed, dtype):
    out = np.empty((2, 4, 19, 32), dtype)
    assert cqsa.attention(*packed, out=out) is out
    exact.assert_close(out, exact.attention(*packed)[0], np.dtype(dtype).name)


def test_anything_with_an_array_interface(packed):
    class Wrapped:
        def __init__(self, x):
            self.x = x  # keeps the memory
            self.__array_interface__ = x.__array_interface__

    wanted = cqsa.attention(*packed)
    out = np.empty_like(wanted)
    wrapped = Wrapped(out)
    assert cqsa.attention(*(Wrapped(x) for x in packed), out=wrapped) is wrapped
    np.testing.assert_array_equal(out, wanted)
    buffer = memoryview(np.zeros_like(wanted))
    cqsa.attention(*(memoryview(x) for x in packed), out=buffer)
    np.testing.assert_array_equal(np.asarray(buffer), wanted)


# ------------------------------------------------------------------------------------------------------------ refused

NAN = np.full((2, 4, 19, 32), np.nan, np.float32)


def refuse(status_name, family, arrays, **options):
    """The call fails as told, and the caller's output is untouched."""
    out = options.pop("out", NAN.copy())
    before = np.array(out, copy=True) if isinstance(out, np.ndarray) else None
    with pytest.raises(family) as caught:
        cqsa.attention(*arrays, out=out, **options)
    assert isinstance(caught.value, cqsa.CqsaError)
    assert caught.value.status_name == "CQSA_ERROR_" + status_name, str(caught.value)
    assert str(caught.value)
    if before is not None:
        np.testing.assert_array_equal(out, before)
    return str(caught.value)


def test_shapes(packed):
    q, k, v = packed
    refuse("SHAPE", ValueError, (q[0], k, v))
    refuse("SHAPE", ValueError, (q, k[..., :31], v))
    refuse("SHAPE", ValueError, (q, k[:1], v))
    refuse("SHAPE", ValueError, (q, k, v[:, :, :-1]))
    refuse("SHAPE", ValueError, (q, k, v), out=np.full((2, 4, 18, 32), np.nan, np.float32))
    refuse("SHAPE", ValueError, (q, k, v), mask=np.ones((3, 1, 1, 23), bool))
    refuse("SHAPE", ValueError, (q, k, v), mask=np.ones((1, 1, 1, 1, 23), bool))
    refuse("SHAPE", ValueError, (q, k, v), sinks=[0.0, 1.0])
    refuse("SHAPE", ValueError, (q, k, v), alibi_slopes=[0.0, 1.0])
    refuse("INVALID_ARGUMENT", ValueError, (q[:, :3], k, v), out=np.full((2, 3, 19, 32), np.nan, np.float32))
    refuse("SHAPE", ValueError, (np.float32(1), np.float32(1), np.float32(1)))
    refuse("INVALID_ARGUMENT", ValueError, (np.ones((1, 1, 4, 600), np.float32),) * 3,
           out=np.full((1, 1, 4, 600), np.nan, np.float32))


def test_dtypes(packed):
    q, k, v = packed
    assert "q is" in refuse("DTYPE", ValueError, (q.astype(np.int32), k, v))
    assert "k is" in refuse("DTYPE", ValueError, (q, k.astype(">f4"), v))
    refuse("DTYPE", ValueError, (q, k.astype(np.float16), v))
    refuse("DTYPE", ValueError, (q.astype(object), k, v))
    refuse("DTYPE", ValueError, (q, k, v), mask=np.ones((19, 23), np.float32))
    refuse("DTYPE", ValueError, (q, k, v), bias=np.ones((19, 23), np.int64))
    refuse("DTYPE", ValueError, (q, k, v), out=np.zeros((2, 4, 19, 32), np.int8))
    assert "dtype='bfloat16'" in refuse("DTYPE", ValueError, tuple(exact.to_bfloat16(x) for x in packed))
    assert "float8" in refuse("DTYPE", ValueError, (q, k.astype(np.uint8), v.astype(np.uint8)))
    refuse("DTYPE", ValueError, packed, dtype="float7")
    refuse("DTYPE", ValueError, packed, dtype=("bfloat16", "float16"))
    refuse("DTYPE", ValueError, packed, sinks=["a"] * 4)
    refuse("DTYPE", ValueError, packed, seqused_k=[1.5, 2.5])


def test_values(packed):
    for options in ({"causal": "yes"}, {"causal": True}, {"layout": "sbhd"}, {"schedule": "fast"}, {"softcap": -1.0},
                    {"softcap": "x"}, {"softmax_scale": 0}, {"softmax_scale": float("nan")}, {"window": 3},
                    {"window": (-2, 0)}, {"window": (1.5, 2)}, {"cqs": (7, 1)}, {"schedule": "cqs", "cqs": (8, 1)},
                    {"schedule": "cqs", "cqs": 7}, {"schedule": "cqs", "cqs": (7, 1 << 40)}, {"memory_limit": 0},
                    {"memory_limit": -5}, {"memory_limit": "lots"}, {"memory_limit": 1.5}, {"memory_limit": "5 XB"},
                    {"memory_limit": 1 << 80}, {"backend": None}, {"kv_group": 32}, {"k_scale": 1.0}):
        refuse("INVALID_ARGUMENT", ValueError, packed, **options)


def test_int8_wants_its_scales(packed):
    q, k, v = packed
    k, v = k.astype(np.int8), v.astype(np.int8)
    scale = np.ones((2, 2, 23, 1), np.float16)
    refuse("INVALID_ARGUMENT", ValueError, (q, k, v))
    refuse("DTYPE", ValueError, (q, k, v), k_scale=scale.astype(np.float32), v_scale=scale)
    refuse("SHAPE", ValueError, (q, k, v), k_scale=scale[:1], v_scale=scale)
    refuse("INVALID_ARGUMENT", ValueError, (q, k, v), k_scale=scale, v_scale=scale, kv_group=48)


def test_outputs(packed):
    q = packed[0]
    refuse("OVERLAP", ValueError, packed, out=q)
    repeated = np.lib.stride_tricks.as_strided(np.zeros(32, np.float32), NAN.shape, (0, 0, 0, 4))
    refuse("STRIDES", ValueError, packed, out=repeated)
    read_only = NAN.copy()
    read_only.flags.writeable = False
    assert "read-only" in refuse("INVALID_ARGUMENT", ValueError, packed, out=read_only)
    assert "list" in refuse("INVALID_ARGUMENT", ValueError, packed, out=[1.0, 2.0])
    refuse("INVALID_ARGUMENT", ValueError, packed, out=(NAN, NAN, NAN), return_lse=True)
    refuse("DTYPE", ValueError, packed, out=(NAN.copy(), np.zeros((2, 4, 19), np.float16)), return_lse=True)


def test_strides_that_are_not_whole_elements(packed):
    record = np.zeros((2, 4, 19, 32), np.dtype([("x", np.float32), ("y", np.int8)]))
    assert "q has the byte strides" in refuse("STRIDES", ValueError, (record["x"],) + packed[1:])
    one = np.zeros((1, 1, 1, 1), np.dtype([("x", np.float32), ("y", np.int8)]))["x"]
    assert cqsa.attention(one, one, one).shape == (1, 1, 1, 1)


def test_unknown_keyword(packed):
    with pytest.raises(TypeError):
        cqsa.attention(*packed, caussal="none")


def test_the_next_call_works(packed):
    refuse("SHAPE", ValueError, (packed[0], packed[1][..., :3], packed[2]))
    exact.assert_close(cqsa.attention(*packed), exact.attention(*packed)[0])


def test_buffer_of_the_standard_library():
    values = plain_array.array("f", range(24))
    view = memoryview(values).cast("B").cast("f", shape=[1, 1, 6, 4])
    exact.assert_close(cqsa.attention(view, view, view), exact.attention(*(np.asarray(view),) * 3)[0])
