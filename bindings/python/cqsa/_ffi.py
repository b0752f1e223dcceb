# SPDX-License-Identifier: Apache-2.0
"""cqsa.h for ctypes: structs, constants, prototypes, and where the library is looked for.

Nothing is loaded at import. `library()` loads at its first call, in this order:

1. the file named by the environment variable CQSA_LIBRARY (an absolute path; when it is set, nothing else is tried),
2. `lib/libcqsa.so.0` inside this package,
3. `libcqsa.so.0` by the system's loader.
"""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import POINTER, c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any, Dict, List, Optional, Tuple, Type

from ._errors import CqsaLibraryError, error_for

ABI_VERSION = 0
LIBRARY_NAME = "libcqsa.so.0"

# ---------------------------------------------------------------------------------------------------------------------
# Constants. tests/python/test_ffi.py compares every one with the header.
# ---------------------------------------------------------------------------------------------------------------------

OK = 0

DTYPE_NONE = 0
DTYPE_I8 = 0x00010800
DTYPE_I32 = 0x00012000
DTYPE_I64 = 0x00014000
DTYPE_U8 = 0x00010801
DTYPE_F16 = 0x00011002
DTYPE_F32 = 0x00012002
DTYPE_F64 = 0x00014002
DTYPE_BF16 = 0x00011004
DTYPE_BOOL = 0x00010806
DTYPE_E4M3FN = 0x0001080A
DTYPE_E4M3FNUZ = 0x0001080B
DTYPE_E5M2 = 0x0001080C
DTYPE_E5M2FNUZ = 0x0001080D
DTYPE_E8M0FNU = 0x0001080E

DEVICE_CPU = 1
DEVICE_CUDA = 2
DEVICE_CUDA_HOST = 3
DEVICE_ROCM = 10
DEVICE_ROCM_HOST = 11
DEVICE_EXT = 12
HOST_DEVICES = (DEVICE_CPU, DEVICE_CUDA_HOST, DEVICE_ROCM_HOST)  # memory that this process can read

BACKEND_STATES: Tuple[str, ...] = (
    "ready", "not_found", "load_failed", "abi_mismatch", "no_driver", "no_device", "no_device_code")
CAUSAL: Dict[str, int] = {"none": 0, "top_left": 1, "bottom_right": 2}
SCHEDULES: Tuple[str, ...] = ("auto", "direct", "stream", "cqs")
PRECISIONS: Tuple[str, ...] = ("default", "fast", "split", "f32")
KV_FORMATS: Tuple[str, ...] = ("elements", "q4_0")
MEMORIES: Tuple[str, ...] = ("host", "pinned", "device", "tile", "mapped")

ATTENTION_WINDOW = 1 << 0
ATTENTION_BATCH_INVARIANT = 1 << 9
SELECTED_CHECK = 1 << 0
ATTENTION_DETERMINISTIC = 1 << 10

FP8_CURRENT, FP8_STATIC, FP8_RING = 0, 1, 2
FP8_SCALES: Tuple[str, ...] = ("strided", "packed", "tiled")
FP8_NAN: Tuple[str, ...] = ("propagate", "ignore")
FP8_RINGS: Tuple[str, ...] = ("max", "most_recent")
FP8_ACCUMULATE: Dict[str, int] = {"promote": 0, "fast": 1}
FP8_PROVIDERS: Tuple[str, ...] = ("auto", "own", "vendor")
FP8_POW2 = 1 << 0
FP8_NO_SATURATE = 1 << 1
FP8_RING_STAGE = 1 << 2
FP8_SILU = 1 << 3

MOE_ACTIVATIONS: Tuple[str, ...] = ("swiglu", "geglu", "geglu_tanh", "silu", "gelu", "gelu_tanh", "relu2")
MOE_LAYOUTS: Tuple[str, ...] = ("separate", "concat", "interleaved")
MOE_PRECISIONS: Tuple[str, ...] = ("auto", "q8", "f16")
MOE_OUTPUTS: Tuple[str, ...] = ("combined", "per_slot")
MOE_SCORINGS: Tuple[str, ...] = ("softmax", "sigmoid")
MOE_GROUP_SCORES: Tuple[str, ...] = ("max", "top2")
MOE_BATCH_INVARIANT = 1 << 0
MOE_RENORMALISE = 1 << 0

# ---------------------------------------------------------------------------------------------------------------------
# Structs, field by field as in the header. Pointers to tensors are plain addresses here: faster to fill.
# ---------------------------------------------------------------------------------------------------------------------


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p), ("device_type", c_int32), ("device_id", c_int32), ("ndim", c_int32), ("dtype", c_int32),
        ("shape", c_void_p), ("strides", c_void_p), ("byte_offset", c_uint64),
    ]


class Allocator(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32), ("flags", c_uint32), ("user", c_void_p), ("allocate", c_void_p),
        ("release", c_void_p),
    ]


class BackendInfo(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32), ("flags", c_uint32), ("state", c_int32), ("device_count", c_int32),
        ("name", c_char * 32), ("reason", c_char * 512), ("device", c_char * 128),
    ]


class ContextParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32), ("flags", c_uint32), ("backend", c_char_p), ("backend_path", c_char_p),
        ("device", c_int32), ("num_threads", c_int32), ("allocator", c_void_p), ("parallel_for", c_void_p),
        ("parallel_for_user", c_void_p), ("log", c_void_p), ("log_user", c_void_p),
    ]


class AttentionParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32), ("flags", c_uint32),
        ("batch", c_int64), ("num_heads", c_int64), ("num_kv_heads", c_int64), ("head_dim", c_int64),
        ("head_dim_v", c_int64), ("seqlen_q", c_int64), ("seqlen_k", c_int64), ("total_q", c_int64),
        ("total_k", c_int64), ("page_size", c_int64), ("num_pages", c_int64),
        ("dtype_q", c_int32), ("dtype_kv", c_int32), ("dtype_out", c_int32), ("dtype_bias", c_int32),
        ("scale_k", c_int32), ("scale_v", c_int32), ("kv_group", c_int64),
        ("memory_q", c_int32), ("memory_kv", c_int32), ("memory_out", c_int32), ("causal", c_int32),
        ("window_left", c_int64), ("window_right", c_int64), ("softmax_scale", c_double), ("softcap", c_double),
        ("dropout", c_double), ("mask_broadcast", c_uint32), ("bias_broadcast", c_uint32),
        ("max_device_bytes", c_uint64), ("max_host_bytes", c_uint64), ("max_pinned_bytes", c_uint64),
        ("schedule", c_int32), ("cqs_c", c_int32), ("cqs_itr", c_int32), ("precision", c_int32),
        ("tile_q", c_int64), ("tile_k", c_int64),
    ]


class RunInfo(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32), ("flags", c_uint32),
        ("peak_device_bytes", c_uint64), ("peak_host_bytes", c_uint64), ("peak_pinned_bytes", c_uint64),
        ("bytes_in", c_uint64), ("bytes_out", c_uint64), ("tasks", c_int64), ("seconds", c_double),
        ("retries", c_int32), ("schedule", c_int32), ("cqs_c", c_int32), ("cqs_itr", c_int32),
        ("in_flight", c_int32), ("place_acc", c_int32), ("tile_q", c_int64), ("tile_k", c_int64),
    ]


class AttentionArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32), ("flags", c_uint32),
        ("q", c_void_p), ("k", c_void_p), ("v", c_void_p), ("k_scale", c_void_p), ("v_scale", c_void_p),
        ("mask", c_void_p), ("bias", c_void_p), ("alibi_slopes", c_void_p), ("sinks", c_void_p),
        ("cu_seqlens_q", c_void_p), ("cu_seqlens_k", c_void_p), ("seqused_k", c_void_p), ("page_table", c_void_p),
        ("out", c_void_p), ("lse", c_void_p), ("workspace", c_void_p), ("workspace_bytes", c_uint64),
        ("cancel", c_void_p), ("progress", c_void_p), ("progress_user", c_void_p), ("info", c_void_p),
        ("checkpoint", c_char_p),
    ]


class PlanInfo(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32), ("flags", c_uint32),
        ("schedule", c_int32), ("cqs_c", c_int32), ("cqs_itr", c_int32), ("in_flight", c_int32),
        ("tasks", c_int64), ("tile_q", c_int64), ("tile_k", c_int64),
        ("peak_device_bytes", c_uint64), ("peak_host_bytes", c_uint64), ("peak_pinned_bytes", c_uint64),
        ("workspace_bytes", c_uint64), ("bytes_in", c_uint64), ("bytes_out", c_uint64),
        ("flops", c_double), ("seconds", c_double),
        ("place_q", c_int32), ("place_kv", c_int32), ("place_acc", c_int32), ("place_out", c_int32),
        ("implementation", c_char * 64), ("backend", c_char * 32),
    ]


class MergeArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32), ("flags", c_uint32), ("out_a", c_void_p), ("lse_a", c_void_p), ("out_b", c_void_p),
        ("lse_b", c_void_p), ("out", c_void_p), ("lse", c_void_p),
    ]


class SelectedArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32), ("flags", c_uint32),
        ("q", c_void_p), ("k", c_void_p), ("v", c_void_p), ("k_scale", c_void_p), ("v_scale", c_void_p),
        ("page_table", c_void_p), ("cells", c_void_p), ("counts", c_void_p), ("out", c_void_p), ("lse", c_void_p),
        ("softmax_scale", c_double), ("precision", c_int32), ("kv_group", c_int32),
        ("workspace", c_void_p), ("workspace_bytes", c_uint64),
    ]


class KvArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32), ("flags", c_uint32), ("x", c_void_p), ("pool", c_void_p), ("scale", c_void_p),
        ("page_table", c_void_p), ("cells", c_void_p), ("format", c_int32), ("kv_group", c_int32),
    ]


class Fp8Ring(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32), ("flags", c_uint32), ("state", c_void_p), ("bytes", c_uint64), ("hist_len", c_int32),
        ("format", c_int32), ("margin", c_int32), ("algorithm", c_int32),
    ]


class Fp8RingInfo(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32), ("flags", c_uint32), ("index", c_int32), ("refused", c_int32), ("staged", c_float),
        ("scale", c_float), ("scale_inv", c_float), ("reserved", c_float),
    ]


class Fp8Side(ctypes.Structure):
    _fields_ = [
        ("out", c_void_p), ("scale_in", c_void_p), ("scale", c_void_p), ("scale_inv", c_void_p), ("block", c_int64 * 2),
        ("scale_layout", c_int32), ("reserved", c_int32),
    ]


class Fp8QuantizeArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32), ("flags", c_uint32), ("x", c_void_p), ("x_scale_inv", c_void_p), ("x_block", c_int64 * 2),
        ("up", c_void_p), ("row", Fp8Side), ("transposed", Fp8Side), ("source", c_int32), ("nan_policy", c_int32),
        ("margin", c_int32), ("eps", c_float), ("amax_limit", c_float), ("reserved", c_float), ("ring", c_void_p),
        ("groups", c_void_p), ("rng", c_void_p), ("skip", c_void_p), ("amax", c_void_p), ("column_sum", c_void_p),
        ("counters", c_void_p), ("workspace", c_void_p), ("workspace_bytes", c_uint64),
    ]


class Fp8ScaleArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32), ("flags", c_uint32), ("amax", c_void_p), ("scale", c_void_p), ("scale_inv", c_void_p),
        ("format", c_int32), ("scale_layout", c_int32), ("margin", c_int32), ("eps", c_float), ("amax_limit", c_float),
        ("reserved", c_float),
    ]


class Fp8DequantizeArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32), ("flags", c_uint32), ("codes", c_void_p), ("scale_inv", c_void_p), ("groups", c_void_p),
        ("out", c_void_p), ("block", c_int64 * 2), ("scale_layout", c_int32), ("reserved", c_int32),
    ]


class Fp8GemmArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32), ("flags", c_uint32), ("a", c_void_p), ("b", c_void_p), ("scale_inv_a", c_void_p),
        ("scale_inv_b", c_void_p), ("block_a", c_int64 * 2), ("block_b", c_int64 * 2), ("c", c_void_p), ("bias", c_void_p),
        ("d", c_void_p), ("d_scale", c_void_p), ("d_amax", c_void_p), ("alpha", c_double), ("beta", c_double),
        ("accumulate", c_int32), ("provider", c_int32), ("workspace", c_void_p), ("workspace_bytes", c_uint64),
    ]


class QuantFormatInfo(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32), ("flags", c_uint32), ("name", c_char * 16), ("ggml_type", c_int32), ("block_elements", c_int32),
        ("block_bytes", c_int32), ("can_quantize", c_int32),
    ]


class QuantTensor(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32), ("flags", c_uint32), ("format", c_int32), ("device_type", c_int32), ("device_id", c_int32),
        ("reserved", c_int32), ("data", c_void_p), ("rows", c_int64), ("row_elements", c_int64), ("row_bytes", c_uint64),
        ("data_bytes", c_uint64),
    ]


class GgufTensorInfo(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32), ("flags", c_uint32), ("name", c_char_p), ("ggml_type", c_int32), ("format", c_int32),
        ("ndim", c_int32), ("reserved", c_int32), ("shape", c_int64 * 4), ("data", c_void_p), ("bytes", c_uint64),
        ("file_offset", c_uint64),
    ]


class MoeMatrix(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p), ("data_bytes", c_uint64), ("row_bytes", c_uint64), ("scale", c_void_p), ("format", c_int32),
        ("device_type", c_int32), ("device_id", c_int32), ("flags", c_uint32), ("reserved", c_int64 * 2),
    ]


class MoeWeights(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32), ("flags", c_uint32), ("num_experts", c_int64), ("rows", c_int64), ("row_elements", c_int64),
        ("experts", c_void_p), ("device_experts", c_void_p), ("all", MoeMatrix), ("expert_bytes", c_uint64),
    ]


class MoeShared(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32), ("flags", c_uint32), ("w_gate", c_void_p), ("w_up", c_void_p), ("w_down", c_void_p),
        ("gate", c_void_p),
    ]


class MoeArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32), ("flags", c_uint32), ("x", c_void_p), ("topk_ids", c_void_p), ("topk_weights", c_void_p),
        ("w_gate", c_void_p), ("w_up", c_void_p), ("w_down", c_void_p), ("b_gate", c_void_p), ("b_up", c_void_p),
        ("b_down", c_void_p), ("expert_map", c_void_p), ("shared", c_void_p), ("out", c_void_p), ("counters", c_void_p),
        ("gate_up_layout", c_int32), ("activation", c_int32), ("alpha", c_float), ("beta", c_float), ("limit", c_float),
        ("precision", c_int32), ("output", c_int32), ("reserved", c_int32), ("max_bytes", c_uint64), ("workspace", c_void_p),
        ("workspace_bytes", c_uint64),
    ]


class MoeRouteArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32), ("flags", c_uint32), ("logits", c_void_p), ("bias", c_void_p), ("topk_ids", c_void_p),
        ("topk_weights", c_void_p), ("scoring", c_int32), ("group_score", c_int32), ("num_groups", c_int32),
        ("topk_groups", c_int32), ("scale", c_float), ("reserved", c_int32),
    ]


class MoeGroupArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32), ("flags", c_uint32), ("topk_ids", c_void_p), ("expert_map", c_void_p), ("offsets", c_void_p),
        ("order", c_void_p), ("counts", c_void_p), ("places", c_void_p), ("counters", c_void_p),
    ]


class MoeCombineArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32), ("flags", c_uint32), ("y", c_void_p), ("topk_weights", c_void_p), ("topk_ids", c_void_p),
        ("out", c_void_p),
    ]


STRUCTS: Dict[str, Type[ctypes.Structure]] = {
    "cqsa_tensor": Tensor,
    "cqsa_allocator": Allocator,
    "cqsa_backend_info": BackendInfo,
    "cqsa_context_params": ContextParams,
    "cqsa_attention_params": AttentionParams,
    "cqsa_run_info": RunInfo,
    "cqsa_attention_args": AttentionArgs,
    "cqsa_plan_info": PlanInfo,
    "cqsa_attention_merge_args": MergeArgs,
    "cqsa_attention_selected_args": SelectedArgs,
    "cqsa_kv_args": KvArgs,
    "cqsa_fp8_ring": Fp8Ring,
    "cqsa_fp8_ring_info": Fp8RingInfo,
    "cqsa_fp8_side": Fp8Side,
    "cqsa_fp8_quantize_args": Fp8QuantizeArgs,
    "cqsa_fp8_scale_args": Fp8ScaleArgs,
    "cqsa_fp8_dequantize_args": Fp8DequantizeArgs,
    "cqsa_fp8_gemm_args": Fp8GemmArgs,
    "cqsa_quant_format_info": QuantFormatInfo,
    "cqsa_quant_tensor": QuantTensor,
    "cqsa_gguf_tensor_info": GgufTensorInfo,
    "cqsa_moe_matrix": MoeMatrix,
    "cqsa_moe_weights": MoeWeights,
    "cqsa_moe_shared": MoeShared,
    "cqsa_moe_args": MoeArgs,
    "cqsa_moe_route_args": MoeRouteArgs,
    "cqsa_moe_group_args": MoeGroupArgs,
    "cqsa_moe_combine_args": MoeCombineArgs,
}

PROGRESS_FN = ctypes.CFUNCTYPE(c_int32, c_void_p, c_int64, c_int64)

# ---------------------------------------------------------------------------------------------------------------------
# Functions: name -> (result, arguments). Opaque handles and struct pointers are addresses or byref().
# ---------------------------------------------------------------------------------------------------------------------

_LENGTH = POINTER(c_uint64)
_HANDLE_OUT = POINTER(c_void_p)
_INIT: Tuple[Any, List[Any]] = (None, [c_void_p, c_uint64])

FUNCTIONS: Dict[str, Tuple[Any, List[Any]]] = {
    "cqsa_version": (c_int32, []),
    "cqsa_abi_version": (c_int32, []),
    "cqsa_version_string": (c_char_p, []),
    "cqsa_build_info": (c_char_p, []),
    "cqsa_status_string": (c_char_p, [c_int32]),
    "cqsa_last_error": (c_char_p, []),
    "cqsa_backend_info_init": _INIT,
    "cqsa_backend_name": (c_char_p, [c_int32]),
    "cqsa_backend_query": (c_int32, [c_char_p, c_char_p, POINTER(BackendInfo)]),
    "cqsa_context_params_init": _INIT,
    "cqsa_context_create": (c_int32, [POINTER(ContextParams), _HANDLE_OUT]),
    "cqsa_context_destroy": (None, [c_void_p]),
    "cqsa_context_backend": (c_char_p, [c_void_p]),
    "cqsa_context_hardware": (c_int32, [c_void_p, c_void_p, c_uint64, _LENGTH]),
    "cqsa_attention_params_init": _INIT,
    "cqsa_run_info_init": _INIT,
    "cqsa_attention_args_init": _INIT,
    "cqsa_attention_params_of": (c_int32, [c_void_p, POINTER(AttentionArgs), POINTER(AttentionParams)]),
    "cqsa_attention": (c_int32, [c_void_p, POINTER(AttentionParams), POINTER(AttentionArgs), c_void_p]),
    "cqsa_attention_query": (c_int32, [c_void_p, POINTER(AttentionParams)]),
    "cqsa_attention_plan_create": (c_int32, [c_void_p, POINTER(AttentionParams), _HANDLE_OUT]),
    "cqsa_attention_plan_create_for": (c_int32, [c_char_p, POINTER(AttentionParams), _HANDLE_OUT]),
    "cqsa_plan_destroy": (None, [c_void_p]),
    "cqsa_plan_info_init": _INIT,
    "cqsa_plan_describe": (c_int32, [c_void_p, POINTER(PlanInfo)]),
    "cqsa_plan_line": (c_int32, [c_void_p, c_void_p, c_void_p, c_uint64, _LENGTH]),
    "cqsa_plan_explain": (c_int32, [c_void_p, c_void_p, c_uint64, _LENGTH]),
    "cqsa_plan_json": (c_int32, [c_void_p, c_void_p, c_uint64, _LENGTH]),
    "cqsa_workspace_query": (c_int32, [c_void_p, _LENGTH]),
    "cqsa_workspace_init": (c_int32, [c_void_p, c_void_p, c_uint64]),
    "cqsa_attention_execute": (c_int32, [c_void_p, POINTER(AttentionArgs), c_void_p]),
    "cqsa_attention_merge_args_init": _INIT,
    "cqsa_attention_merge": (c_int32, [c_void_p, POINTER(MergeArgs), c_void_p]),
    "cqsa_attention_selected_args_init": _INIT,
    "cqsa_attention_selected": (c_int32, [c_void_p, POINTER(SelectedArgs), c_void_p]),
    "cqsa_attention_selected_workspace": (c_int32, [c_void_p, POINTER(SelectedArgs), _LENGTH]),
    "cqsa_kv_args_init": _INIT,
    "cqsa_kv_append": (c_int32, [c_void_p, POINTER(KvArgs), c_void_p]),
    "cqsa_kv_gather": (c_int32, [c_void_p, POINTER(KvArgs), c_void_p]),
    "cqsa_hadamard": (c_int32, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "cqsa_fp8_ring_struct_init": _INIT,
    "cqsa_fp8_ring_bytes": (c_int32, [POINTER(Fp8Ring), _LENGTH]),
    "cqsa_fp8_ring_init": (c_int32, [c_void_p, POINTER(Fp8Ring), c_float, c_void_p]),
    "cqsa_fp8_ring_fold": (c_int32, [c_void_p, c_void_p, c_int64, c_void_p, c_void_p]),
    "cqsa_fp8_ring_staged": (c_int32, [c_void_p, c_void_p, c_int64, c_void_p, c_void_p]),
    "cqsa_fp8_ring_info_init": _INIT,
    "cqsa_fp8_ring_read": (c_int32, [c_void_p, POINTER(Fp8Ring), POINTER(Fp8RingInfo), c_void_p, c_void_p]),
    "cqsa_fp8_quantize_args_init": _INIT,
    "cqsa_fp8_quantize": (c_int32, [c_void_p, POINTER(Fp8QuantizeArgs), c_void_p]),
    "cqsa_fp8_quantize_many": (c_int32, [c_void_p, c_void_p, c_int64, c_void_p]),
    "cqsa_fp8_quantize_workspace": (c_int32, [c_void_p, c_void_p, c_int64, _LENGTH]),
    "cqsa_fp8_workspace_init": (c_int32, [c_void_p, c_void_p, c_uint64, c_void_p]),
    "cqsa_fp8_amax": (c_int32, [c_void_p, c_void_p, POINTER(c_int64), c_int32, c_void_p, c_void_p, c_uint64, c_void_p]),
    "cqsa_fp8_scale_args_init": _INIT,
    "cqsa_fp8_scale_from_amax": (c_int32, [c_void_p, POINTER(Fp8ScaleArgs), c_void_p]),
    "cqsa_fp8_scale_relayout": (c_int32, [c_void_p, c_void_p, c_int32, c_void_p, c_int32, c_int64, c_int64, c_void_p]),
    "cqsa_fp8_dequantize_args_init": _INIT,
    "cqsa_fp8_dequantize": (c_int32, [c_void_p, POINTER(Fp8DequantizeArgs), c_void_p]),
    "cqsa_fp8_transpose": (c_int32, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "cqsa_fp8_gemm_args_init": _INIT,
    "cqsa_fp8_gemm": (c_int32, [c_void_p, POINTER(Fp8GemmArgs), c_void_p]),
    "cqsa_fp8_gemm_workspace": (c_int32, [c_void_p, POINTER(Fp8GemmArgs), _LENGTH]),
    "cqsa_fp8_gemm_explain": (c_int32, [c_void_p, POINTER(Fp8GemmArgs), c_void_p, c_uint64, _LENGTH]),
    "cqsa_quant_format_info_init": _INIT,
    "cqsa_quant_format_query": (c_int32, [c_int32, POINTER(QuantFormatInfo)]),
    "cqsa_quant_tensor_init": _INIT,
    "cqsa_dequantize_rows": (c_int32, [c_void_p, POINTER(QuantTensor), c_int64, c_void_p, c_void_p, c_void_p]),
    "cqsa_quantize_rows": (c_int32, [c_void_p, c_void_p, POINTER(QuantTensor), c_void_p]),
    "cqsa_gguf_open": (c_int32, [c_char_p, _HANDLE_OUT]),
    "cqsa_gguf_close": (None, [c_void_p]),
    "cqsa_gguf_tensor_info_init": _INIT,
    "cqsa_gguf_tensor_count": (c_int64, [c_void_p]),
    "cqsa_gguf_find": (c_int32, [c_void_p, c_char_p, POINTER(c_int64)]),
    "cqsa_gguf_tensor": (c_int32, [c_void_p, c_int64, POINTER(GgufTensorInfo)]),
    "cqsa_gguf_matrix": (c_int32, [c_void_p, c_int64, c_int64, POINTER(QuantTensor)]),
    "cqsa_gguf_key_count": (c_int64, [c_void_p]),
    "cqsa_gguf_key": (c_char_p, [c_void_p, c_int64]),
    "cqsa_gguf_integer": (c_int32, [c_void_p, c_char_p, POINTER(c_int64)]),
    "cqsa_gguf_number": (c_int32, [c_void_p, c_char_p, POINTER(c_double)]),
    "cqsa_gguf_text": (c_int32, [c_void_p, c_char_p, c_void_p, c_uint64, _LENGTH]),
    "cqsa_moe_weights_init": _INIT,
    "cqsa_moe_shared_init": _INIT,
    "cqsa_moe_args_init": _INIT,
    "cqsa_moe_prefill": (c_int32, [c_void_p, POINTER(MoeArgs), c_void_p]),
    "cqsa_moe_workspace": (c_int32, [c_void_p, POINTER(MoeArgs), _LENGTH]),
    "cqsa_moe_explain": (c_int32, [c_void_p, POINTER(MoeArgs), c_void_p, c_uint64, _LENGTH]),
    "cqsa_moe_route_args_init": _INIT,
    "cqsa_moe_route": (c_int32, [c_void_p, POINTER(MoeRouteArgs), c_void_p]),
    "cqsa_moe_group_args_init": _INIT,
    "cqsa_moe_group": (c_int32, [c_void_p, POINTER(MoeGroupArgs), c_void_p]),
    "cqsa_moe_quantize_activations": (c_int32, [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p]),
    "cqsa_moe_combine_args_init": _INIT,
    "cqsa_moe_combine": (c_int32, [c_void_p, POINTER(MoeCombineArgs), c_void_p]),
}

# ---------------------------------------------------------------------------------------------------------------------
# Loading
# ---------------------------------------------------------------------------------------------------------------------

_library: Any = None  # by ctypes, or cffi.Functions
_library_path = ""
_lock = threading.Lock()


def library() -> Any:
    """The loaded library. Raises CqsaLibraryError, which names every path tried, when there is none."""
    return _library if _library is not None else _load()


def library_path() -> str:
    """The name under which the library was found; "" before the first use."""
    return _library_path


def _candidates() -> List[str]:
    named = os.environ.get("CQSA_LIBRARY")
    if named:
        if not os.path.isabs(named):
            raise CqsaLibraryError(f"CQSA_LIBRARY is {named!r}, wanted an absolute path to {LIBRARY_NAME}")
        return [named]
    return [os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib", LIBRARY_NAME), LIBRARY_NAME]


def _load() -> Any:
    global _library, _library_path
    with _lock:
        if _library is not None:
            return _library
        tried = []
        for path in _candidates():
            try:
                loaded = _opened(path)
            except OSError as error:
                tried.append(f"{path} ({error})")
                continue
            _declare(loaded, path)
            _library, _library_path = loaded, path
            return loaded
        raise CqsaLibraryError("libcqsa was not found. Tried: " + "; ".join(tried) +
                               ". Set CQSA_LIBRARY to the absolute path of " + LIBRARY_NAME)


def _opened(path: str) -> Any:
    """By ctypes, or with CQSA_FFI=cffi in the environment by cffi."""
    wanted = os.environ.get("CQSA_FFI", "ctypes")
    if wanted == "ctypes":
        return ctypes.CDLL(path)
    if wanted != "cffi":
        raise CqsaLibraryError(f"CQSA_FFI is {wanted!r}, wanted 'ctypes' or 'cffi'")
    from . import cffi

    return cffi.Functions(path)


def _declare(loaded: Any, path: str) -> None:
    try:
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(loaded, name)
            if isinstance(loaded, ctypes.CDLL):
                function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise CqsaLibraryError(f"{path} is not a libcqsa that this package can use: {error}") from None
    abi = loaded.cqsa_abi_version()
    if abi != ABI_VERSION:
        raise CqsaLibraryError(f"{path} has ABI {abi}, this package wants {ABI_VERSION}")


def check(status: int) -> None:
    """Raises the exception of a status other than CQSA_OK, with the library's own sentence as its message."""
    if status != OK:
        raise status_error(status)


def status_error(status: int) -> Exception:
    """The exception of a failed call. Must be made on the thread that made the call."""
    text = library().cqsa_last_error().decode("utf-8", "replace")
    return error_for(status, text)


def text_of(function: Any, *head: Any) -> str:
    """Text from a function that ends in (buffer, size, length_out)."""
    length, size = c_uint64(0), 4096
    while True:
        buffer = ctypes.create_string_buffer(size)
        check(function(*head, buffer, size, ctypes.byref(length)))
        if length.value < size:
            return buffer.value.decode("utf-8", "replace")
        size = length.value + 1


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
