# SPDX-License-Identifier: Apache-2.0
"""place(): which operands would fit on the device."""

from __future__ import annotations

import json
import math
from math import prod
from typing import Any, List, NamedTuple

from . import _ffi
from ._arrays import number
from ._context import hardware as hardware_of
from ._errors import ERROR_INVALID_ARGUMENT, error_for
from ._plan import Hardware, hardware_text
from ._queue import choose
from ._sources import view_of


class Placement(NamedTuple):
    """What place() advises."""

    places: List[str]  # of each tensor: "device", "pinned" or "host"; a tensor that is on a device already is "device"
    device_bytes: int  # of the tensors that would be put on the device, those that are there already not counted
    pinned_bytes: int  # of the tensors that would be pinned
    limit_bytes: int  # what may be put on the device: what is free of its memory, less the reserve
    reason: str  # in one sentence


def place(*tensors: Any, reserve: float = 0.15, backend: str = "auto", hardware: Hardware = None) -> Placement:
    """Which host operands fit on the device; the rest are best pinned. It advises, and moves nothing.

    tensors: operands in order of importance, as attention() takes them; each goes to the device if it fits into what is left.
    reserve: fraction of the device's memory, 0 to 1, that stays free for the run itself and for others.
    backend: as in attention(): "auto" is the device that a tensor is on already, else the first one that is ready.
    hardware: the machine, as in attention_plan(); None: that device, which is measured at the first call.

    Without a device every operand stays "host", and `reason` says so.
    """
    fraction = number(reserve, "reserve")
    if not 0 <= fraction <= 1:
        raise error_for(ERROR_INVALID_ARGUMENT, f"reserve is {reserve!r}, wanted a fraction from 0 to 1")
    views = [view_of(tensor, f"tensors[{index}]") for index, tensor in enumerate(tensors)]
    if hardware is None:
        context = choose(backend, None, *((f"tensors[{index}]", view) for index, view in enumerate(views))).context
        machine = hardware_of(context.backend, context.device)
    else:
        machine = json.loads(hardware_text(hardware))
    name, free = str(machine.get("name", "")), int(machine.get("device_bytes", 0))
    if machine.get("host", False):
        places = ["host" if view.on_host() else "device" for view in views]
        return Placement(places, 0, 0, 0, f"{name} computes in host memory: there is no device to place operands on")
    if free <= 0:
        raise error_for(ERROR_INVALID_ARGUMENT, 'hardware has no "device_bytes"')
    total = int(machine.get("device_total_bytes", 0)) or free
    limit = max(0, free - math.ceil(total * fraction))
    rest = "pinned" if machine.get("pinned", False) else "host"
    places, on_device, pinned = [], 0, 0
    for view in views:
        size = prod(view.shape) * view.itemsize
        fits = not view.on_host() or on_device + size <= limit
        pageable = view.device[0] == _ffi.DEVICE_CPU
        places.append("device" if fits else rest if pageable else "pinned")
        on_device += size if fits and view.on_host() else 0
        pinned += 0 if fits or rest == "host" else size
    return Placement(places, on_device, pinned, limit, f"{name} has {free} of {total} bytes free, of which {limit} may hold operands: "
                     f"{on_device} are taken, {pinned} bytes are pinned")
