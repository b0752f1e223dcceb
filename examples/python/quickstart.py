# SPDX-License-Identifier: Apache-2.0
import numpy as np, cqsa
q, k, v = (np.random.randn(1, 8, 16384, 64).astype(np.float16) for _ in "qkv")  # batch, heads, tokens, channels
out, info = cqsa.attention(q, k, v, causal="top_left", memory_limit="8MiB", return_info=True)
print(out.shape, info["line"])
