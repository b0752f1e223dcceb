# SPDX-License-Identifier: Apache-2.0
"""The package as installed: import, library lookup, backends, doctor."""
import inspect
import json
import os
import shutil

import pytest

import cqsa
from test_calls import run_python


def test_import_loads_nothing():
    done = run_python("""
import sys, cqsa, cqsa._ffi
assert cqsa._ffi._library is None
assert not any("libcqsa" in line or "libcuda" in line for line in open("/proc/self/maps"))
assert "ml_dtypes" not in sys.modules and "torch" not in sys.modules
""", CQSA_LIBRARY="/nowhere/libcqsa.so.0")
    assert done.returncode == 0, done.stderr


def test_missing_library_names_the_paths_tried(tmp_path):
    code = """
import cqsa
for _ in range(2):
    try:
        cqsa.backends()
    except ImportError as error:
        print(error)
        assert isinstance(error, cqsa.CqsaError) and error.status == -1
"""
    done = run_python(code, CQSA_LIBRARY="/nowhere/libcqsa.so.0")
    assert done.stdout.count("/nowhere/libcqsa.so.0") >= 2, done
    done = run_python(code, CQSA_LIBRARY="libcqsa.so.0")
    assert "absolute" in done.stdout
    package = shutil.copytree(os.path.dirname(cqsa.__file__), tmp_path / "cqsa", ignore=shutil.ignore_patterns("lib", "__pycache__"))
    done = run_python(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + code, CQSA_LIBRARY="", LD_LIBRARY_PATH="")
    assert str(package / "lib" / "libcqsa.so.0") in done.stdout or not done.stdout


def test_library_beside_the_package(tmp_path):
    cqsa.backends()
    package = shutil.copytree(os.path.dirname(cqsa.__file__), tmp_path / "cqsa", ignore=shutil.ignore_patterns("lib", "__pycache__"))
    if not os.path.isabs(cqsa._ffi.library_path()):
        pytest.skip("the library came from the system's loader")
    (package / "lib").mkdir()
    shutil.copy(cqsa._ffi.library_path(), package / "lib" / "libcqsa.so.0")
    done = run_python(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
                      "import cqsa; print(cqsa.doctor()['library']['path'])", CQSA_LIBRARY="")
    assert done.stdout.strip() == str(package / "lib" / "libcqsa.so.0"), done.stderr


def test_another_library_is_refused():
    done = run_python("""
import cqsa, ctypes.util
try:
    cqsa.backends()
except ImportError as error:
    print(error)
""", CQSA_LIBRARY=libm())
    assert "is not a libcqsa" in done.stdout, done


def libm():
    for line in open("/proc/self/maps"):
        path = line.split()[-1]
        if "libm" in path or "libc." in path or "libc-" in path:
            return path
    pytest.skip("no library to try")


def test_patching_torch_needs_torch():
    done = run_python("""
import cqsa
cqsa.unpatch_torch_sdpa()
try:
    cqsa.patch_torch_sdpa()
except RuntimeError as error:
    assert isinstance(error, cqsa.CqsaNotImplementedError) and error.status == 20
    print(error)
""")
    assert "torch is not imported" in done.stdout, done.stderr


def test_backends():
    found = cqsa.backends()
    assert found[0]["name"] == "cpu" and found[0]["ready"] and found[0]["state"] == "ready" and found[0]["reason"] == ""
    for backend in found:
        assert set(backend) == {"name", "ready", "state", "reason", "device", "device_count"}
        assert backend["ready"] == (backend["state"] == "ready") == (backend["reason"] == "")


def test_an_absent_backend_says_why():
    absent = {backend["name"]: backend["reason"] for backend in cqsa.backends() if not backend["ready"]}
    absent["nosuch"] = "nosuch"
    for name, reason in absent.items():
        with pytest.raises(NotImplementedError) as caught:
            cqsa.attention([[[[1.0]]]], [[[[1.0]]]], [[[[1.0]]]], backend=name)
        assert 20 <= caught.value.status < 40 and name in str(caught.value)
        assert reason[:40] in str(caught.value)


def test_doctor():
    found = cqsa.doctor()
    assert found["ok"] and found["version"] == cqsa.__version__ == found["library"]["version"]
    assert found["backends"][0]["check"]["max_abs_error"] < 1e-5
    assert found["backend"] in [b["name"] for b in found["backends"] if b["ready"]]
    json.dumps(found)
    plan = cqsa.attention_plan((1, 1, 100, 64), (1, 1, 100, 64), hardware=found["hardware"])
    assert plan.describe()["seconds"] > 0


def test_surface():
    """The keywords are fixed, section 6 of the attention specification."""
    keywords = [p.name for p in inspect.signature(cqsa.attention).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert keywords == [
        "causal", "softmax_scale", "window", "softcap", "mask", "bias", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k",
        "seqused_k", "page_table", "k_scale", "v_scale", "kv_group", "layout", "memory_limit", "host_memory_limit",
        "pinned_memory_limit", "backend", "schedule", "cqs", "deterministic", "batch_invariant", "precision", "dtype", "out",
        "return_lse", "return_info", "progress", "stream"]
    assert list(inspect.signature(cqsa.attention_merge).parameters) == ["out_a", "lse_a", "out_b", "lse_b"]
    assert list(inspect.signature(cqsa.attention_selected).parameters) == [
        "q", "k", "v", "page_table", "cells", "counts", "softmax_scale", "precision", "k_scale", "v_scale", "kv_group", "check", "dtype",
        "out", "return_lse", "backend", "stream"]
    assert list(inspect.signature(cqsa.kv_append).parameters) == [
        "x", "pool", "page_table", "cells", "scale", "format", "kv_group", "dtype", "backend", "stream"]
    assert list(inspect.signature(cqsa.kv_gather).parameters) == [
        "pool", "page_table", "cells", "scale", "format", "kv_group", "dtype", "out", "backend", "stream"]
    assert list(inspect.signature(cqsa.hadamard).parameters) == ["x", "out", "dtype", "backend", "stream"]
    assert list(inspect.signature(cqsa.fp8_quantize).parameters)[:13] == [
        "x", "format", "scale", "granularity", "layout", "format_transposed", "saturate", "nan", "pow2", "return_amax", "dtype", "backend", "out"]
    assert cqsa.Quantized._fields[:10] == ("data", "data_t", "scale", "scale_inv", "scale_inv_t", "amax", "flags", "format", "format_t", "granularity")
    assert list(inspect.signature(cqsa.fp8_gemm).parameters)[:7] == ["a", "b", "scale_inv_a", "scale_inv_b", "bias", "out_dtype", "accumulate"]
    assert list(inspect.signature(cqsa.Ring).parameters)[:4] == ["hist_len", "format", "margin", "algo"]
    assert str(inspect.signature(cqsa.place)).startswith("(*tensors: 'Any', reserve: 'float' = 0.15")
    assert list(inspect.signature(cqsa.patch_torch_sdpa).parameters) == ["min_tokens", "memory_limit"]
    assert not inspect.signature(cqsa.unpatch_torch_sdpa).parameters
    for name in cqsa.__all__:
        assert getattr(cqsa, name).__doc__
