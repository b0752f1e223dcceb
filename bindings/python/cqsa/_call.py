# SPDX-License-Identifier: Apache-2.0
"""Runs a blocking function of the library so that progress, cancellation and Ctrl-C work."""

from __future__ import annotations

import ctypes
import signal
import threading
from typing import Any, Callable, List, Optional

from . import _ffi

Progress = Callable[[int, int], Any]

# Calls of at least this many floating-point operations (some 20 ms) are worth a thread that keeps Ctrl-C alive.
LONG_FLOPS = 1 << 32


def run(start: Callable[[], int], args: _ffi.AttentionArgs, progress: Optional[Progress], flops: int) -> None:
    """Calls `start`, which runs the library on `args` and returns a status; raises when it fails.

    An exception of `progress`, KeyboardInterrupt included, stops the run between tiles and is raised once it has ended.
    """
    if progress is not None:
        _run_with_progress(start, args, progress)
    elif flops >= LONG_FLOPS and _on_main_thread():
        _run_beside(start, args)
    else:
        status = start()
        if status:
            raise _ffi.status_error(status)


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _run_with_progress(start: Callable[[], int], args: _ffi.AttentionArgs, progress: Progress) -> None:
    cancel = ctypes.c_int32(0)
    args.cancel = ctypes.addressof(cancel)
    raised: List[BaseException] = []

    def between_tiles(_user: Any, done: int, total: int) -> int:
        try:
            return 1 if raised or progress(done, total) is False else 0
        except BaseException as error:  # ctypes would print and drop it
            raised.append(error)
            return 1

    callback = _ffi.PROGRESS_FN(between_tiles)
    args.progress = ctypes.cast(callback, ctypes.c_void_p)
    with _DeferredInterrupt(cancel):
        status = start()
        failure = _ffi.status_error(status) if status else None
    if raised:
        raise raised[0]
    if failure is not None:
        raise failure


class _DeferredInterrupt:
    """Ctrl-C sets the cancel flag and is handled after the run.

    Python runs signal handlers as soon as a callback enters Python, before any of its `try` blocks: an exception raised
    there would be printed by ctypes and lost.
    """

    def __init__(self, cancel: ctypes.c_int32) -> None:
        self._cancel = cancel
        self._handler: Any = None
        self._received: List[Any] = []

    def __enter__(self) -> None:
        if _on_main_thread() and callable(signal.getsignal(signal.SIGINT)):
            self._handler = signal.signal(signal.SIGINT, self._on_interrupt)

    def _on_interrupt(self, *signal_and_frame: Any) -> None:
        self._cancel.value = 1
        self._received = list(signal_and_frame)

    def __exit__(self, *_exception: Any) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._received:
                self._handler(*self._received)


def _run_beside(start: Callable[[], int], args: _ffi.AttentionArgs) -> None:
    """Runs on a second thread while this one, the main thread, waits in Python, where Ctrl-C reaches it."""
    cancel = ctypes.c_int32(0)
    args.cancel = ctypes.addressof(cancel)
    args.cancel_flag = cancel  # lives as long as args
    ended = threading.Event()
    failures: List[BaseException] = []

    def body() -> None:
        try:
            status = start()
            if status:
                failures.append(_ffi.status_error(status))
        except BaseException as error:
            failures.append(error)
        finally:
            ended.set()

    interrupts: List[BaseException] = []
    try:
        threading.Thread(target=body, name="cqsa", daemon=True).start()
    except RuntimeError:  # no more threads, or the interpreter is going down
        body()
    while not ended.is_set():
        try:
            ended.wait()
        except BaseException as error:  # the operands must outlive the run: stop it and wait on
            cancel.value = 1
            interrupts.append(error)
    if interrupts:
        raise interrupts[0]
    if failures:
        raise failures[0]
