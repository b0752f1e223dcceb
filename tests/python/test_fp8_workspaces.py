# SPDX-License-Identifier: Apache-2.0
"""Which workspace an FP8 call gets: one for each stream, grown when a call says so, and one for each graph, made ready before."""
import types

import pytest

from cqsa import _errors, _ffi, _fp8_parts as parts

WORKSPACE, CAPTURE_UNSAFE = _errors.ERROR_WORKSPACE, _errors.ERROR_CAPTURE_UNSAFE


class Queue:
    device, lead = (_ffi.DEVICE_CUDA, 0), None

    def __init__(self, handle=7, capture=0, pool=True):
        self.handle, self._capture, self._pool, self.waited, self.finished = handle, capture, pool, 0, 0

    def capture(self):
        return self._capture

    def wait(self):
        self.waited += 1

    def finish(self):
        self.finished += 1

    def new_workspace(self, size):
        return types.SimpleNamespace(data_ptr=lambda: 0xF00, size=size) if self._pool else None


class Calls:
    """A call that needs so many bytes, and refuses less as the library does."""

    def __init__(self, needs):
        self.needs, self.seen, self.asked = needs, [], 0

    def launch(self, address, size):
        self.seen.append((address, size))
        if size >= self.needs:
            return 0
        return WORKSPACE if address else CAPTURE_UNSAFE

    def size(self):
        self.asked += 1
        return self.needs

    def run(self, queue):
        target = types.SimpleNamespace(queue=queue, stream=None if queue is None else queue.handle, context=types.SimpleNamespace(handle=1))
        parts.run(target, "kind", self.launch, self.size)
        return self.seen[-1]


@pytest.fixture
def made(monkeypatch):
    """Sizes of the workspaces that were made, of the driver's memory (True) or of a graph's pool."""
    sizes = []
    addresses = iter(range(0x1000, 1 << 30, 0x1000))
    for name in ("_kept", "_spare"):
        monkeypatch.setattr(parts, name, {})
    monkeypatch.setattr(parts, "_old", [])
    monkeypatch.setattr(parts, "DeviceMemory", lambda device, shape, code: types.SimpleNamespace(address=next(addresses)))

    def ready(target, address, size, memory):
        sizes.append((size, address != 0xF00))
        return parts._Space(address, size, memory)

    monkeypatch.setattr(parts, "_ready", ready)
    monkeypatch.setattr(parts._ffi, "status_error", lambda status: _errors.error_for(status, "refused"))
    return sizes


def test_host_calls_have_none(made):
    assert Calls(0).run(None) == (None, 0) and made == []


def test_kept_for_the_stream_and_grown(made):
    queue, small, large = Queue(), Calls(100), Calls(parts._LEAST + 1)
    first = small.run(queue)
    assert small.run(queue) == first and small.asked == 0
    assert made == [(parts._LEAST, True)] * 2 and queue.waited == 1  # its own, and the spare one
    grown = large.run(queue)
    assert grown[0] != first[0] and grown[1] == 2 * parts._LEAST and large.asked == 1 and len(large.seen) == 2
    assert small.run(queue) == grown and len(parts._old) == 1
    assert small.run(Queue(9))[0] not in (first[0], grown[0])


def test_a_graph_takes_what_was_made_ready(made):
    small = Calls(100)
    eager = small.run(Queue())
    count = len(made)
    captured = small.run(Queue(7, capture=55))
    assert captured[0] != eager[0] and len(made) == count
    assert small.run(Queue(7, capture=55)) == captured
    second = small.run(Queue(7, capture=56))  # no spare one is left: memory of the graph's own, which it clears
    assert second == (0xF00, 100) and made[-1] == (100, False)
    small.run(Queue())
    assert len(parts._spare) == 1 and small.run(Queue(7, capture=57))[0] not in (eager[0], captured[0], 0xF00)


def test_a_spare_one_that_is_too_small(made):
    Calls(1).run(Queue())
    large = Calls(10 * parts._LEAST)
    assert large.run(Queue(7, capture=5)) == (0xF00, 10 * parts._LEAST)


def test_a_capture_without_memory_is_refused_by_the_library(made):
    with pytest.raises(RuntimeError) as caught:
        Calls(100).run(Queue(7, capture=5, pool=False))
    assert caught.value.status == CAPTURE_UNSAFE
    assert Calls(0).run(Queue(7, capture=6, pool=False)) == (None, 0)


def test_other_refusals_are_raised(made):
    call = Calls(0)
    call.launch = lambda address, size: _errors.ERROR_SHAPE
    with pytest.raises(ValueError):
        call.run(Queue())
