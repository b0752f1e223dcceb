# SPDX-License-Identifier: Apache-2.0
"""Attention in float64 by the formula, for [batch, heads, seq, dim]; and the number formats numpy lacks."""
import numpy as np


def attention(q, k, v, *, causal="none", softmax_scale=None, window=None, softcap=0.0, mask=None, bias=None,
              alibi_slopes=None, sinks=None):
    """Returns (out, lse)."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, heads, rows, dim = q.shape
    keys = k.shape[2]
    k, v = (x.repeat(heads // k.shape[1], 1) for x in (k, v))
    scale = 1 / np.sqrt(dim) if softmax_scale is None else softmax_scale
    visible = np.broadcast_to(_visible(rows, keys, causal, window), (batch, heads, rows, keys))
    if mask is not None:
        visible = visible & np.asarray(mask, bool)
    with np.errstate(all="ignore"):
        s = np.einsum("bhid,bhjd->bhij", q, k) * scale
        if softcap:
            s = softcap * np.tanh(s / softcap)
        if bias is not None:
            s = s + np.asarray(bias, np.float64)
        if alibi_slopes is not None:
            slopes = np.broadcast_to(np.asarray(alibi_slopes, np.float64), (batch, heads))
            s = s - slopes[..., None, None] * np.abs(_distance(rows, keys, causal))
        s = np.where(visible, s, -np.inf)
        top = s.max(-1, initial=-np.inf)
        if sinks is not None:
            top = np.maximum(top, np.asarray(sinks, np.float64)[None, :, None])
        top = np.where(np.isfinite(top), top, 0)
        p = np.exp(s - top[..., None])
        total = p.sum(-1)
        if sinks is not None:
            total = total + np.exp(np.asarray(sinks, np.float64)[None, :, None] - top)
        lse = np.log(total) + top
        out = np.einsum("bhij,bhjd->bhid", p, np.where(visible.any((1, 2))[:, None, :, None], v, 0))
        out = np.where(total[..., None] > 0, out / total[..., None], 0)
    return out, lse


def _distance(rows, keys, causal):
    offset = 0 if causal == "top_left" else keys - rows
    return np.arange(rows)[:, None] + offset - np.arange(keys)  # i + off - j


def _visible(rows, keys, causal, window):
    distance = _distance(rows, keys, causal)
    visible = np.ones((rows, keys), bool) if causal == "none" else distance >= 0
    if window is not None:
        left, right = window
        if left >= 0:
            visible = visible & (distance <= left)
        if right >= 0:
            visible = visible & (distance >= -right)
    return visible


def to_bfloat16(x):
    """float32 -> bfloat16 bits, to nearest even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def e4m3fn_table():
    """The value of each of the 256 e4m3fn bytes; NaN at 0x7f and 0xff."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value = np.where(byte & 127 == 127, np.nan, value)
    return np.where(byte & 128, -value, value)


def e5m2_table():
    return (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float64)


# Absolute error allowed for operands of unit variance, by output type.
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


def assert_close(got, wanted, dtype="float32"):
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
