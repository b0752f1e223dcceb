# SPDX-License-Identifier: Apache-2.0
"""A torch program whose attention runs within a budget: python3 examples/python/torch_sdpa.py (needs torch)"""
import torch, cqsa

q, k, v = torch.randn(3, 1, 8, 4096, 64).to(torch.bfloat16)
wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
cqsa.patch_torch_sdpa(min_tokens=1024, memory_limit="4MiB")
out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
cqsa.unpatch_torch_sdpa()
print(f"largest difference {(out - wanted).abs().max().item():.1e}")
out, info = cqsa.attention(q, k, v, causal="top_left", memory_limit="4MiB", return_info=True)  # the same by name
print(type(out).__name__, info["line"])
