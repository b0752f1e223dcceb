# SPDX-License-Identifier: Apache-2.0
"""Operands in one mapped file, the result in another, nothing copied: python3 examples/python/mapped.py"""
import mmap, tempfile
import numpy as np, cqsa

shape = (1, 4, 2048, 64)
with tempfile.TemporaryFile() as file, tempfile.TemporaryFile() as result:
    file.write(np.random.default_rng(0).standard_normal((3, *shape), np.float32).tobytes())  # q, k, v
    result.truncate(4 * 2048 * 64 * 4)
    whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    parts = (whole[i * len(whole) // 3:(i + 1) * len(whole) // 3] for i in range(3))
    q, k, v = (part.cast("f", shape=shape) for part in parts)  # any object with a buffer will do
    out = memoryview(mmap.mmap(result.fileno(), 0)).cast("B").cast("f", shape=shape)
    _, info = cqsa.attention(q, k, v, causal="top_left", memory_limit="512KiB", out=out, return_info=True)
    print(out[0, 0, 0, 0] == v[0, 0, 0, 0], info["line"])
