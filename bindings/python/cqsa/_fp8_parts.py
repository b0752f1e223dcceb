# SPDX-License-Identifier: Apache-2.0
"""What the FP8 calls share: formats, blocks, scales and workspaces.

An output has rows and columns of its own: those of x, or of x transposed. Blocks and scales of it are said in them here, and turned
into those of x for the library.
"""

from __future__ import annotations

import ctypes
import re
import threading
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from . import _arrays, _cupy, _ffi, _torch
from ._errors import ERROR_CAPTURE_UNSAFE, ERROR_DTYPE, ERROR_INVALID_ARGUMENT, ERROR_SHAPE, ERROR_WORKSPACE, error_for
from ._jax import DeviceMemory
from ._queue import Queue, Target
from ._sources import dtype_name, new_like, view_of
from ._views import Records, View, compact, type_name

Block = Tuple[int, int]  # rows and columns that share a scale, 0: all

FORMATS: Dict[str, int] = {"e4m3fn": _ffi.DTYPE_E4M3FN, "e5m2": _ffi.DTYPE_E5M2, "e4m3fnuz": _ffi.DTYPE_E4M3FNUZ,
                           "e5m2fnuz": _ffi.DTYPE_E5M2FNUZ}
FORMAT_NAMES = {code: name for name, code in FORMATS.items()}
LARGEST: Dict[str, float] = {"e4m3fn": 448.0, "e5m2": 57344.0, "e4m3fnuz": 240.0, "e5m2fnuz": 57344.0}
GRANULARITIES: Dict[str, Block] = {"tensor": (0, 0), "row": (1, 0), "col": (0, 1), "1x128": (1, 128), "128x128": (128, 128),
                                   "mx": (1, 32)}
_NAMES_OF_BLOCKS = {block: name for name, block in GRANULARITIES.items() if name != "mx"}
_BLOCK = re.compile(r"(\d{1,9})x(\d{1,9})")
LAYOUTS: Dict[str, int] = {"rows": 0, "columns": 0, "packed": 1, "tiled": 2}  # CQSA_FP8_SCALES_*
_SCALE_TYPES = (_ffi.DTYPE_F32, _ffi.DTYPE_U8, _ffi.DTYPE_E8M0FNU, _ffi.DTYPE_I32)


def one_of(value: Any, name: str, names: Any) -> Any:
    if value not in names:
        raise error_for(ERROR_INVALID_ARGUMENT, f"{name} is {value!r}, wanted one of {', '.join(map(repr, names))}")
    return value


def format_name(value: Any, name: str = "format") -> str:
    """ "e4m3fn" of "e4m3fn", "float8_e4m3fn", torch.float8_e4m3fn, .."""
    if type(value) is str and value in FORMATS:  # in most calls
        return value
    text = dtype_name(value)
    text = text[len("float8_"):] if text.startswith("float8_") else text
    if text not in FORMATS:
        raise error_for(ERROR_DTYPE, f"{name} is {value!r}, wanted one of {', '.join(map(repr, FORMATS))}")
    return text


def block_of(granularity: Any, name: str = "granularity") -> Block:
    """Rows and columns of "row", "1x64", (1, 64), .."""
    known = GRANULARITIES.get(granularity) if isinstance(granularity, str) else None
    if known is not None:
        return known
    match = _BLOCK.fullmatch(granularity) if isinstance(granularity, str) else None
    if match is not None:
        return int(match.group(1)), int(match.group(2))
    if isinstance(granularity, (tuple, list)) and len(granularity) == 2:
        return _arrays.integer(granularity[0], name), _arrays.integer(granularity[1], name)
    raise error_for(ERROR_INVALID_ARGUMENT, f"{name} is {granularity!r}, wanted one of {', '.join(map(repr, GRANULARITIES))}, or "
                    "rows and columns as '1x64' or (1, 64)")


def granularity_name(block: Block) -> str:
    return _NAMES_OF_BLOCKS.get(block) or f"{block[0]}x{block[1]}"


def grid_of(rows: int, columns: int, block: Block) -> Tuple[int, int]:
    """How many rows and columns of scales a matrix has."""
    down, across = block
    return -(-rows // down) if down > 0 else 1, -(-columns // across) if across > 0 else 1


def flipped(view: View) -> View:
    """The transposed of a matrix, where it is."""
    if len(view.shape) != 2:
        return view
    strides = view.strides if view.strides is not None else compact(view.shape)
    return view.with_axes(view.shape[::-1], strides[::-1])


def matrix_size(view: View, name: str) -> Tuple[int, int]:
    """Rows, those of a batch one after the other, and columns."""
    if len(view.shape) not in (2, 3):
        raise error_for(ERROR_SHAPE, f"{name} has shape {list(view.shape)}, wanted [rows, cols] or [batch, rows, cols]")
    rows = view.shape[0] if len(view.shape) == 2 else view.shape[0] * view.shape[1]
    return rows, view.shape[-1]


def codes_of(view: View, format: Any, name: str) -> int:
    """CQSA_DTYPE_* of codes: that of the array, or for uint8 what `format` says."""
    if view.code in FORMAT_NAMES:
        if format is not None and FORMATS[format_name(format)] != view.code:
            raise error_for(ERROR_DTYPE, f"{name} is {type_name(view.code)}, but its format is said to be {format_name(format)!r}")
        return view.code
    if view.code != _ffi.DTYPE_U8:
        raise error_for(ERROR_DTYPE, f"{name} is {type_name(view.code)}, wanted uint8 or one of float8")
    if format is None:
        raise error_for(ERROR_DTYPE, f"{name} is uint8: say what its bytes are, as in format='e4m3fn'")
    return FORMATS[format_name(format)]


def scales_view(values: Any, name: str, side: Optional[Queue]) -> View:
    """Scales as they are; numbers and lists as f32."""
    view = view_of(values, name, side)
    on_side = side is None or not view.on_host()
    return view if view.code in _SCALE_TYPES and on_side else _arrays.small_floats(values, name, side)


def new_scales(like: View, grid: Tuple[int, int], block: Block, layout: str, code: int) -> Any:
    """An array for scales, of the framework of `like`."""
    rows, columns = grid
    if layout == "rows":
        return new_like(like, () if block == (0, 0) and grid == (1, 1) else grid, code)
    if layout == "tiled":
        return new_like(like, (-(-rows // 128) * -(-columns // 4) * 512,), _ffi.DTYPE_U8)
    if layout == "packed":
        columns, code = -(-columns // 4), _ffi.DTYPE_I32
    made = new_like(like, (columns, -(-rows // 4) * 4), code)
    if isinstance(made, DeviceMemory):
        raise error_for(ERROR_INVALID_ARGUMENT, f"scale_layout is {layout!r}, for which there are no new arrays of jax: give out=")
    return made.T[:rows]


def zeros_like(like: View, count: int) -> Any:
    made = new_like(like, (count,), _ffi.DTYPE_I64)
    if isinstance(made, DeviceMemory):
        raise error_for(ERROR_INVALID_ARGUMENT, "nan is 'flag', for which there are no new arrays of jax: give flags=")
    return made.zero_() if _torch.is_tensor(made) else _filled(made)


def _filled(array: Any) -> Any:
    array.fill(0)
    return array


def given(made: Any) -> Any:
    """A result as the caller gets it."""
    return made.to_jax() if type(made) is DeviceMemory else made


def tell_written(*arrays: Any) -> None:
    for written in arrays:
        if _torch.is_tensor(written):
            _torch.was_written(written)


def finish(target: Target) -> None:
    if target.queue is not None:
        target.queue.finish()


def add(records: Records, view: View) -> int:
    return records.add(view, view.code)


# ---------------------------------------------------------------------------------------------------------------------
# Workspaces. One for each stream, made at its first call and grown when a call says that it is too small. A graph that is being
# captured gets one of its own, since nobody knows on which streams it will run: one that was made ready before, where there is
# one, so that the graph has nothing to clear. Those of graphs are kept for ever.
# ---------------------------------------------------------------------------------------------------------------------


class _Space(NamedTuple):
    address: int
    size: int
    memory: Any  # keeps it


_LEAST = 1 << 16
_kept: Dict[Tuple[Any, ...], _Space] = {}
_spare: Dict[Tuple[int, str], _Space] = {}
_old: List[_Space] = []  # may still be in use by what is queued
_lock = threading.Lock()
_NONE = _Space(0, 0, None)


def run(target: Target, kind: str, launch: Callable[[Optional[int], int], int], size: Callable[[], int]) -> None:
    """Calls launch(workspace, bytes) with what is kept for the stream, and again with more when that is too little; then finish()."""
    if target.queue is None:  # host memory: the library's own, since other threads may be in the same call
        _ffi.check(launch(None, 0))
        return
    try:
        _run_on(target, target.queue, kind, launch, size)
    finally:
        target.queue.finish()


def _run_on(target: Target, queue: Queue, kind: str, launch: Callable[[Optional[int], int], int], size: Callable[[], int]) -> None:
    capture = queue.capture()
    key = (target.context.handle, kind, queue.handle, capture)
    space = _kept.get(key) or _grown(target, queue, kind, key, _LEAST if not capture else size())
    status = launch(space.address or None, space.size)
    if status == ERROR_WORKSPACE or (status == ERROR_CAPTURE_UNSAFE and not space.size):
        least = size()
        if least > space.size:
            space = _grown(target, queue, kind, key, least)
            status = launch(space.address or None, space.size)
    _ffi.check(status)
    if not capture and (target.context.handle, kind) not in _spare:
        _make_spare(target, queue, kind, space.size)


def _grown(target: Target, queue: Queue, kind: str, key: Tuple[Any, ...], least: int) -> _Space:
    with _lock:
        space = _kept.get(key, _NONE)
        if space.size >= least and space.size:
            return space
        if space.size:
            _old.append(space)
        made = _for_graph(target, queue, kind, least) if key[3] else _new(target, queue, max(least, 2 * space.size))
        if made.size:
            _kept[key] = made
        return made


def _new(target: Target, queue: Queue, size: int) -> _Space:
    """Memory of the driver's, which belongs to no stream; none where this package knows no driver: then the library makes its own."""
    if queue.device[0] != _ffi.DEVICE_CUDA:
        return _NONE
    memory = DeviceMemory(queue.device, (size,), _ffi.DTYPE_U8)
    return _ready(target, memory.address, size, memory)


def _for_graph(target: Target, queue: Queue, kind: str, size: int) -> _Space:
    spare = _spare.pop((target.context.handle, kind), _NONE)
    if spare.size >= max(size, 1):
        return spare
    memory = queue.new_workspace(size) if size else None
    return _NONE if memory is None else _ready(target, memory.data_ptr(), size, memory)


def _ready(target: Target, address: int, size: int, memory: Any) -> _Space:
    _ffi.check(_ffi.library().cqsa_fp8_workspace_init(target.context.handle, address, size, target.stream))
    return _Space(address, size, memory)


def _make_spare(target: Target, queue: Queue, kind: str, size: int) -> None:
    with _lock:
        if (target.context.handle, kind) not in _spare and size:
            _spare[target.context.handle, kind] = _new(target, queue, size)
            queue.wait()  # the graph that gets it may run on any stream


def queried(function: Any, *arguments: Any) -> int:
    size = ctypes.c_uint64(0)
    _ffi.check(function(*arguments, ctypes.byref(size)))
    return size.value


def host_array(view: View, values: Any, name: str) -> Any:
    """The bytes of a compact array in host memory, wherever it is."""
    if _torch.is_tensor(values):
        return values.detach().cpu().numpy()
    if _cupy.is_array(values):
        return values.get()
    return view.array(name)
