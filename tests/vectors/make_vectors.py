#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the conformance vectors of attention: manifest.json and one <case>.bin each. README.md has the format.

    make_vectors.py            writes them beside this file
    make_vectors.py --check    fails when a file here differs from what would be written

Independent of the library: numpy, and the operator as section 8 of cqsa.h states it. The order of every sum is fixed by a
loop and results are stored with fewer bits than they are computed with, so any machine writes the same bytes.
"""
import argparse
import json
import math
import pathlib
import sys
import zlib

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
INF = math.inf

# ---------------------------------------------------------------------------------------------------------------------
# The reference: the whole operator, obviously. number=np.float32 makes it the naive implementation of tolerances.
# ---------------------------------------------------------------------------------------------------------------------


def rows_of(c, b):
    """Queries of sequence b as [num_heads, rows, head_dim], and the rows of the output that they are."""
    if c.cu_seqlens_q is None:
        return c.q[b], slice(None)
    rows = slice(c.cu_seqlens_q[b], c.cu_seqlens_q[b + 1])
    return c.q[rows].swapaxes(0, 1), rows


def keys_of(c, b):
    """Keys and values of sequence b as [num_kv_heads, keys, ..], and which of them are in a page that is there."""
    if c.page_table is not None:
        used = c.seqlen_k if c.seqused_k is None else c.seqused_k[b]
        j = np.arange(used)
        page = c.page_table[b, j // c.page_size]
        k, v = c.k[page, j % c.page_size].swapaxes(0, 1), c.v[page, j % c.page_size].swapaxes(0, 1)
        return k, v, page >= 0
    if c.cu_seqlens_k is None:
        k, v = c.k[b], c.v[b]
    else:
        rows = slice(c.cu_seqlens_k[b], c.cu_seqlens_k[b + 1])
        k, v = c.k[rows].swapaxes(0, 1), c.v[rows].swapaxes(0, 1)
    if c.seqused_k is not None:
        k, v = k[:, :c.seqused_k[b]], v[:, :c.seqused_k[b]]
    return k, v, np.ones(k.shape[1], bool)


def seen_by_position(c, i, j, off):
    seen = np.ones((i.shape[0], j.shape[1]), bool)
    if c.causal != "none":
        seen &= j <= i + off
    if c.window is not None:
        left, right = c.window
        if left >= 0:
            seen &= j >= i + off - left
        if right >= 0:
            seen &= j <= i + off + right
    return seen


def plane(x, b, h, rows, keys):
    """[rows, keys] of a mask or bias for one head; axes of size 1 are the same everywhere."""
    part = x[min(b, x.shape[0] - 1), min(h, x.shape[1] - 1)]
    return np.broadcast_to(part[:rows, :keys], (rows, keys))


def reference(c, number=np.float64, round_p=lambda p: p):
    """out [.., num_heads, rows, head_dim_v] and lse of problem c, with the axes of the operands."""
    exp = lambda x: np.exp(x.astype(np.float64)).astype(number)
    scale = number(c.softmax_scale or 1 / math.sqrt(c.head_dim))
    out, lse = np.zeros(c.out_shape, number), np.full(c.lse_shape, -INF, number)
    for b in range(c.batch):
        q, rows = rows_of(c, b)
        k, v, there = keys_of(c, b)
        sq, sk = q.shape[1], k.shape[1]
        i, j = np.arange(sq)[:, None], np.arange(sk)[None, :]
        off = 0 if c.causal == "top_left" else sk - sq
        seen = seen_by_position(c, i, j, off) & there
        for h in range(c.num_heads):
            g = h // (c.num_heads // c.num_kv_heads)
            s = np.zeros((sq, sk), number)
            for d in range(c.head_dim):
                s += q[h, :, d, None].astype(number) * k[g, None, :, d].astype(number)
            s *= scale
            if c.softcap > 0:
                s = number(c.softcap) * np.tanh(s / number(c.softcap), dtype=np.float64).astype(number)
            if c.bias is not None:
                s += plane(c.bias, b, h, sq, sk).astype(number)
            if c.alibi_slopes is not None:
                slope = c.alibi_slopes[b, h] if c.alibi_slopes.ndim == 2 else c.alibi_slopes[h]
                s -= number(slope) * np.abs(i + off - j).astype(number)
            hidden = ~seen
            if c.mask is not None:
                hidden = hidden | (plane(c.mask, b, h, sq, sk) == 0)
            s[hidden] = -INF
            sink = number(-INF if c.sinks is None else c.sinks[h])
            m = np.maximum(s.max(axis=1, initial=-INF), sink)
            m[m == -INF] = 0  # a row with nothing in it: every term below is then 0
            total = exp(sink - m)
            for n in range(sk):
                total = total + exp(s[:, n] - m)
            o = np.zeros((sq, c.head_dim_v), number)
            for n in range(sk):
                p = round_p(exp(s[:, n] - m) / np.where(total == 0, number(1), total))
                o += np.where(s[:, n, None] == -INF, number(0), p[:, None] * v[g, n].astype(number))
            row_lse = np.where(total == 0, number(-INF), m + np.log(np.where(total == 0, 1, total), dtype=np.float64).astype(number))
            if c.cu_seqlens_q is None:
                out[b, h], lse[b, h] = o, row_lse
            else:
                out[rows, h], lse[h, rows] = o, row_lse
    return out, lse


# ---------------------------------------------------------------------------------------------------------------------
# Element types. Every float type is (exponent bits, mantissa bits).
# ---------------------------------------------------------------------------------------------------------------------

FLOATS = {"f16": (5, 10), "bf16": (8, 7), "e4m3fn": (4, 3), "e5m2": (5, 2)}
STORAGE = {"f64": np.float64, "f32": np.float32, "f16": np.uint16, "bf16": np.uint16, "e4m3fn": np.uint8, "e5m2": np.uint8,
           "i8": np.int8, "i32": np.int32, "i64": np.int64, "bool": np.uint8, "u8": np.uint8}


def encode(x, dtype):
    """f32 or f64 values -> stored elements, round to nearest even. Finite and in range, or inf/NaN where the type has one."""
    if dtype not in FLOATS:
        return np.asarray(x).astype(STORAGE[dtype])
    exponent_bits, mantissa_bits = FLOATS[dtype]
    x = np.asarray(x, np.float64)
    lowest = 2 - (1 << (exponent_bits - 1))  # exponent of the smallest normal number, 1 - bias
    finite = np.where(np.isfinite(x), x, 0)
    exponent = np.maximum(np.frexp(np.abs(finite))[1] - 1, lowest)
    exponent = np.where(finite == 0, lowest, exponent)
    units = np.rint(np.ldexp(np.abs(finite), mantissa_bits - exponent)).astype(np.int64)
    code = ((exponent - lowest) << mantissa_bits) + units
    top = ((1 << exponent_bits) - 1) << mantissa_bits
    code = np.where(np.isinf(x), top, code)
    code = np.where(np.isnan(x), 0x7F if dtype == "e4m3fn" else top | 1 << (mantissa_bits - 1), code)
    assert not (dtype == "e4m3fn" and np.isinf(x).any())
    sign = np.signbit(x).astype(np.int64) << (exponent_bits + mantissa_bits)
    return (sign | code).astype(STORAGE[dtype])


def decode(stored, dtype):
    """Stored elements -> f64 values (integers stay integers)."""
    if dtype not in FLOATS:
        return stored.astype(np.float64) if dtype in ("f32", "f64", "i8") else stored
    exponent_bits, mantissa_bits = FLOATS[dtype]
    code = stored.astype(np.int64)
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = code & (1 << mantissa_bits) - 1
    lowest = 2 - (1 << (exponent_bits - 1))
    normal = np.ldexp((mantissa + (1 << mantissa_bits)).astype(np.float64), exponent - 1 + lowest - mantissa_bits)
    value = np.where(exponent == 0, np.ldexp(mantissa.astype(np.float64), lowest - mantissa_bits), normal)
    if dtype == "e4m3fn":
        value = np.where((code & 0x7F) == 0x7F, np.nan, value)
    else:
        value = np.where(exponent == (1 << exponent_bits) - 1, np.where(mantissa == 0, INF, np.nan), value)
    return np.where(code >> (exponent_bits + mantissa_bits), -value, value)


def ulp(value, dtype):
    """Distance of neighbours at the magnitude of value. Stored f64 results have 32 bits (see `results`)."""
    mantissa_bits = {"f64": 31, "f32": 23}.get(dtype) or FLOATS[dtype][1]
    return math.ldexp(1.0, math.frexp(max(value, 2.0**-14))[1] - 1 - mantissa_bits)


# ---------------------------------------------------------------------------------------------------------------------
# Random elements
# ---------------------------------------------------------------------------------------------------------------------


def splitmix64(seed, count):
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def random_elements(seed, count, dtype, scale, shift):
    z = splitmix64(seed, count)
    if dtype == "i8":
        return (z >> np.uint64(56)).astype(np.uint8).view(np.int8)
    uniform = (z >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
    return encode(uniform * np.float32(scale) + np.float32(shift), dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Tensors: a view (shape, strides, first) of a buffer, which is random or stored
# ---------------------------------------------------------------------------------------------------------------------


class Tensor:
    """`order` lists the axes from outermost to innermost in memory; `negative` and `zero` list axes that run backwards or
    stand still; `pad` adds elements after each innermost row; `before` is unused elements in front."""

    def __init__(self, dtype, shape, values=None, seed=None, scale=1.0, shift=0.0, order=None, negative=(), zero=(), pad=0,
                 before=0):
        self.dtype, self.shape, self.seed, self.scale, self.shift = dtype, tuple(shape), seed, scale, shift
        strides, step = [0] * len(shape), 1
        for n, axis in enumerate(reversed(order or range(len(shape)))):
            if axis not in zero:
                strides[axis] = step
                step = step * max(1, shape[axis]) + (pad if n == 0 else 0)
        last = sum(stride * (size - 1) for stride, size in zip(strides, shape)) if 0 not in shape else -1
        self.first = before + sum(strides[axis] * (shape[axis] - 1) for axis in negative)
        self.strides = [-stride if axis in negative else stride for axis, stride in enumerate(strides)]
        self.elements = before + last + 1
        self.buffer = None
        if values is not None:
            self.buffer = np.zeros(self.elements, STORAGE[dtype])
            self.view()[...] = encode(np.broadcast_to(values, shape), dtype)
        elif seed is not None:
            self.buffer = random_elements(seed, self.elements, dtype, scale, shift)

    def view(self):
        size = self.buffer.itemsize
        return np.lib.stride_tricks.as_strided(self.buffer[self.first:], self.shape, [s * size for s in self.strides])

    def values(self):
        return decode(self.view(), self.dtype)

    def store(self):
        """Keeps the bytes in the file, because they are no longer those of the seed."""
        self.seed = None
        return self

    def describe(self, blob):
        record = {"dtype": self.dtype, "shape": self.shape, "strides": self.strides, "elements": self.elements}
        if self.first:
            record["first"] = self.first
        if self.seed is not None:
            record["seed"] = self.seed
            if self.dtype != "i8":
                assert math.frexp(self.scale)[0] == 0.5  # a power of two: the product is exact
                record.update({"scale": self.scale}, **({"shift": self.shift} if self.shift else {}))
        elif self.buffer is not None:
            record["at"] = blob.append(self.buffer)
        return record


class Blob:
    def __init__(self):
        self.bytes = bytearray()

    def append(self, array):
        self.bytes += b"\0" * (-len(self.bytes) % 8)
        at = len(self.bytes)
        self.bytes += array.astype(array.dtype.newbyteorder("<")).tobytes()
        return at


# ---------------------------------------------------------------------------------------------------------------------
# A case
# ---------------------------------------------------------------------------------------------------------------------

SMALL = ("alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table")
OPTIONAL = ("k_scale", "v_scale", "mask", "bias") + SMALL


class Case:
    """Shapes default to a small GQA problem. Operands are made from seeds unless given."""
    def __init__(self, name, about, *, dtype="f32", kv=None, out=None, batch=2, heads=4, kv_heads=2, sq=19, sk=23, d=16, dv=None,
                 causal="none", window=None, scale=0.0, softcap=0.0, group=0, scale_k=None, scale_v=None, lse=True, q=None, k=None,
                 v=None, layout=None, amplitude=2.0, total_q=None, total_k=None, page_size=None, pages=None, out_layout=None,
                 lse_layout=None, **operands):
        self.name, self.about, self.seed = name, about, zlib.crc32(name.encode())
        self.batch, self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim_v = batch, heads, kv_heads, d, dv or d
        self.seqlen_q, self.seqlen_k, self.total_q, self.total_k = sq, sk, total_q or 0, total_k or 0
        self.page_size, self.num_pages = page_size or 0, pages or 0
        self.dtype_q, self.dtype_kv, self.dtype_out = dtype, kv or dtype, out or dtype
        self.causal, self.window, self.softmax_scale, self.softcap, self.kv_group = causal, window, scale, softcap, group
        varlen = "cu_seqlens_q" in operands
        q_lead = (total_q, heads) if varlen else (batch, heads, sq)
        k_lead = (pages, page_size, kv_heads) if page_size else (total_k, kv_heads) if varlen else (batch, kv_heads, sk)
        self.tensors = {}
        for n, (key, lead, dim, of, given) in enumerate((("q", q_lead, d, dtype, q), ("k", k_lead, d, self.dtype_kv, k),
                                                          ("v", k_lead, self.head_dim_v, self.dtype_kv, v))):
            self.tensors[key] = given or Tensor(of, lead + (dim,), seed=self.seed + n, scale=amplitude, **(layout or {}))
        self.kind = {"k": "none", "v": "none"}
        for n, (key, kind, dim) in enumerate((("k", scale_k, d), ("v", scale_v, self.head_dim_v))):
            if kind:
                self.kind[key] = kind
                shape = {"tensor": (1,), "head": (kv_heads,), "token": k_lead, "group": k_lead + (-(-dim // (group or 1)),)}[kind]
                unit = 2.0**-6 if kind == "group" else 0.5
                self.tensors[key + "_scale"] = Tensor("f16" if kind == "group" else "f32", shape, seed=self.seed + 3 + n,
                                                      scale=unit / 2, shift=unit)
        for key in OPTIONAL:
            if operands.get(key) is not None:
                self.tensors[key] = operands[key]
        self.out = Tensor(self.dtype_out, q_lead + (self.head_dim_v,), **(out_layout or {}))
        lse_shape = (heads, total_q) if varlen else (batch, heads, sq)
        self.lse = Tensor("f64" if dtype == "f64" else "f32", lse_shape, **(lse_layout or {})) if lse else None
        self.out_shape, self.lse_shape = self.out.shape, lse_shape
        assert set(operands) <= set(OPTIONAL), operands

    def problem(self):
        """The operands as f64 (integers as they are), scales applied, under the names that `reference` uses."""
        for key in ("q", "k", "v") + OPTIONAL:
            setattr(self, key, self.tensors[key].values() if key in self.tensors else None)
        for key in ("k", "v"):
            if self.kind[key] != "none":
                setattr(self, key, self.scaled(getattr(self, key), getattr(self, key + "_scale"), self.kind[key]))
        return self

    def scaled(self, x, scale, kind):
        if kind == "tensor":
            return x * scale[0]
        if kind == "head":
            head_axis = 1 if x.ndim == 4 and self.page_table is None else x.ndim - 2
            return x * scale.reshape([-1 if axis == head_axis else 1 for axis in range(x.ndim)])
        if kind == "token":
            return x * scale[..., None]
        return x * np.repeat(scale, self.kv_group, axis=-1)[..., :x.shape[-1]]

    def flags(self):
        has = self.tensors
        names = {"window": self.window is not None, "varlen": "cu_seqlens_q" in has, "paged": "page_table" in has,
                 "seqused_k": "seqused_k" in has, "mask": "mask" in has, "bias": "bias" in has, "alibi": "alibi_slopes" in has,
                 "sinks": "sinks" in has, "lse": self.lse is not None}
        return [name for name, there in names.items() if there]

    def broadcast(self, key):
        t = self.tensors.get(key)
        return 0 if t is None else sum(1 << n for n in range(4) if t.shape[n] == 1 or t.strides[n] == 0)

    def params(self):
        fields = ("batch", "num_heads", "num_kv_heads", "head_dim", "head_dim_v", "seqlen_q", "seqlen_k", "total_q", "total_k",
                  "page_size", "num_pages", "dtype_q", "dtype_kv", "dtype_out")
        params = {"flags": self.flags(), **{field: getattr(self, field) for field in fields}}
        params["dtype_bias"] = self.tensors["bias"].dtype if "bias" in self.tensors else 0
        params.update(scale_k=self.kind["k"], scale_v=self.kind["v"], kv_group=self.kv_group, causal=self.causal)
        params["window_left"], params["window_right"] = self.window or (0, 0)
        params.update(softmax_scale=self.softmax_scale, softcap=self.softcap)
        params.update(mask_broadcast=self.broadcast("mask"), bias_broadcast=self.broadcast("bias"))
        return {key: value for key, value in params.items() if value not in (0, "none")}

    def results(self, blob):
        """Expected results, and the tolerances: 2 x the largest error of the naive implementation of the same types + 4 ulp (2 of a
        16-bit type), both relative to max(1, |expected|)."""
        c = self.problem()
        with np.errstate(invalid="ignore"):
            out, lse = reference(c)
            p_rounded = lambda p: p if c.dtype_q in ("f32", "f64") else decode(encode(p, c.dtype_q), c.dtype_q).astype(p.dtype)
            naive, naive_lse = reference(c, np.float64 if c.dtype_q == "f64" else np.float32, p_rounded)
        naive = decode(encode(naive, c.dtype_out), c.dtype_out)
        assert np.isfinite(out).all() and not np.isnan(lse).any() and not (lse == INF).any(), c.name
        stored = "f64" if c.dtype_q == "f64" else "f32"
        if stored == "f64":  # 32 significant bits: the last ones of exp() differ between machines
            out, lse = [np.ldexp(np.rint(np.ldexp(np.frexp(x)[0], 32)), np.frexp(x)[1] - 32) for x in (out, lse)]
        record = {"dtype": stored, "out_at": blob.append(out.astype(STORAGE[stored])), "lse_at": blob.append(lse.astype(STORAGE[stored]))}
        some = np.isfinite(lse)
        for key, dtype, want, got in (("out", c.dtype_out, out, naive), ("lse", stored, lse[some], naive_lse[some])):
            error = (np.abs(got - want) / np.maximum(1, np.abs(want))).max(initial=0)
            largest = 1 if key == "lse" else min(1, np.abs(want).max(initial=0))
            record[key + "_tolerance"] = float(f"{2 * float(error) + (2 if dtype in FLOATS else 4) * ulp(float(largest), dtype):.2e}")
        return record

    def write(self):
        blob = Blob()
        record = {"name": self.name, "about": self.about, "file": self.name + ".bin", "params": self.params()}
        record["inputs"] = {key: t.describe(blob) for key, t in self.tensors.items()}
        record["outputs"] = {key: t.describe(blob) for key, t in (("out", self.out), ("lse", self.lse)) if t is not None}
        record["expected"] = self.results(blob)
        record["bytes"] = len(blob.bytes)
        return record, bytes(blob.bytes)


# ---------------------------------------------------------------------------------------------------------------------
# The cases
# ---------------------------------------------------------------------------------------------------------------------


def integers(dtype, values):
    values = np.array(values)
    return Tensor(dtype, values.shape, values)


def ints32(values):
    return integers("i32", values)


def bits(seed, shape, share=0.7):
    """A mask with about that share of true elements."""
    return (splitmix64(seed, math.prod(shape)).reshape(shape) >> np.uint64(40)) < np.uint64(share * 2**24)


def planted(case, key, index, value):
    """Overwrites some elements of an operand."""
    t = case.tensors[key].store()
    t.view()[index] = encode(np.array(value), t.dtype)
    return case


def basic_cases():
    for dtype in ("f32", "f16", "bf16", "f64"):
        yield Case(f"basic_{dtype}", "every element type, GQA, more keys than queries", dtype=dtype, heads=2, kv_heads=1)
    yield Case("long_f32", "several tiles of queries and keys at every tile size", batch=1, heads=1, kv_heads=1, sq=150, sk=300, d=32)
    yield Case("long_f16_causal", "several tiles, self-attention, causal", dtype="f16", batch=1, heads=2, kv_heads=2, sq=261, sk=261,
               d=8, causal="bottom_right")
    yield Case("long_bf16", "many keys for few queries", dtype="bf16", batch=1, heads=2, kv_heads=1, sq=3, sk=1000, d=32)
    yield Case("decode_f32", "one query", batch=3, heads=8, kv_heads=2, sq=1, sk=77, d=32, causal="bottom_right")
    yield Case("one_key", "one key: out is its value", sk=1, causal="bottom_right", sq=1)
    yield Case("scale_given", "softmax_scale is not 1/sqrt(head_dim)", scale=0.3)
    yield Case("scale_negative", "a negative softmax_scale is a scale", scale=-0.25)
    yield Case("mha", "as many key heads as query heads", heads=3, kv_heads=3)
    yield Case("gqa_3", "three query heads for a key head", heads=6, kv_heads=2)
    yield Case("mqa", "one key head", heads=5, kv_heads=1, causal="bottom_right")
    for d in (1, 3, 64, 80, 128, 256):
        yield Case(f"head_dim_{d}", "head_dim", batch=1, heads=2, kv_heads=1, d=d, sq=7, sk=18)
    yield Case("head_dim_64_1", "head_dim_v 1", batch=1, d=64, dv=1)
    yield Case("head_dim_192_128", "head_dim_v differs", dtype="bf16", batch=1, heads=2, kv_heads=2, d=192, dv=128, sq=9, sk=20)
    yield Case("head_dim_576_512", "the largest dimensions", dtype="f16", batch=1, heads=2, kv_heads=1, d=576, dv=512, sq=5, sk=21)
    yield Case("head_dim_5_33", "head_dim_v larger, both odd", batch=1, d=5, dv=33)
    for dtype, out in (("f32", "f16"), ("f32", "bf16"), ("f16", "f32"), ("bf16", "f32"), ("bf16", "f16")):
        yield Case(f"out_{out}_of_{dtype}", "out has another type than q", dtype=dtype, out=out, batch=1)
    yield Case("no_lse", "lse is not asked for", lse=False)


def eight_bit_cases():
    yield Case("int8_group_32", "three groups, the last one short", dtype="f32", kv="i8", group=32, scale_k="group", scale_v="group",
               d=80, batch=1, sq=9)
    yield Case("int8_group_64", "two groups, the last one short; head_dim_v has one", dtype="f16", kv="i8", group=64, scale_k="group",
               scale_v="group", d=96, dv=64, batch=1, sq=9)
    yield Case("int8_group_128", "two groups, the last one short", dtype="bf16", kv="i8", group=128, scale_k="group", scale_v="group",
               d=192, dv=128, batch=1, heads=2, kv_heads=1, sq=7, causal="bottom_right")
    yield Case("int8_one_short_group", "head_dim below the group", dtype="f32", kv="i8", group=128, scale_k="group", scale_v="group",
               d=20, batch=1)
    for n, kv in enumerate(("e4m3fn", "e5m2")):
        for m, kind in enumerate((None, "tensor", "head", "token")):
            yield Case(f"{kv}_{kind or 'unscaled'}", "8-bit floats with each kind of scale", kv=kv, scale_k=kind, scale_v=kind,
                       dtype=("f32", "f16", "bf16")[(n + m) % 3], batch=2, sq=9)
    yield Case("e4m3fn_mixed_scales", "k and v have different kinds of scale", kv="e4m3fn", scale_k="head", scale_v="token", sq=9)
    yield Case("e5m2_subnormal", "values down to the subnormal numbers of the type", kv="e5m2", amplitude=2.0**-13, scale=2.0**25, sq=9)


def position_cases():
    for sq, sk, word in ((19, 40, "fewer"), (33, 33, "equal"), (40, 19, "more")):
        for causal in ("top_left", "bottom_right"):
            yield Case(f"causal_{causal}_{word}", f"{word} queries than keys" if word != "equal" else "as many queries as keys",
                       causal=causal, sq=sq, sk=sk, batch=1)
        for causal in ("none", "top_left", "bottom_right"):
            yield Case(f"window_5_3_{causal}_{word}", "both sides of the window", causal=causal, window=(5, 3), sq=sq, sk=sk, batch=1, d=8)
    windows = {"left": (7, -1), "right": (-1, 4), "zero": (0, 0), "unlimited": (-1, -1), "left_zero": (0, -1), "wide": (1000, 1000)}
    for n, (word, window) in enumerate(windows.items()):
        for causal in ("none", "top_left", "bottom_right"):
            if word in ("unlimited", "wide") and causal != "none":
                continue
            yield Case(f"window_{word}_{causal}", "one side of the window, none, or nothing but the diagonal", causal=causal,
                       window=window, batch=1, d=8, sq=37, sk=37 if n % 2 else 41)
    yield Case("window_long", "whole tiles left of and right of the window", window=(40, 17), batch=1, heads=1, kv_heads=1, sq=300, sk=300, d=8)
    yield Case("window_long_causal", "whole tiles left of the window", dtype="f16", window=(64, -1), causal="bottom_right", batch=1, heads=2,
               kv_heads=1, sq=200, sk=330, d=8)
    yield Case("window_empty_rows", "a window that leaves whole rows empty", window=(2, 2), sq=60, sk=5, causal="top_left", batch=1)


def logit_cases():
    f32 = lambda values: Tensor("f32", np.shape(values), np.array(values))
    yield Case("softcap", "softcap in the range of the logits", softcap=1.5)
    yield Case("softcap_large_logits", "logits far above the cap", softcap=20.0, amplitude=32.0, scale=1.0)
    yield Case("softcap_bias_causal", "the cap comes before bias and causal rule", softcap=1.0, causal="bottom_right", sq=21, sk=21,
               bias=Tensor("f32", (2, 4, 21, 21), seed=11, scale=4.0))
    slopes = [0.5, 0.25, 0.125, 1.0]
    yield Case("alibi", "off = seqlen_k - seqlen_q without a causal rule", alibi_slopes=f32(slopes))
    yield Case("alibi_top_left", "off = 0", causal="top_left", alibi_slopes=f32(slopes))
    yield Case("alibi_bottom_right_batch", "slopes for each batch item", causal="bottom_right", sq=25,
               alibi_slopes=f32([slopes, [0.0, 2.0, -0.25, 0.75]]))
    yield Case("alibi_long", "far keys vanish", batch=1, heads=2, kv_heads=1, sq=150, sk=150, d=8, causal="bottom_right",
               alibi_slopes=f32([0.5, 0.03125]))
    yield Case("sinks", "a sink takes part in the sum and in lse", sinks=f32([0.5, -3.0, 4.0, 0.0]))
    mask = bits(5, (2, 1, 19, 23))
    mask[0, 0, 3] = mask[1, 0, 7] = False
    yield Case("sinks_masked_rows", "a row with a sink and no key: out = 0, lse = sink", sinks=f32([0.5, -3.0, 4.0, 0.0]),
               mask=Tensor("bool", mask.shape, mask))
    yield Case("sinks_causal", "rows without a key above the diagonal", sinks=f32([1.0, 2.0, -60.0, 80.0]), causal="bottom_right", d=8,
               sq=30, sk=12)
    axes = {"batch": (1, 4, 19, 23), "head": (2, 1, 19, 23), "query": (2, 4, 1, 23), "key": (2, 4, 19, 1), "none": (2, 4, 19, 23),
            "all": (1, 1, 1, 1)}
    for n, (word, shape) in enumerate(axes.items()):
        if word != "all":
            mask = bits(20 + n, shape)
            yield Case(f"mask_same_along_{word}", "axis of size 1; rows without a key give 0", mask=Tensor("bool" if n % 2 else "u8", shape, mask))
        yield Case(f"bias_same_along_{word}", "axis of size 1", bias=Tensor("f32", shape, seed=30 + n, scale=4.0))
    yield Case("mask_u8_values", "any byte but 0 shows the key", mask=Tensor("u8", (1, 1, 19, 23), bits(40, (19, 23)) * 200))
    yield Case("mask_stride_0", "an expanded axis", mask=Tensor("bool", (2, 4, 19, 23), bits(41, (1, 4, 19, 1)), zero=(0, 3)))
    yield Case("mask_rows_apart", "a row stride of 43", mask=Tensor("bool", (2, 1, 19, 23), bits(42, (2, 1, 19, 23)), pad=20))
    yield Case("mask_transposed", "the key axis is not the inner one", mask=Tensor("bool", (1, 1, 19, 23), bits(43, (19, 23)), order=(0, 1, 3, 2)))
    yield Case("mask_no_key_visible", "every row is empty", mask=Tensor("bool", (1, 1, 1, 1), [[[[False]]]]))
    for dtype, bias in (("f16", "f16"), ("bf16", "bf16"), ("f16", "f32"), ("f32", "bf16")):
        yield Case(f"bias_{bias}_of_{dtype}", "types of the bias", dtype=dtype, batch=1, bias=Tensor(bias, (1, 4, 19, 23), seed=44, scale=2.0))
    bias = np.zeros((1, 1, 19, 23), np.float32)
    bias[0, 0][~bits(45, (19, 23))] = -INF
    bias[0, 0, 4] = -INF
    yield Case("bias_minus_inf", "-inf hides a key; a whole row of it gives 0", bias=Tensor("f32", bias.shape, bias))
    yield Case("bias_minus_inf_f16", "-inf hides a key", dtype="f16", bias=Tensor("f16", bias.shape, bias))
    bias = np.zeros((1, 1, 19, 23), np.float32)
    bias[0, 0, :, 12:] = bias[0, 0, 4] = np.finfo(np.float32).min
    yield Case("bias_finfo_min", "a row of the least finite numbers is a row of equal logits, not an empty one",
               bias=Tensor("f32", bias.shape, bias))
    yield Case("mask_bias_alibi_softcap_sinks", "all of them at once", softcap=3.0, causal="bottom_right", window=(9, 0), sq=27, sk=27,
               mask=Tensor("bool", (2, 1, 1, 27), bits(46, (2, 1, 1, 27), 0.8)), bias=Tensor("f32", (1, 4, 27, 27), seed=47, scale=2.0),
               alibi_slopes=f32(slopes), sinks=f32([0.5, -3.0, 1.0, 0.0]))


def extreme_cases():
    # Logits 8 * 100 * -(65 + 12.5 j): from -52000 on, 10000 apart. Row i is scaled by 1 + i / 64 so that rows differ.
    q = 100 * (1 + np.arange(12).reshape(-1, 1) / 64)
    k = -(65 + 12.5 * np.array([3, 1, 4, 0, 5, 2, 6, 0.0])).reshape(-1, 1)
    for dtype in ("f32", "f16"):
        yield Case(f"huge_logits_{dtype}", "all logits below -5e4 and most 1e4 apart", dtype=dtype, batch=1, heads=2, kv_heads=1, sq=12, sk=8,
                   d=8, scale=1.0, q=Tensor(dtype, (1, 2, 12, 8), q), k=Tensor(dtype, (1, 1, 8, 8), k))
    yield Case("huge_logits_positive", "exp of them alone would overflow", amplitude=64.0, scale=1.0)
    c = Case("nan_in_masked_keys", "hidden k and v hold NaN and inf and change nothing", batch=1, sq=19, sk=23,
             mask=Tensor("bool", (1, 1, 1, 23), np.arange(23) % 5 != 2))
    for key, value in (("k", math.nan), ("v", math.nan)):
        planted(c, key, (slice(None), slice(None), slice(2, 23, 5)), value)
    yield planted(c, "v", (slice(None), slice(None), slice(7, 23, 10), 0), INF)
    c = Case("nan_right_of_causal", "keys that no query sees hold NaN", causal="top_left", sq=10, sk=40, batch=1, dtype="f16")
    planted(c, "k", (slice(None), slice(None), slice(10, None)), math.nan)
    yield planted(c, "v", (slice(None), slice(None), slice(10, None)), -INF)
    c = Case("nan_above_diagonal", "NaN beside visible keys, in the same tiles", causal="bottom_right", sq=24, sk=24,
             batch=1, mask=Tensor("bool", (1, 1, 24, 24), np.arange(24)[:, None] < 20))
    planted(c, "k", (slice(None), slice(None), slice(20, None)), math.nan)
    yield planted(c, "v", (slice(None), slice(None), slice(20, None)), math.nan)
    c = Case("nan_in_masked_e4m3fn", "hidden 8-bit keys hold NaN", kv="e4m3fn", scale_k="token", scale_v="token", batch=1, sq=9,
             mask=Tensor("bool", (1, 1, 1, 23), np.arange(23) % 4 != 1))
    for key in ("k", "v"):
        planted(c, key, (slice(None), slice(None), slice(1, 23, 4)), math.nan)
        planted(c, key + "_scale", (slice(None), slice(None), slice(1, 23, 8)), math.nan)
    yield c
    c = Case("logit_minus_inf", "a logit that is -inf of itself hides its key like a mask, here one with NaN as value", batch=1)
    planted(c, "q", (..., 0), 1.0)
    planted(c, "k", (slice(None), slice(None), slice(3, 23, 4), 0), -INF)
    yield planted(c, "v", (slice(None), slice(None), slice(3, 23, 4)), math.nan)
    c = Case("logit_minus_inf_row", "a row in which all logits are -inf is empty", batch=1, sq=9, sk=9, dtype="f16")
    planted(c, "q", (slice(None), slice(None), slice(None), 0), np.array([1, 1, 2, 0.5, 1, 1, 1, 3, 1])[None, None, :])
    yield planted(c, "k", (..., 0), -INF)
    yield Case("empty_batch", "no sequence", batch=0)
    yield Case("empty_queries", "no query", sq=0)
    yield Case("empty_keys", "no key: out = 0, lse = -inf", sk=0)
    yield Case("empty_keys_sinks", "no key and a sink: out = 0, lse = sink", sk=0, sinks=Tensor("f32", (4,), [1.0, -2.0, 0.0, 3.5]))
    yield Case("empty_everything", "neither", sq=0, sk=0, causal="bottom_right")


def ragged_cases():
    cu_q, cu_k = [0, 0, 7, 7, 30, 35, 35], [0, 4, 4, 9, 40, 47, 47]
    common = dict(batch=6, sq=23, sk=31, total_q=40, total_k=50, cu_seqlens_q=ints32(cu_q), cu_seqlens_k=ints32(cu_k))
    yield Case("varlen", "empty segments of queries, of keys and of both; rows past the last segment", **common)
    yield Case("varlen_bottom_right", "off is that of the segment", causal="bottom_right", dtype="f16", **common)
    yield Case("varlen_top_left_window", "positions count from the segment's first row", causal="top_left", window=(4, -1), dtype="bf16", **common)
    yield Case("varlen_sinks_alibi", "rows without a key have lse = sink, rows past the last segment -inf",
               sinks=Tensor("f32", (4,), [1.0, -2.0, 0.0, 3.5]), alibi_slopes=Tensor("f32", (6, 4), seed=50), **common)
    i64 = dict(common, cu_seqlens_q=integers("i64", cu_q), cu_seqlens_k=integers("i64", cu_k))
    yield Case("varlen_i64", "64-bit cu_seqlens", causal="bottom_right", **i64)
    yield Case("varlen_mask_bias", "mask and bias are indexed by segment and by position in it",
               mask=Tensor("bool", (6, 1, 23, 31), bits(51, (6, 1, 23, 31), 0.8)), bias=Tensor("f32", (1, 4, 23, 31), seed=52, scale=2.0), **common)
    yield Case("varlen_seqused_k", "fewer keys than the segment has; off follows", causal="bottom_right",
               seqused_k=ints32([3, 0, 5, 20, 0, 0]), **common)
    yield Case("varlen_lengths_one", "segments of one token", batch=5, sq=1, sk=1, total_q=5, total_k=5, causal="bottom_right",
               cu_seqlens_q=ints32(range(6)), cu_seqlens_k=ints32(range(6)))
    yield Case("varlen_no_rows", "no segment", batch=0, sq=0, sk=0, total_q=3, total_k=2, cu_seqlens_q=ints32([0]), cu_seqlens_k=ints32([0]))
    yield Case("varlen_int8", "scales follow the rows", kv="i8", dtype="f16", group=32, scale_k="group", scale_v="group", d=40, heads=2, kv_heads=1,
               **common)
    c = Case("seqused_k", "each sequence uses fewer keys; the others hold NaN", batch=3, heads=2, kv_heads=1, d=8, causal="bottom_right", seqused_k=ints32([23, 0, 9]))
    for key in ("k", "v"):
        planted(c, key, (1,), math.nan)
        planted(c, key, (2, slice(None), slice(9, None)), math.nan)
    yield c
    yield Case("seqused_k_i64_window", "off follows seqused_k without a causal rule too", batch=3, d=8, window=(3, 3),
               seqused_k=integers("i64", [23, 4, 9]))
    shuffle = lambda seed, n: np.argsort(splitmix64(seed, n), kind="stable")
    table = shuffle(60, 46).reshape(2, 23)
    yield Case("paged_1", "pages of one key in any order", page_size=1, pages=50, page_table=ints32(table))
    table = shuffle(61, 12)[:8].reshape(2, 4)
    paged = dict(page_size=16, pages=12, sk=60)
    yield Case("paged_16", "the last page is not full", seqused_k=ints32([60, 41]), causal="bottom_right", page_table=ints32(table), **paged)
    yield Case("paged_whole", "without seqused_k every slot of the table is a key", page_size=16, pages=12, sk=64, dtype="f16",
               page_table=ints32(table))
    holes = table.copy()
    holes[0, 1] = holes[1, 0] = holes[1, 3] = -1
    yield Case("paged_minus_1", "a page of -1 hides its keys; their positions stay", causal="bottom_right", seqused_k=ints32([60, 60]),
               page_table=ints32(holes), alibi_slopes=Tensor("f32", (4,), [0.5, 0.25, 0.125, 1.0]), **paged)
    holes = np.full((2, 4), -1)
    yield Case("paged_none_there", "no page at all", seqused_k=ints32([60, 3]), page_table=ints32(holes), **paged)
    shared = np.array([[3, 5, 3, 1], [3, 5, 0, 99]])
    yield Case("paged_shared", "a page in two sequences and twice in one; entries past the used keys may be anything",
               seqused_k=ints32([60, 33]), page_table=ints32(shared), dtype="bf16", **paged)
    yield Case("paged_table_strided", "a table that is a part of a wider one", seqused_k=ints32([60, 47]),
               page_table=Tensor("i32", (2, 4), table, pad=3, before=2), **paged)
    yield Case("paged_varlen", "queries of several lengths", batch=3, sq=9, total_q=20, cu_seqlens_q=ints32([0, 9, 9, 17]),
               causal="bottom_right", seqused_k=ints32([60, 20, 8]), page_size=16, pages=12, sk=60,
               page_table=ints32(np.resize(shuffle(62, 12), (3, 4))))
    yield Case("paged_e4m3fn_token", "scales are paged like the keys", kv="e4m3fn", scale_k="token", scale_v="token", sq=9,
               seqused_k=ints32([60, 30]), page_table=ints32(table), **paged)
    yield Case("paged_e5m2_head", "scales per head of paged keys", kv="e5m2", dtype="f16", scale_k="head", scale_v="head", sq=9,
               seqused_k=ints32([60, 30]), page_table=ints32(table), **paged)
    yield Case("paged_int8", "scales are paged like the keys", kv="i8", dtype="bf16", group=32, scale_k="group", scale_v="group", d=48, sq=9,
               seqused_k=ints32([60, 30]), page_table=ints32(table), **paged)


def stride_cases():
    bshd = dict(order=(0, 2, 1, 3))
    yield Case("strides_bshd", "[batch, seq, heads, dim] arrays", layout=bshd, out_layout=bshd)
    yield Case("strides_bshd_f16", "[batch, seq, heads, dim] arrays", layout=bshd, out_layout=bshd, dtype="f16", d=20, causal="bottom_right")
    yield Case("strides_transposed", "the channel is not the inner axis", layout=dict(order=(0, 1, 3, 2)),
               out_layout=dict(order=(3, 0, 1, 2)), lse_layout=dict(order=(2, 0, 1)))
    yield Case("strides_negative", "axes that run backwards", layout=dict(negative=(1, 2, 3)), out_layout=dict(negative=(2,)),
               lse_layout=dict(negative=(0, 2)))
    yield Case("strides_apart", "rows with elements between them, an odd first element", layout=dict(pad=3, before=1),
               out_layout=dict(pad=5, before=3), lse_layout=dict(pad=1, before=1), dtype="bf16")
    yield Case("strides_zero", "one key head expanded to all, one value row to all keys", heads=4, kv_heads=4, sq=33, sk=33, d=8,
               k=Tensor("f32", (2, 4, 33, 8), seed=71, scale=2.0, zero=(1,)), v=Tensor("f32", (2, 4, 33, 8), seed=72, scale=2.0, zero=(2,)))
    yield Case("strides_zero_batch", "keys and values the same for all batch items, queries for all heads", batch=3,
               q=Tensor("f32", (3, 4, 19, 16), seed=73, scale=2.0, zero=(1,)), k=Tensor("f32", (3, 2, 23, 16), seed=74, scale=2.0, zero=(0,)),
               v=Tensor("f32", (3, 2, 23, 16), seed=75, scale=2.0, zero=(0,)))
    yield Case("strides_scales", "token scales and bias that run backwards", kv="e4m3fn", scale_k="token", scale_v="token", sq=9,
               layout=dict(negative=(2,)), bias=Tensor("f32", (1, 4, 9, 23), seed=76, negative=(2, 3), before=5))
    yield Case("strides_small_operands", "slopes and sinks with strides", alibi_slopes=Tensor("f32", (2, 4), seed=77, order=(1, 0), pad=1),
               sinks=Tensor("f32", (4,), seed=78, negative=(0,)))


def all_cases():
    for cases in (basic_cases, eight_bit_cases, position_cases, logit_cases, extreme_cases, ragged_cases, stride_cases):
        yield from cases()


# ---------------------------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------------------------


def manifest_text(records):
    """One operand a line, so that a change can be read in a diff."""
    line = lambda value: json.dumps(value, separators=(", ", ": "), allow_nan=False)
    text = ['{"format": 1,', ' "cases": [']
    for n, record in enumerate(records):
        text.append(f'  {{"name": {line(record["name"])}, "about": {line(record["about"])},')
        text.append(f'   "file": {line(record["file"])}, "bytes": {record["bytes"]},')
        text.append(f'   "params": {line(record["params"])},')
        for part in ("inputs", "outputs"):
            operands = [f'{line(key)}: {line(value)}' for key, value in record[part].items()]
            text.append(f'   "{part}": {{' + ",\n     ".join(operands) + "},")
        text.append(f'   "expected": {line(record["expected"])}}}' + ("," if n + 1 < len(records) else ""))
    return "\n".join(text + [" ]}", ""])


def make():
    """All files as {name: bytes}."""
    files, records = {}, []
    for case in all_cases():
        record, blob = case.write()
        assert record["file"] not in files, record["file"]
        records.append(record)
        files[record["file"]] = blob
    files["manifest.json"] = manifest_text(records).encode()
    return files


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the files here instead of writing them")
    parser.add_argument("--folder", type=pathlib.Path, default=HERE)
    options = parser.parse_args()
    files = make()
    there = {path.name for path in options.folder.glob("*.bin")}
    if options.check:
        wrong = sorted(there - set(files)) + [name for name, data in files.items()
                                              if not (options.folder / name).is_file() or (options.folder / name).read_bytes() != data]
        for name in wrong:
            print(f"{name} differs from what make_vectors.py writes")
        return 1 if wrong else 0
    for name in there - set(files):
        (options.folder / name).unlink()
    for name, data in files.items():
        (options.folder / name).write_bytes(data)
    print(f"{len(files) - 1} cases, {sum(map(len, files.values()))} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
