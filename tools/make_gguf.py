#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a small GGUF file with the structure of a mixture-of-experts model, from seeded numbers: for tests and for trying things out.

    make_gguf.py model.gguf [--experts 64] [--top-k 4] [--hidden 512] [--inter 256] [--layers 2] [--formats Q4_K,Q6_K,..] [--seed 1]

Each layer has a router (F32), gate, up and down of all experts, and norms, under the names that llama.cpp gives them. The experts of layer n have the
n-th three of the formats (gate, up, down; the list is repeated). Weights are random blocks with sensible scales: no format needs a quantizer.
Needs numpy only. The same arguments give the same bytes.
"""
import argparse
import struct

import numpy as np

# name: (id, elements of a block, bytes of a block, where its f16 scale is, values of about that size for a scale of 1)
FORMATS = {
    "F32": (0, 1, 4, None, 1), "F16": (1, 1, 2, None, 1), "BF16": (30, 1, 2, None, 1),
    "Q1_0": (41, 128, 18, 0, 1), "Q2_0": (42, 64, 18, 0, 1),
    "Q4_0": (2, 32, 18, 0, 4.6), "Q4_1": (3, 32, 20, 0, 4.6), "Q5_0": (6, 32, 22, 0, 9.2), "Q5_1": (7, 32, 24, 0, 9.2), "Q8_0": (8, 32, 34, 0, 74),
    "Q2_K": (10, 256, 84, 80, 14), "Q3_K": (11, 256, 110, 108, 42), "Q4_K": (12, 256, 144, 0, 280), "Q5_K": (13, 256, 176, 0, 570),
    "Q6_K": (14, 256, 210, 208, 1370),
    "IQ1_S": (19, 256, 50, 0, 7), "IQ2_XXS": (16, 256, 66, 0, 52), "IQ2_XS": (17, 256, 74, 0, 52), "IQ2_S": (22, 256, 82, 0, 52),
    "IQ3_XXS": (18, 256, 98, 0, 128), "IQ3_S": (21, 256, 110, 0, 135), "IQ4_NL": (20, 32, 18, 0, 67), "IQ4_XS": (23, 256, 136, 0, 1240),
    "TQ1_0": (34, 256, 54, 52, 0.8), "TQ2_0": (35, 256, 66, 64, 1), "MXFP4": (39, 32, 17, None, 3.1), "NVFP4": (40, 64, 36, None, 4.6),
}
# Where a second f16 is, the minimum, and how large against the scale, so that values lie on both sides of 0.
MINIMA = {"Q4_1": (2, -7.5), "Q5_1": (2, -15.5), "Q2_K": (82, 1.5), "Q4_K": (2, 7.5), "Q5_K": (2, 15.5)}
KINDS = {"uint32": 4, "float32": 6, "bool": 7, "string": 8, "array": 9}
ALIGNMENT = 32
DEFAULT_FORMATS = "Q4_K,Q4_K,Q6_K,IQ2_XXS,IQ4_XS,Q2_0"


def blocks(random, name, rows, cols, size):
    """uint8 [rows, bytes of a row] whose values are about `size` large."""
    _, elements, count, scale_at, unit = FORMATS[name]
    if cols % elements:
        raise SystemExit("%s has blocks of %d: a row of %d is no multiple of it" % (name, elements, cols))
    if name in ("F32", "F16", "BF16"):
        values = (random.standard_normal((rows, cols)) * size).astype(np.float32)
        if name == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(rows, -1)
        return values.astype(np.float16 if name == "F16" else np.float32).view(np.uint8).reshape(rows, -1)
    data = random.integers(0, 256, (rows * cols // elements, count), dtype=np.uint8)
    spread = random.uniform(0.7, 1.4, len(data)) * size / unit
    if name == "MXFP4":
        data[:, 0] = np.clip(np.round(np.log2(spread)) + 127, 1, 254).astype(np.uint8)
    elif name == "NVFP4":  # e4m3 without sign: 2^(e - 7), e from 1 on
        data[:, :4] = np.clip((np.round(np.log2(spread)) + 7)[:, None] * 8 + random.integers(0, 8, (len(data), 4)), 8, 126).astype(np.uint8)
    else:
        put(data, scale_at, spread)
    if name in MINIMA:
        at, factor = MINIMA[name]
        put(data, at, spread * factor)
    return data.reshape(rows, -1)


def put(data, at, values):
    data[:, at:at + 2] = values.astype(np.float16).view(np.uint8).reshape(-1, 2)


def text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(key, kind, value):
    """A key of the file."""
    packed = {"uint32": lambda: struct.pack("<I", value), "float32": lambda: struct.pack("<f", value), "bool": lambda: struct.pack("<?", value),
              "string": lambda: text(value),
              "array": lambda: struct.pack("<IQ", KINDS["string"], len(value)) + b"".join(map(text, value))}[kind]()
    return text(key) + struct.pack("<I", KINDS[kind]) + packed


def model(options):
    """[(name, format, shape slowest axis first, bytes)]"""
    random, hidden, inter, experts = np.random.default_rng(options.seed), options.hidden, options.inter, options.experts
    formats = options.formats.split(",")
    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise SystemExit("unknown format %s, wanted one of %s" % (unknown[0], ", ".join(FORMATS)))
    tensors = []

    def add(name, format, shape, size):
        rows = int(np.prod(shape[:-1]))
        tensors.append((name, format, shape, blocks(random, format, rows, shape[-1], size).tobytes()))

    for layer in range(options.layers):
        for part, name in enumerate(("gate", "up", "down")):
            shape = (experts, hidden, inter) if name == "down" else (experts, inter, hidden)
            add("blk.%d.ffn_%s_exps.weight" % (layer, name), formats[(3 * layer + part) % len(formats)], shape, shape[-1] ** -0.5)
        add("blk.%d.ffn_gate_inp.weight" % layer, "F32", (experts, hidden), hidden ** -0.5)
        add("blk.%d.ffn_norm.weight" % layer, "F32", (hidden,), 1.0)
    return tensors


def file_bytes(options):
    tensors = model(options)
    keys = [("general.architecture", "string", "moe-test"), ("general.alignment", "uint32", ALIGNMENT), ("general.name", "string", "seeded random experts"),
            ("general.tags", "array", ["test", "random"]), ("moe-test.block_count", "uint32", options.layers),
            ("moe-test.embedding_length", "uint32", options.hidden), ("moe-test.expert_feed_forward_length", "uint32", options.inter),
            ("moe-test.expert_count", "uint32", options.experts), ("moe-test.expert_used_count", "uint32", options.top_k),
            ("moe-test.expert_weights_norm", "bool", True), ("moe-test.attention.layer_norm_rms_epsilon", "float32", 1e-6)]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(entry(*key) for key in keys)
    offset, parts = 0, []
    for name, format, shape, data in tensors:
        head += text(name) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", size) for size in reversed(shape))
        head += struct.pack("<IQ", FORMATS[format][0], offset)
        parts.append(data + bytes(-len(data) % ALIGNMENT))
        offset += len(parts[-1])
    return head + bytes(-len(head) % ALIGNMENT) + b"".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--inter", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--formats", default=DEFAULT_FORMATS, help="of gate, up and down of the layers, in turn (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    data = file_bytes(options)
    with open(options.path, "wb") as file:
        file.write(data)
    print("%s: %d layers of %d experts, %.1f MiB" % (options.path, options.layers, options.experts, len(data) / 2**20))


if __name__ == "__main__":
    main()
