# SPDX-License-Identifier: Apache-2.0
"""Files for the tests of the command, written and read by hand, and attention in fp64 as the obvious formula."""
import json
import struct

import numpy as np

SAFETENSORS = {"f8": "F64", "f4": "F32", "f2": "F16", "i8": "I64", "i4": "I32", "i1": "I8", "u1": "U8", "b1": "BOOL"}
NUMPY = {name: code for code, name in SAFETENSORS.items()}


def safetensors(tensors, types=None, metadata=None):
    """A .safetensors file as bytes. `types` names the type of arrays of bare bits: {"q": "BF16"}."""
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for name, array in tensors.items():
        kind = (types or {}).get(name) or SAFETENSORS[array.dtype.str[1:]]
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return from_header(json.dumps(header).encode(), data)


def from_header(header, data):
    return struct.pack("<Q", len(header)) + header + data


def read_safetensors(path):
    blob = path.read_bytes()
    (size,) = struct.unpack_from("<Q", blob)
    out = {}
    for name, info in json.loads(blob[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        begin, end = info["data_offsets"]
        data = blob[8 + size + begin : 8 + size + end]
        if info["dtype"] == "BF16":
            array = bf16_values(np.frombuffer(data, "<u2"))
        else:
            array = np.frombuffer(data, "<" + NUMPY[info["dtype"]])
        out[name] = array.reshape(info["shape"])
    return out


def npy(array, version=1, header=None):
    """An .npy file as bytes; `header` replaces the text of the dictionary."""
    text = header or "{'descr': '%s', 'fortran_order': False, 'shape': %s, }" % (array.dtype.str, array.shape)
    text = text.encode() + b"\n"
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + np.ascontiguousarray(array).tobytes()


def bf16_bits(array):
    bits = np.asarray(array, "<f4").view("<u4")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


def bf16_values(bits):
    return (bits.astype("<u4") << 16).view("<f4")


def attention(q, k, v, causal="none", window=None, scale=None, softcap=0.0, bias=None, mask=None, slopes=None, sinks=None):
    """out and lse, [batch, heads, seq, ..], in fp64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    s = q @ k.swapaxes(-1, -2) * (scale or q.shape[-1] ** -0.5)
    if softcap:
        s = softcap * np.tanh(s / softcap)
    i, j = np.arange(q.shape[2])[:, None], np.arange(k.shape[2])[None, :]
    off = 0 if causal == "top_left" else k.shape[2] - q.shape[2]
    if bias is not None:
        s = s + bias
    if slopes is not None:
        s = s - np.asarray(slopes, np.float64)[:, None, None] * abs(i + off - j)
    seen = np.ones((q.shape[2], k.shape[2]), bool)
    if causal != "none":
        seen &= j <= i + off
    if window:
        seen &= (window[0] < 0) | (j >= i + off - window[0])
        seen &= (window[1] < 0) | (j <= i + off + window[1])
    s = np.where(seen & (True if mask is None else mask != 0), s, -np.inf)
    if sinks is not None:
        s = np.concatenate([s, np.broadcast_to(np.asarray(sinks, np.float64)[:, None, None], s.shape[:3] + (1,))], -1)
        v = np.concatenate([v, np.zeros_like(v[:, :, :1])], 2)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - np.where(np.isinf(top), 0, top))
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.where(total > 0, p @ v / total, 0)
        lse = (np.where(np.isinf(top), 0, top) + np.log(total))[..., 0]
    return out, lse
