# SPDX-License-Identifier: Apache-2.0
"""Rings: the histories of amaxes from which delayed scaling takes its scales."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, List, Optional, Sequence

import numpy as np

from . import _arrays, _cupy, _driver, _ffi, _torch
from ._errors import ERROR_CAPTURE_UNSAFE, ERROR_DEVICE, ERROR_INVALID_ARGUMENT, error_for
from ._fp8_parts import FORMATS, finish, format_name, given, one_of, queried, tell_written
from ._jax import DeviceMemory
from ._queue import Target, choose_in_place
from ._sources import new_like, output_of, view_of
from ._views import Records, View

if TYPE_CHECKING:
    from ._sources import Operand

_ALIGNMENT = 64


@dataclass(frozen=True)
class RingInfo:
    """What a ring holds."""

    index: int  # of the next amax in history
    refused: int  # amaxes that were not finite, since the beginning
    staged: float  # largest staged amax, 0 for none
    scale: float  # for the next call
    scale_inv: float
    history: np.ndarray[Any, Any]  # float32 [hist_len], 0 where nothing has been stored yet


class Ring:
    """The history of a tensor's amaxes, on the device of the tensor: ``fp8_quantize(x, scale=ring)`` uses the scale that the ring
    has, and puts the amax of x into it for the next call.

    hist_len: amaxes that it remembers, 1 to 1024. format: of the codes made with it, "e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz".
    margin: headroom, ``scale = fp8_max / amax * 2**-margin``. algo: "max" of the history, or "most_recent". pow2: scales are powers of two.
    amax: the largest element that the first calls are to expect; 0: their scale is 1.

    Its memory is made at the first call that uses it, or by begin(), where the operand is. Calls on one ring have to follow each other
    on one stream. pickle and copy.deepcopy() take it, and save() and load() its state as bytes.
    """

    __slots__ = ("hist_len", "format", "margin", "algo", "pow2", "amax", "_struct", "_memory", "_size", "_saved", "__weakref__")

    def __init__(self, hist_len: int, format: Any = "e4m3fn", margin: int = 0, algo: str = "max", *, pow2: bool = False,
                 amax: float = 0.0) -> None:
        one_of(algo, "algo", _ffi.FP8_RINGS)
        self.hist_len, self.format = _arrays.integer(hist_len, "hist_len"), format_name(format)
        self.margin, self.algo, self.pow2 = _arrays.integer(margin, "margin"), algo, bool(pow2)
        self.amax = _arrays.number(amax, "amax")
        if not -1 << 31 <= self.margin < 1 << 31 or not 0 < self.hist_len <= 1024:
            raise error_for(ERROR_INVALID_ARGUMENT, f"hist_len is {hist_len} and margin {margin}, wanted 1 to 1024 and -64 to 64")
        self._struct = _ffi.Fp8Ring(ctypes.sizeof(_ffi.Fp8Ring), _ffi.FP8_POW2 if pow2 else 0, None, 0, self.hist_len, FORMATS[self.format],
                                    self.margin, _ffi.FP8_RINGS.index(algo))
        self._memory: Any = None
        self._saved: Optional[bytes] = None
        self._size = 0

    def begin(self, like: Operand, *, amax: Optional[float] = None, backend: str = "auto", stream: Any = None) -> Ring:
        """Begins anew, with no history, in memory where `like` is. amax: as in Ring(); None: that one. Returns the ring."""
        target = choose_in_place(backend, stream, ("like", like))
        self._saved = None
        self._make(target, view_of(like, "like", target.queue))
        self._init(target, self.amax if amax is None else _arrays.number(amax, "amax"))
        finish(target)
        return self

    def read(self, *, backend: str = "auto", stream: Any = None) -> RingInfo:
        """What it holds; on a device this waits for the stream."""
        target = self._target(backend, stream)
        info = _ffi.Fp8RingInfo(ctypes.sizeof(_ffi.Fp8RingInfo))
        history = np.empty(self.hist_len, np.float32)
        _ffi.check(_ffi.library().cqsa_fp8_ring_read(target.context.handle, self._struct, info, history.ctypes.data, target.stream))
        return RingInfo(info.index, info.refused, info.staged, info.scale, info.scale_inv, history)

    def save(self, *, backend: str = "auto", stream: Any = None) -> bytes:
        """Its state, which load() takes on any device; b"" before its first use. On a device this waits for the stream."""
        if self._memory is None:
            return self._saved or b""
        self.read(backend=backend, stream=stream)
        view = self._view()
        if view.on_host():
            return ctypes.string_at(view.address, self._size)
        driver = _driver.of(view.device[0])
        if driver is not None:
            return driver.read(view.device[1], view.address, self._size)
        return bytes(_host_bytes(self._memory)[view.address - _start(self._memory):][:self._size])

    def load(self, state: bytes) -> None:
        """Takes a state that save() gave of a ring with the same numbers. It goes to memory where the next call's operand is."""
        if not isinstance(state, (bytes, bytearray)):
            raise error_for(ERROR_INVALID_ARGUMENT, f"state is {type(state).__name__}, wanted the bytes that save() gave")
        if state and len(state) != self._bytes():
            raise error_for(ERROR_INVALID_ARGUMENT, f"state has {len(state)} bytes, wanted {self._bytes()}: it is of a ring with another hist_len")
        self._saved, self._memory = bytes(state) or None, None

    def __reduce__(self) -> Any:
        return _restored, (self.hist_len, self.format, self.margin, self.algo, self.pow2, self.amax, self.save())

    def __repr__(self) -> str:
        return f"<cqsa.Ring {self.format} hist_len={self.hist_len} margin={self.margin} {self.algo}>"

    # -----------------------------------------------------------------------------------------------------------------

    def struct(self, target: Target, like: View) -> _ffi.Fp8Ring:
        """For a call: its memory is there, and joins the call."""
        if self._memory is None:
            self._first_use(target, like)
        if target.queue is not None:
            target.queue.take(self._view(), "the ring")
        elif not self._view().on_host():
            raise error_for(ERROR_DEVICE, "the ring is on a device, and the operands are in host memory")
        return self._struct

    def _first_use(self, target: Target, like: View) -> None:
        if target.queue is not None and target.queue.capture():
            raise error_for(ERROR_CAPTURE_UNSAFE, "the ring has no memory yet, and a graph that begins it would do so in every replay: call "
                            "ring.begin(x) before the capture")
        saved = self._saved
        self._make(target, like)
        if saved is None:
            self._init(target, self.amax)
        else:
            if target.queue is not None:
                target.queue.wait()  # whoever had the memory before
            self._write(saved)

    def _target(self, backend: str, stream: Any) -> Target:
        if self._memory is None:
            raise error_for(ERROR_INVALID_ARGUMENT, "the ring has not been used yet: call ring.begin(x) first")
        return choose_in_place(backend, stream, ("the ring", self._memory))

    def _bytes(self) -> int:
        return queried(_ffi.library().cqsa_fp8_ring_bytes, self._struct)

    def _make(self, target: Target, like: View) -> None:
        size = self._bytes()
        if target.queue is not None and not _torch.is_tensor(like.owner) and not _cupy.is_array(like.owner):
            memory: Any = DeviceMemory(like.device, (size + _ALIGNMENT,), _ffi.DTYPE_U8)
        else:
            memory = new_like(like, (size + _ALIGNMENT,), _ffi.DTYPE_U8)
        self._memory, self._size = memory, size
        self._struct.state = (_start(memory) + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        self._struct.bytes = size

    def _init(self, target: Target, amax: float) -> None:
        _ffi.check(_ffi.library().cqsa_fp8_ring_init(target.context.handle, self._struct, amax, target.stream))

    def _view(self) -> View:
        view = view_of(self._memory, "the ring")
        return View(self._struct.state, (self._size,), None, view.code, 1, True, view.owner, view.device)

    def _write(self, state: bytes) -> None:
        view = self._view()
        driver = None if view.on_host() else _driver.of(view.device[0])
        if view.on_host():
            ctypes.memmove(view.address, state, len(state))
        elif driver is not None:
            driver.write(view.device[1], view.address, state)
        else:
            offset = view.address - _start(self._memory)
            self._memory[offset:offset + len(state)].copy_(_torch_bytes(state))
        self._saved = None


def _restored(hist_len: int, format: str, margin: int, algo: str, pow2: bool, amax: float, state: bytes) -> Ring:
    ring = Ring(hist_len, format, margin, algo, pow2=pow2, amax=amax)
    ring.load(state)
    return ring


def _start(memory: Any) -> int:
    return view_of(memory, "the ring").address


def _host_bytes(memory: Any) -> Any:
    return memory.cpu().numpy() if _torch.is_tensor(memory) else memory.get()


def _torch_bytes(state: bytes) -> Any:
    """A tensor of torch with these bytes."""
    torch = _torch.module()
    assert torch is not None
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


# ---------------------------------------------------------------------------------------------------------------------
# Many rings at once
# ---------------------------------------------------------------------------------------------------------------------


def fp8_ring_fold(rings: Sequence[Ring], amaxes: Optional[Operand] = None, *, backend: str = "auto", stream: Any = None) -> None:
    """Takes an amax into each ring, in one launch.

    rings: Rings that have been used or begun, all on one device, none twice. amaxes: float32 ``[len(rings)]`` where the rings are, e.g. after
    an all-reduce; None: what fp8_quantize(.., stage=True) has staged in each; a ring with nothing staged stays as it is.
    """
    call = _Rings(rings, backend, stream)
    if call.target is None:
        return
    records = Records()
    address = None
    if amaxes is not None:
        view = _arrays.small_floats(amaxes, "amaxes", call.target.queue)
        address = records.add(view, view.code)
    call.run(_ffi.library().cqsa_fp8_ring_fold, address)


def fp8_ring_staged(rings: Sequence[Ring], *, out: Any = None, backend: str = "auto", stream: Any = None) -> Any:
    """The staged amaxes of rings, float32 ``[len(rings)]``, 0 for none, in one launch. out: array to write."""
    call = _Rings(rings, backend, stream)
    if call.target is None:
        return np.empty(0, np.float32) if out is None else out
    made = new_like(view_of(rings[0]._memory, "rings"), (len(rings),), _ffi.DTYPE_F32) if out is None else out
    records = Records()
    view = output_of(made, "out", call.target.queue)
    call.run(_ffi.library().cqsa_fp8_ring_staged, records.add(view, view.code))
    tell_written(out)
    return given(made)


class _Rings:
    """Structs of rings, one after the other."""

    def __init__(self, rings: Sequence[Ring], backend: str, stream: Any) -> None:
        self.count = len(rings)
        self.target: Optional[Target] = None
        for index, ring in enumerate(rings):
            if not isinstance(ring, Ring) or ring._memory is None:
                raise error_for(ERROR_INVALID_ARGUMENT, f"rings[{index}] is {ring!r}, wanted a Ring that has been used or begun")
        if not rings:
            return
        self.target = choose_in_place(backend, stream, ("rings[0]", rings[0]._memory))
        views: List[View] = [ring._view() for ring in rings]
        self.structs = (_ffi.Fp8Ring * self.count)(*(ring._struct for ring in rings))
        if self.target.queue is not None:
            for index, view in enumerate(views):
                self.target.queue.take(view, f"rings[{index}]")

    def run(self, function: Any, tensor: Optional[int]) -> None:
        assert self.target is not None
        try:
            _ffi.check(function(self.target.context.handle, self.structs, self.count, tensor, self.target.stream))
        finally:
            finish(self.target)
