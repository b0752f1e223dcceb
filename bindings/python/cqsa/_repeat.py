# SPDX-License-Identifier: Apache-2.0
"""Calls of attention() with torch tensors that were made before: the same shapes, strides, types, device and keywords.

Everything that the library is given is then the same as well, but for the addresses and the stream. So what a call has laid
out is kept, and the next one of its form only writes the addresses. Whatever is not as it was goes the long way, which checks
everything and says what is wrong; what the library checks, it checks of every call.
"""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple

from . import _call, _context, _ffi, _torch
from ._errors import ERROR_CAPTURE_UNSAFE

if TYPE_CHECKING:
    from ._attention import Call
    from ._queue import Target

forms: Dict[Any, Form] = {}
_MOST_FORMS = 512  # keys of caches that grow come and go
_MOST_SPARE = 8


def key_of(q: Any, k: Any, v: Any, out: Any, lse: Any, causal: Any, softmax_scale: Any, softcap: Any, layout: Any, backend: Any,
           return_lse: bool, window: Any, memory_limit: Any) -> Any:
    """What makes calls the same, None for one that cannot be told so quickly: subclasses of torch.Tensor may be anything. Written
    out, since it is most of what a call costs."""
    tensor_type = _torch.tensor_type
    if type(k) is not tensor_type or type(v) is not tensor_type or type(softcap) is not float or (
            softmax_scale is not None and type(softmax_scale) is not float):
        return None
    try:
        key: Any = (q.dtype, q.shape, q.stride(), q.device, k.dtype, k.shape, k.stride(), k.device, v.dtype, v.shape, v.stride(), v.device,
               causal, softmax_scale, softcap, layout, backend)
        if out is not None:
            if type(out) is not tensor_type:
                return None
            key += (out.dtype, out.shape, out.stride(), out.device)
        if return_lse or window is not None or memory_limit is not None:
            return _long_key(key, lse, (return_lse, window, memory_limit))
        return key
    except RuntimeError:  # a tensor without shape or strides
        return None


def _long_key(key: Any, lse: Any, rare: Sequence[Any]) -> Any:
    """Numbers count with their types: what takes 1 need not take True or 1.0."""
    if lse is not None:
        if type(lse) is not _torch.tensor_type:
            return None
        key += ("lse", lse.dtype, lse.shape, lse.stride(), lse.device)
    for option in rare:
        key += (option, type(option), tuple(map(type, option)) if type(option) is tuple else None)
    return key


def find(key: Any) -> Optional[Form]:
    """The form of a key, which somebody may have put a list into."""
    try:
        return forms.get(key)
    except TypeError:
        return None


class _Record:
    """Params, args and tensors of a call that has ended, for the next one of its form."""

    __slots__ = ("params", "args", "words", "at", "_records")

    def __init__(self, call: Call, chunk: Any, addresses: Sequence[int]) -> None:
        start = ctypes.addressof(chunk)
        self.params, self.args, self._records = call.params, call.args, call.records
        self.words = memoryview(chunk).cast("B").cast("Q")  # a cqsa_tensor begins with its address
        self.at = tuple((address - start) // 8 for address in addresses)


class Form:
    """One form of call."""

    __slots__ = ("name", "context", "index", "spare", "out", "lse", "like_q", "torch", "_stream", "_written")

    def __init__(self, name: Tuple[str, Optional[int]], context: _context.Context, index: Optional[int], call: Call, q: Any) -> None:
        self.name, self.context = name, context
        self.index = index  # of the device, None: host memory
        self.spare: List[_Record] = []  # one for each call that runs at the same time
        self.out = _traits(call.out)
        self.lse = None if call.lse is None else _traits(call.lse)
        self.like_q = q.is_contiguous() and self.out == _traits(q)
        self.torch = sys.modules["torch"]
        self._stream = getattr(self.torch._C, "_cuda_getCurrentRawStream", _torch.current_stream)
        self._written = _torch.increment_of(self.torch)

    def run(self, q: Any, k: Any, v: Any, out: Any, lse: Any) -> Any:
        """The results, or None where this is not the way to get them, and nothing was done."""
        torch = self.torch
        if _context._contexts.get(self.name) is not self.context:
            return None
        if q.is_neg() or k.is_neg() or v.is_neg() or (
                (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled()):
            return None
        if out is not None and (out.is_neg() or (out.requires_grad and torch.is_grad_enabled())):
            return None
        if lse is not None and (lse.is_neg() or (lse.requires_grad and torch.is_grad_enabled())):
            return None
        made, made_lse = out, lse
        try:
            record = self.spare.pop()
        except IndexError:  # more calls at once than there were
            return None
        if out is None:
            made = torch.empty_like(q) if self.like_q else _empty(torch, self.out)
        if lse is None and self.lse is not None:
            made_lse = _empty(torch, self.lse)
        words, at = record.words, record.at
        try:
            words[at[0]], words[at[1]], words[at[2]], words[at[3]] = q.data_ptr(), k.data_ptr(), v.data_ptr(), made.data_ptr()
            if made_lse is not None:
                words[at[4]] = made_lse.data_ptr()
        except RuntimeError:  # a tensor of vmap, ..
            return None
        stream = None if self.index is None else self._stream(self.index) or None
        status = _ffi.library().cqsa_attention(self.context.handle, record.params, record.args, stream)
        self.spare.append(record)
        if status:
            if status == ERROR_CAPTURE_UNSAFE:  # a graph is captured and memory is wanted: the long way gets it
                return None
            raise _ffi.status_error(status)
        if self._written is not None:
            if out is not None and not out.is_inference():
                self._written(out)
            if lse is not None and not lse.is_inference():
                self._written(lse)
        return made if self.lse is None else (made, made_lse)


def _traits(tensor: Any) -> Tuple[Any, Any, Any]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _empty(torch: Any, traits: Tuple[Any, Any, Any]) -> Any:
    return torch.empty(traits[0], dtype=traits[1], device=traits[2])


def after(key: Any, target: Target, call: Call, backend: str, q: Any) -> None:
    """Keeps what is of use from a call that went the long way and succeeded."""
    try:
        if _is_plain(target, call):
            _learn(key, target, call, backend, q)
    except TypeError:  # a key with a list in it
        pass


def _is_plain(target: Target, call: Call) -> bool:
    """Whether nothing was done for the call but to call the library, which returned soon."""
    args, views = call.args, call.operand_views()
    if args.info or args.workspace or args.cancel or call.flops() >= _call.LONG_FLOPS:
        return False
    if target.queue is None and not (target.context.is_host and target.stream is None):
        return False
    return all(view.device == views[0].device and _torch.is_tensor(view.owner) for view in views)


def _learn(key: Any, target: Target, call: Call, backend: str, q: Any) -> None:
    context, queue = target.context, target.queue
    form = forms.get(key)
    if form is None or form.context is not context:
        if len(forms) >= _MOST_FORMS:
            forms.clear()
        name = (backend, None) if queue is None else (context.backend, context.device)
        form = forms[key] = Form(name, context, None if queue is None else queue.device[1], call, q)
    chunk = call.records.release()
    if chunk is not None and len(form.spare) < _MOST_SPARE:
        args = call.args
        addresses = [args.q, args.k, args.v, args.out]
        form.spare.append(_Record(call, chunk, addresses if call.lse is None else [*addresses, args.lse]))
