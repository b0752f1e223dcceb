# SPDX-License-Identifier: Apache-2.0
"""patch_torch_sdpa(): torch.nn.functional.scaled_dot_product_attention by this library, where it can."""

from __future__ import annotations

import functools
import math
import threading
from typing import Any, Callable, NamedTuple, Optional, Union

from . import _torch
from ._arrays import integer, memory_bytes
from ._attention import attention
from ._context import context_for
from ._errors import ERROR_INVALID_ARGUMENT, ERROR_UNSUPPORTED, CqsaNotImplementedError, error_for

_MOST_HEAD_DIM, _MOST_HEAD_DIM_V = 576, 512


class _Settings(NamedTuple):
    min_tokens: int
    memory_limit: Union[int, str, None]


_lock = threading.Lock()
_settings: Optional[_Settings] = None  # None: not patched; read once in each call
_original: Optional[Callable[..., Any]] = None
_wrapper: Optional[Callable[..., Any]] = None


def patch_torch_sdpa(min_tokens: int = 1024, *, memory_limit: Union[int, str, None] = None) -> None:
    """Lets ``torch.nn.functional.scaled_dot_product_attention`` use this library from `min_tokens` keys on.

    min_tokens: keys (``key.shape[-2]``) from which on it does. memory_limit: as in attention(), for each call; one that is too
    small raises MemoryError.

    It takes tensors of float32, float16 or bfloat16 on the CPU, or on a GPU that this library has a backend for, with 3 or 4
    axes, that autograd does not follow; masks of bool (True is visible) and of floats, is_causal (aligned top-left, as torch
    defines it), scale and enable_gqa. Every other call goes to torch's own function: dropout, gradients, autocast, float64,
    nested and sparse tensors, other devices, operands on two devices, broadcast operands, tracing, vmap, subclasses. A row
    with no visible key is 0. On a GPU the work is queued on torch's current stream, and may be captured in a graph.

    Calling it again changes the settings. Any thread may call it; calls that are running end as they began. Names that a
    module took by ``from torch.nn.functional import ..`` before do not change. Raises NotImplementedError (a
    RuntimeError) when torch is not imported.
    """
    global _settings, _original, _wrapper
    settings = _Settings(integer(min_tokens, "min_tokens"), memory_limit)
    memory_bytes(memory_limit, "memory_limit")
    if settings.min_tokens < 0:
        raise error_for(ERROR_INVALID_ARGUMENT, f"min_tokens is {min_tokens}, wanted at least 0")
    functional = _functional()
    if functional is None:
        raise error_for(ERROR_UNSUPPORTED, "torch is not imported: patch_torch_sdpa() changes the torch that a program uses and "
                        "loads none")
    with _lock:
        current = functional.scaled_dot_product_attention
        if _wrapper is None or current is not _wrapper:
            _original, _wrapper = current, _wrap(current)
            functional.scaled_dot_product_attention = _wrapper
        _settings = settings


def unpatch_torch_sdpa() -> None:
    """Undoes patch_torch_sdpa(); does nothing if it was not called. A later replacement by somebody else stays."""
    global _settings, _original, _wrapper
    functional = _functional()
    with _lock:
        if functional is not None and _wrapper is not None and functional.scaled_dot_product_attention is _wrapper:
            functional.scaled_dot_product_attention = _original
            _original = _wrapper = None
        _settings = None  # a wrapper that somebody else wrapped goes straight to torch's function


def _functional() -> Any:
    return getattr(getattr(_torch.module(), "nn", None), "functional", None)


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scaled_dot_product_attention(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
                                     is_causal: bool = False, scale: Optional[float] = None, enable_gqa: bool = False,
                                     **others: Any) -> Any:
        settings = _settings
        if settings is not None and not others and _ours(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
                                                         settings.min_tokens):
            try:
                return _call(query, key, value, attn_mask, is_causal, scale, settings)
            except CqsaNotImplementedError:
                if query.is_cpu:
                    raise
                # A GPU that the backend has no code for: nothing ran yet.
        more = dict(others, enable_gqa=True) if enable_gqa else others  # torch before 2.5 does not know the keyword
        if scale is not None:
            more = dict(more, scale=scale)  # nor torch 2.0 this one
        return original(query, key, value, attn_mask, dropout_p, is_causal, **more)

    return scaled_dot_product_attention


def _ours(query: Any, key: Any, value: Any, mask: Any, dropout_p: float, is_causal: bool, scale: Optional[float],
          enable_gqa: bool, min_tokens: int) -> bool:
    torch = _torch.module()
    assert torch is not None
    if not isinstance(query, torch.Tensor) or _is_traced(torch, query.device.type) or dropout_p != 0.0 or (is_causal and mask is not None):
        return False
    operands = (query, key, value) if mask is None else (query, key, value, mask)
    if not all(_is_plain(torch, tensor) and tensor.device == query.device for tensor in operands):
        return False
    if query.is_cuda and not _is_ready(torch, query):
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in operands):
        return False
    if not _is_shape_ours(query, key, value, enable_gqa) or key.shape[-2] < min_tokens:
        return False
    if not query.dtype == key.dtype == value.dtype or query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    if scale is not None and (not isinstance(scale, (int, float)) or scale == 0 or not math.isfinite(scale)):
        return False
    return mask is None or _is_mask_ours(torch, query, key, mask)


def _is_ready(torch: Any, query: Any) -> bool:
    """Whether there is a backend for the GPU. Asked of the library once, and again only while there is none."""
    try:
        context_for("hip" if torch.version.hip else "cuda", query.get_device())
    except CqsaNotImplementedError:
        return False
    return True


def _is_traced(torch: Any, device: str) -> bool:
    """Somebody wants to see torch's own operations: a compiler, a tracer, autocast, a dispatch mode."""
    compiling = getattr(getattr(torch, "compiler", None), "is_compiling", None)
    stack = getattr(torch._C, "_len_torch_dispatch_stack", None)
    return bool((compiling is not None and compiling()) or torch.jit.is_tracing() or _is_autocast(torch, device)
                or (stack is not None and stack()))


def _is_autocast(torch: Any, device: str) -> bool:
    if device not in ("cpu", "cuda"):
        return False
    try:
        return bool(torch.is_autocast_enabled(device))
    except TypeError:  # torch before 2.4
        return bool(torch.is_autocast_cpu_enabled() if device == "cpu" else torch.is_autocast_enabled())


def _is_plain(torch: Any, tensor: Any) -> bool:
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return False
    if not (tensor.is_cpu or tensor.is_cuda) or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_neg():
        return False
    try:
        tensor.data_ptr()
    except RuntimeError:  # inside vmap and its like
        return False
    return True


def _is_shape_ours(query: Any, key: Any, value: Any, enable_gqa: bool) -> bool:
    axes = query.dim()
    if axes not in (3, 4) or key.dim() != axes or value.dim() != axes:
        return False
    if 0 in query.shape or 0 in key.shape or 0 in value.shape or key.shape[:-1] != value.shape[:-1]:
        return False
    if query.shape[-1] != key.shape[-1] or query.shape[-1] > _MOST_HEAD_DIM or value.shape[-1] > _MOST_HEAD_DIM_V:
        return False
    if enable_gqa and axes == 4:
        return bool(query.shape[0] == key.shape[0] and query.shape[1] % key.shape[1] == 0)
    return bool(query.shape[:-2] == key.shape[:-2]) and not enable_gqa


def _is_mask_ours(torch: Any, query: Any, key: Any, mask: Any) -> bool:
    if mask.dtype != torch.bool and mask.dtype != query.dtype or mask.dim() > query.dim() or mask.dim() < 2:
        return False
    whole = tuple(query.shape[:-1]) + (key.shape[-2],)
    return all(size in (1, wanted) for size, wanted in zip(reversed(mask.shape), reversed(whole)))


def _call(query: Any, key: Any, value: Any, mask: Any, is_causal: bool, scale: Optional[float], settings: _Settings) -> Any:
    torch = _torch.module()
    assert torch is not None
    flat = query.dim() == 3  # [batch, seq, dim]: one head
    if flat:
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        mask = mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask
    boolean = mask is not None and mask.dtype == torch.bool
    out = attention(query, key, value, causal="top_left" if is_causal else "none", softmax_scale=scale,
                    mask=mask if boolean else None, bias=None if boolean else mask, memory_limit=settings.memory_limit,
                    backend="cpu" if query.is_cpu else "auto")
    return out.squeeze(1) if flat else out
