# SPDX-License-Identifier: Apache-2.0
"""Where a call runs: the context that its operands ask for, and the stream that its work is queued on.

On a device the library may return before the work is done. Everything that is queued later on the same stream sees it done,
so all that has to be cared for is other streams: those on which the operands are made, and those on which results are used.
"""

from __future__ import annotations

import operator
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from . import _cupy, _driver, _ffi, _torch
from ._context import Context, context_for, reason_of
from ._errors import (
    ERROR_DEVICE,
    ERROR_INVALID_ARGUMENT,
    CqsaNotImplementedError,
    error_for,
)
from ._sources import device_of
from ._views import View, device_name

# The backend of each kind of device. Memory of an out-of-tree backend does not say which one it is.
_BACKENDS = {_ffi.DEVICE_CUDA: "cuda", _ffi.DEVICE_ROCM: "hip"}


class Queue:
    """The stream of one call, and what must be ordered with it."""

    __slots__ = ("handle", "device", "lead", "_home", "_name", "_chosen", "_before", "_after", "_waits")

    def __init__(self, device: Tuple[int, int], lead: Any, name: str, stream: Any) -> None:
        self.device = device
        self.lead = lead  # the first operand on the device: its framework makes what has to be made there
        self._name = name
        self._chosen = stream is not None
        self.handle = stream_handle(stream, device, name) if self._chosen else _current_stream(lead, device[1])
        # The type of arrays whose framework has this stream as its current one, so that there is nothing to order.
        own = not self._chosen and (_torch.is_tensor(lead) or _cupy.is_array(lead))
        self._home: Any = type(lead) if own else None
        self._before: List[int] = []  # streams that this one waits for
        self._after: List[int] = []  # streams that wait for this one
        self._waits = False  # memory is lent that may be given away as soon as the call returns

    def dlpack_stream(self) -> int:
        """As `__dlpack__(stream=)` wants it: on CUDA 0 is ambiguous, and 1 the legacy default stream."""
        return 1 if self.handle == 0 and self.device[0] == _ffi.DEVICE_CUDA else self.handle

    def take(self, view: View, name: str, is_output: bool = False) -> None:
        """An operand joins the call: its device must be the queue's, and the work that makes it comes first."""
        if view.device == self.device and type(view.owner) is self._home or view.on_host():
            return
        if view.device != self.device:
            raise error_for(ERROR_DEVICE, f"{name} is on {device_name(view.device)}, but {self._name} is on "
                            f"{device_name(self.device)}: all operands of a call have to be on one device")
        owner = view.owner
        if _torch.is_tensor(owner):
            current = _torch.current_stream(self.device[1])
            if current != self.handle:
                self._meet(current, is_output)
                _torch.record(owner, self.device[1], self.handle)
        elif _cupy.is_array(owner):
            current = _cupy.current_stream(self.device[1])
            if current != self.handle:
                self._meet(current, is_output)
                self._waits = self._chosen  # its pool knows nothing of other streams
        elif view.borrowed:
            self._waits = True

    def _meet(self, stream: int, is_output: bool) -> None:
        self.after(stream)
        if is_output and not self._chosen and stream not in self._after:
            self._after.append(stream)

    def after(self, stream: int) -> None:
        """The work of this call waits for what is queued on another stream by now."""
        if _same(stream, self.handle) or stream in self._before:
            return
        driver = _driver.of(self.device[0])
        # A stream that is being captured cannot wait for one that is not; what was queued before a capture is done in it.
        if driver is not None and not driver.is_capturing(self.device[1], self.handle):
            driver.order(self.device[1], stream, self.handle)
        self._before.append(stream)

    def finish(self) -> None:
        """After the call: results are ready where they are used, and what was lent may be given back."""
        if not self._waits and not self._after:
            return
        driver = _driver.of(self.device[0])
        if driver is None:
            return
        if self._waits:
            driver.synchronize(self.device[1], self.handle)
            return
        for stream in self._after:
            driver.order(self.device[1], self.handle, stream)

    def new_workspace(self, size: int) -> Optional[Any]:
        """Device memory for a capture, None where the framework has no memory that a graph keeps."""
        return _torch.workspace(size, self.device[1]) if _torch.is_tensor(self.lead) else None

    def is_captured(self) -> bool:
        return _torch.is_tensor(self.lead) and _torch.is_capturing()

    def capture(self) -> int:
        """What tells the recording of one graph from that of another; 0 while the stream is not captured."""
        if self.handle in (0, 1) or self._home is not None and _torch.is_tensor(self.lead) and not _torch.is_capturing():
            return 0
        driver = _driver.of(self.device[0])
        return int(self.is_captured()) if driver is None else driver.capture_id(self.device[1], self.handle)

    def wait(self) -> None:
        """Until what is queued has ended."""
        driver = _driver.of(self.device[0])
        if driver is not None:
            driver.synchronize(self.device[1], self.handle)

    def converted(self, values: Any, dtype: str, name: str) -> Any:
        """A small operand on the device, compact and of the type that the library wants."""
        own = _torch.is_tensor(values) or _cupy.is_array(values)
        if self.is_captured() and not (own and device_of(values) == self.device):
            raise error_for(ERROR_DEVICE, f"{name} is in host memory, which cannot be copied to the device while a graph is "
                            "captured: put it there before")
        if _torch.is_tensor(self.lead):
            return _torch.converted(values, dtype, self.device[1])
        if _cupy.is_array(self.lead):
            return _cupy.converted(values, dtype, self.device[1])
        raise error_for(ERROR_DEVICE, f"{name} is not {dtype} in the memory of {device_name(self.device)}, where {self._name} is: "
                        "put it there, of that type")


class Target(NamedTuple):
    context: Context
    stream: Optional[int] = None  # for the library; None: the default one
    queue: Optional[Queue] = None  # of calls with operands on a device


def choose(backend: str, stream: Any, *operands: Tuple[str, Any], streams: bool = True) -> Target:
    """The context and the stream for operands, given as (name, value); the first one on a device decides.

    streams: the call takes operands in host memory to a device. One that does not runs on the CPU where "auto" may choose.
    """
    for name, value in operands:
        if type(value) is np.ndarray or value is None:
            continue
        device = device_of(value)
        if device is not None:
            context = _context_of(backend, device, name)
            if context.is_host:  # it refuses the operand in its own words
                return Target(context)
            queue = Queue(device, value, name, stream)
            return Target(context, queue.handle or None, queue)
    context = context_for(backend if streams or backend != "auto" else "cpu")
    if stream is not None:
        return Target(context, stream_handle(stream, None, "") or None)
    target = _plain.get(context.handle)
    if target is None:
        target = _plain[context.handle] = Target(context)
    return target


def choose_in_place(backend: str, stream: Any, *operands: Tuple[str, Any]) -> Target:
    """choose() for what only computes where its operands are: "auto" is the CPU when none of them is on a device."""
    return choose(backend, stream, *operands, streams=False)


_plain: Dict[int, Target] = {}  # of calls whose operands are all in host memory; contexts live for ever


def _context_of(backend: str, device: Tuple[int, int], name: str) -> Context:
    if backend != "auto":
        return context_for(backend) if backend == "cpu" else context_for(backend, device[1])
    own = _BACKENDS.get(device[0])
    if own is None:
        return context_for(backend)
    try:
        return context_for(own, device[1])
    except CqsaNotImplementedError as error:
        raise error_for(error.status, f"{name} is on {device_name(device)}, but the backend {own} is not ready here: "
                        f"{reason_of(own) or error}") from None


# ---------------------------------------------------------------------------------------------------------------------
# Streams
# ---------------------------------------------------------------------------------------------------------------------


def _current_stream(lead: Any, device: int) -> int:
    """Of the framework of an operand; the legacy default stream for memory of no framework, and for jax, which has none."""
    if _torch.is_tensor(lead):
        return _torch.current_stream(device)
    if _cupy.is_array(lead):
        return _cupy.current_stream(device)
    return 0


def _same(one: int, other: int) -> bool:
    return one == other or {one, other} == {0, 1}  # two names of the legacy default stream


def stream_handle(stream: Any, device: Optional[Tuple[int, int]], name: str) -> int:
    """The native handle of an integer or of a stream object of torch, cupy, numba or whoever speaks `__cuda_stream__`."""
    if hasattr(stream, "cuda_stream"):  # torch
        handle, index = stream.cuda_stream, getattr(getattr(stream, "device", None), "index", None)
    elif hasattr(stream, "ptr"):  # cupy
        handle, index = stream.ptr, getattr(stream, "device_id", None)
    elif hasattr(stream, "__cuda_stream__"):
        spoken = stream.__cuda_stream__
        handle, index = (spoken() if callable(spoken) else spoken)[1], None
    elif hasattr(stream, "handle"):  # numba
        handle, index = getattr(stream.handle, "value", stream.handle) or 0, None
    else:
        handle, index = stream, None
    try:
        number = operator.index(handle)
    except TypeError:
        raise error_for(ERROR_INVALID_ARGUMENT, f"stream is {stream!r}, wanted a native handle or a stream of torch or cupy") from None
    if not 0 <= number < 1 << 64:
        raise error_for(ERROR_INVALID_ARGUMENT, f"stream is {number}, wanted a native handle")
    if device is not None and index is not None and 0 <= index != device[1]:  # cupy's default streams have the index -1
        raise error_for(ERROR_DEVICE, f"stream is of device {index}, but {name} is on {device_name(device)}")
    return number
