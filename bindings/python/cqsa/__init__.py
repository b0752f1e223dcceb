# SPDX-License-Identifier: Apache-2.0
"""Exact attention under any memory budget.

    import numpy as np, cqsa
    q = k = v = np.random.randn(1, 8, 4096, 64).astype(np.float32)
    out = cqsa.attention(q, k, v, causal="top_left", memory_limit="4MiB")

Importing this package loads neither the library nor a GPU driver; the first call does (see cqsa._ffi for where the
library is looked for, and doctor() for what was found).
"""

from ._attention import attention, attention_merge
from ._context import backends
from ._doctor import doctor
from ._errors import (
    CqsaError,
    CqsaLibraryError,
    CqsaMemoryError,
    CqsaNotImplementedError,
    CqsaRuntimeError,
    CqsaValueError,
)
from ._fp8 import (
    Quantized,
    fp8_amax,
    fp8_dequantize,
    fp8_quantize,
    fp8_quantize_many,
    fp8_requantize,
    fp8_scale_from_amax,
    fp8_scale_relayout,
    fp8_transpose,
)
from ._fp8_gemm import fp8_gemm, fp8_gemm_explain
from ._fp8_ring import Ring, RingInfo, fp8_ring_fold, fp8_ring_staged
from ._kv import hadamard, kv_append, kv_gather
from ._moe import MoeInfo, moe_prefill
from ._moe_parts import MoeGroups, moe_combine, moe_group, moe_quantize_activations, moe_route
from ._patch import patch_torch_sdpa, unpatch_torch_sdpa
from ._place import Placement, place
from ._plan import Plan, attention_plan
from ._quant import Gguf, QuantTensor, dequantize_rows, quant_formats, quantize_rows
from ._selected import attention_selected
from ._sources import Tensor
from ._version import __version__

__all__ = [
    "CqsaError",
    "CqsaLibraryError",
    "CqsaMemoryError",
    "CqsaNotImplementedError",
    "CqsaRuntimeError",
    "CqsaValueError",
    "Gguf",
    "MoeGroups",
    "MoeInfo",
    "Placement",
    "Plan",
    "Quantized",
    "Ring",
    "RingInfo",
    "QuantTensor",
    "Tensor",
    "__version__",
    "attention",
    "attention_merge",
    "attention_plan",
    "attention_selected",
    "backends",
    "dequantize_rows",
    "doctor",
    "fp8_amax",
    "fp8_dequantize",
    "fp8_gemm",
    "fp8_gemm_explain",
    "fp8_quantize",
    "fp8_quantize_many",
    "fp8_requantize",
    "fp8_ring_fold",
    "fp8_ring_staged",
    "fp8_scale_from_amax",
    "fp8_scale_relayout",
    "fp8_transpose",
    "hadamard",
    "kv_append",
    "kv_gather",
    "moe_combine",
    "moe_group",
    "moe_prefill",
    "moe_quantize_activations",
    "moe_route",
    "patch_torch_sdpa",
    "place",
    "quant_formats",
    "quantize_rows",
    "unpatch_torch_sdpa",
]
