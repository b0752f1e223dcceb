# SPDX-License-Identifier: Apache-2.0
"""FP8 with operands on a GPU that is not there: what the library is told, on which stream, and with which workspace. The calls that would run something are
replaced; tests/device/test_python_fp8.py has the results of a real GPU."""
import numpy as np
import pytest

import cqsa
from cqsa import _ffi, _fp8_parts as parts
from stand_ins import CupyArray, JaxArray, TorchTensor
from test_devices import CUDA, Library, cupy, driver, jax, refused, torch  # noqa: F401


class Fp8Library(Library):
    """Writes down the calls. A quantization needs `needs` bytes of workspace."""

    needs = 100

    def cqsa_fp8_quantize(self, context, args, stream):
        if args.workspace_bytes < self.needs:
            return 11 if args.workspace else 65
        sides = {name: getattr(args, name) for name in ("row", "transposed")}
        self.calls.append({"context": context, "stream": stream, "workspace": args.workspace, "x": tensor(args.x), "amax": tensor(args.amax), "ring": args.ring,
                           "skip": tensor(args.skip), "source": args.source,
                           **{name: {field: tensor(getattr(side, field)) for field in ("out", "scale_in", "scale", "scale_inv")} for name, side in sides.items()}})
        return 0

    def cqsa_fp8_quantize_workspace(self, context, list, count, size):
        size._obj.value = self.needs
        return 0

    def cqsa_fp8_workspace_init(self, context, workspace, bytes, stream):
        self.calls.append({"init": workspace, "bytes": bytes, "stream": stream})
        return 0

    def cqsa_fp8_ring_init(self, context, ring, amax, stream):
        self.calls.append({"ring_init": ring.state, "amax": amax, "stream": stream})
        return 0

    def cqsa_fp8_ring_fold(self, context, rings, count, amaxes, stream):
        self.calls.append({"fold": [rings[n].state for n in range(count)], "amaxes": tensor(amaxes), "stream": stream})
        return 0

    def cqsa_fp8_gemm(self, context, args, stream):
        self.calls.append({"gemm": {name: tensor(getattr(args, name)) for name in ("a", "b", "d", "scale_inv_a", "bias")}, "stream": stream,
                           "workspace": args.workspace})
        return 0


def tensor(address):
    if not address:
        return None
    found = _ffi.Tensor.from_address(address)
    return found.device_type, found.device_id, found.data, found.dtype


@pytest.fixture
def library(monkeypatch, driver):  # noqa: F811
    from cqsa import _context

    made = Fp8Library(_ffi.library())
    monkeypatch.setattr(_ffi, "library", lambda: made)
    monkeypatch.setattr(_context, "_contexts", {("cuda", index): _context.Context(1000 + (index or 0), "cuda", False, index or 0) for index in (None, 0, 1)})
    for name in ("_kept", "_spare"):
        monkeypatch.setattr(parts, name, {})
    return made


def matrix(device=0):
    return TorchTensor(np.ones((70, 96), np.float32), device)


def runs(library):
    return [call for call in library.calls if "x" in call]


def test_torch(torch, library, driver):  # noqa: F811
    torch.current[0] = 77
    x = matrix()
    q = cqsa.fp8_quantize(x, layout="dual", granularity="row")
    call, = runs(library)
    assert call["context"] == 1000 and call["stream"] == 77 and call["source"] == 0
    for array, told, dtype in ((x, call["x"], _ffi.DTYPE_F32), (q.data, call["row"]["out"], _ffi.DTYPE_E4M3FN), (q.amax, call["amax"], _ffi.DTYPE_F32),
                               (q.data_t, call["transposed"]["out"], _ffi.DTYPE_E4M3FN), (q.scale_inv_t, call["transposed"]["scale_inv"], _ffi.DTYPE_F32)):
        assert type(array) is TorchTensor and told == (CUDA, 0, array.data_ptr(), dtype)
    assert q.data.dtype is torch.uint8 and q.data_t.shape == (96, 70) and q.scale_inv_t.shape == (96, 1) and q.amax.shape == ()
    assert [step[0] for step in driver.asked] == ["allocate", "allocate", "synchronize"]  # its workspace, and one for a graph
    assert [call["bytes"] for call in library.calls if "init" in call] == [parts._LEAST] * 2
    again = cqsa.fp8_quantize(x, layout="dual", granularity="row")
    assert len(runs(library)) == 2 and runs(library)[1]["workspace"] == call["workspace"] and again.data is not q.data
    cqsa.fp8_gemm(q, q.t, out_dtype="float32")
    product = library.calls[-1] if "gemm" in library.calls[-1] else next(call for call in library.calls if "gemm" in call)
    assert product["gemm"]["a"] == (CUDA, 0, q.data.data_ptr(), _ffi.DTYPE_E4M3FN) and product["workspace"] != call["workspace"]


def test_a_captured_graph(torch, library, driver):  # noqa: F811
    torch.current[0] = 77
    x, ring = matrix(), cqsa.Ring(4)
    cqsa.fp8_quantize(x)
    eager = runs(library)[-1]["workspace"]
    torch.capturing, driver.captured = True, {77}
    before = len(library.calls)
    refused("CAPTURE_UNSAFE", lambda: cqsa.fp8_quantize(x, scale=ring), "ring.begin")
    cqsa.fp8_quantize(x)
    own = runs(library)[-1]["workspace"]
    cqsa.fp8_quantize(x)
    assert own != eager and runs(library)[-1]["workspace"] == own and not any("init" in call for call in library.calls[before:])
    refused("DEVICE", lambda: cqsa.fp8_quantize(x, scale=np.float32(2)), "while a graph is captured")
    torch.capturing, driver.captured = False, set()
    ring.begin(x)
    torch.capturing, driver.captured = True, {77}
    cqsa.fp8_quantize(x, scale=ring)
    assert runs(library)[-1]["ring"]


def test_rings(torch, library, driver):  # noqa: F811
    torch.current[0] = 77
    x, rings = matrix(), [cqsa.Ring(4, amax=2.0), cqsa.Ring(4)]
    for ring in rings:
        cqsa.fp8_quantize(x, scale=ring)
    begun = [call for call in library.calls if "ring_init" in call]
    assert [call["amax"] for call in begun] == [2.0, 0.0] and all(call["stream"] == 77 and call["ring_init"] % 64 == 0 for call in begun)
    assert runs(library)[0]["source"] == 2
    cqsa.fp8_ring_fold(rings)
    assert library.calls[-1]["fold"] == [call["ring_init"] for call in begun] and library.calls[-1]["amaxes"] is None
    most = TorchTensor(np.ones(2, np.float32))
    cqsa.fp8_ring_fold(rings, most)
    assert library.calls[-1]["amaxes"] == (CUDA, 0, most.data_ptr(), _ffi.DTYPE_F32)
    refused("DEVICE", lambda: cqsa.fp8_quantize(np.ones((4, 4), np.float32), scale=rings[0], backend="cuda"), "the ring is on a device")
    refused("DEVICE", lambda: cqsa.fp8_quantize(matrix(1), scale=rings[0]), "the ring is on cuda:0")


def test_a_named_stream(torch, library, driver):  # noqa: F811
    torch.current[0] = 5
    x = matrix()
    q = cqsa.fp8_quantize(x, stream=9)
    assert runs(library)[0]["stream"] == 9 and ("order", 0, 5, 9) in driver.asked
    assert x.recorded == [9] and q.data.recorded == [9]


def test_small_operands_go_where_x_is(torch, library):  # noqa: F811
    x = matrix()
    cqsa.fp8_quantize(x, scale=0.5, skip=[0])
    call, = runs(library)
    assert call["row"]["scale_in"][:2] == call["skip"][:2] == (CUDA, 0) and call["source"] == 1


def test_cupy_and_jax(torch, cupy, jax, library, driver):  # noqa: F811
    q = cqsa.fp8_quantize(CupyArray(np.ones((70, 96), np.float32)), layout="dual")
    assert type(q.data) is CupyArray and q.data.dtype == np.uint8 and q.scale.dtype == np.float32 and q.scale.shape == ()
    x = JaxArray(np.ones((70, 96), np.float32))
    refused("INVALID_ARGUMENT", lambda: cqsa.fp8_quantize(x, nan="flag"), "give flags=")


class HostOnly:
    """The real library, whose calls of FP8 must come with the context of the CPU."""

    def __init__(self, real, host):
        self.real, self.host, self.called = real, host, set()

    def __getattr__(self, name):
        function = getattr(self.real, name)
        if not name.startswith("cqsa_fp8_") or name == "cqsa_fp8_ring_bytes":
            return function

        def checked(context, *rest):
            assert context == self.host, name
            self.called.add(name[len("cqsa_fp8_"):])
            return function(context, *rest)

        return checked


def test_host_operands_on_a_machine_with_a_gpu(monkeypatch):
    """There "auto" is the GPU, and no call of FP8 streams: what is in host memory is the CPU's."""
    from cqsa import _context

    host = _context.context_for("cpu")
    library = HostOnly(_ffi.library(), host.handle)
    monkeypatch.setattr(_ffi, "library", lambda: library)
    monkeypatch.setattr(_context, "_contexts", {("auto", None): _context.Context(1000, "cuda", False, 0), ("cpu", None): host})
    x, codes, ring = np.ones((8, 32), np.float32), np.full((8, 32), 0x38, np.uint8), cqsa.Ring(4, amax=1.0)
    q = cqsa.fp8_quantize(x)
    cqsa.fp8_quantize_many([x, x])
    assert (cqsa.fp8_requantize(q, format="e5m2").data == 0x7b).all() and (cqsa.fp8_dequantize(q) == 1).all()
    assert np.allclose(cqsa.fp8_gemm(q, q, out_dtype="float32"), 32) and "impl=" in cqsa.fp8_gemm_explain(q, q)
    assert cqsa.fp8_amax(x) == 1 and cqsa.fp8_scale_from_amax(1.0)[0] == 448 and (cqsa.fp8_transpose(codes) == 0x38).all()
    cqsa.fp8_scale_relayout(np.ones((8, 1), np.float32), 8, 1, layout_out="columns")
    assert cqsa.fp8_quantize(x, scale=ring.begin(x), stage=True).scale == 448 and ring.read().scale == 448
    assert cqsa.fp8_ring_staged([ring]) == 1
    cqsa.fp8_ring_fold([ring])
    other = cqsa.Ring(4)
    other.load(ring.save())
    assert cqsa.fp8_quantize(x, scale=other).scale == 448
    assert library.called == {"quantize", "quantize_many", "dequantize", "gemm", "gemm_explain", "amax", "scale_from_amax", "transpose", "scale_relayout",
                              "ring_init", "ring_read", "ring_staged", "ring_fold"}
