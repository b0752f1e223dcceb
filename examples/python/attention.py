# SPDX-License-Identifier: Apache-2.0
"""Attention of a real model's layer, under smaller and smaller budgets: python3 examples/python/attention.py"""
import json, pathlib
import numpy as np, cqsa

raw = np.memmap(pathlib.Path(__file__).parents[1] / "data" / "minilm_qkv.safetensors", np.uint8, "r")
end = 8 + int(raw[:8].view(np.uint64)[0])  # a safetensors file is a length, a JSON header and the tensors
places = {name: entry["data_offsets"] for name, entry in json.loads(raw[8:end].tobytes()).items() if name in "qkv"}
q, k, v = (raw[end + begin:end + stop].view(np.float16).reshape(6, 12, 512, 32) for begin, stop in (places[n] for n in "qkv"))

unlimited = cqsa.attention(q, k, v)
for limit in ("4MiB", "100KiB", "30KiB"):
    out, info = cqsa.attention(q, k, v, memory_limit=limit, backend="cpu", return_info=True)
    print(f"{limit:>6}: largest difference {np.abs(out - unlimited).max():.1e}, {info['line']}")
