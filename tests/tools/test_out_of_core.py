# SPDX-License-Identifier: Apache-2.0
"""Files larger than the budget: resident memory, the same bits as in memory, and files that change under the run."""
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import files

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
import out_of_core

MIB = 1 << 20


def operands(heads=1, kv_heads=1, seqlen_q=512, seqlen_k=512, dim=64, dtype="<f4", batch=1):
    random = np.random.default_rng(5)
    shapes = {"q": (batch, heads, seqlen_q, dim), "k": (batch, kv_heads, seqlen_k, dim), "v": (batch, kv_heads, seqlen_k, dim)}
    return {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def write(folder, tensors):
    (folder / "in.safetensors").write_bytes(files.safetensors(tensors))


def measured(tool, folder, *arguments):
    """JSON of a run, and the peak of the process's resident bytes."""
    base = [tool, "attention", str(folder / "in.safetensors"), "-o", str(folder / "out.safetensors"), "--backend", "cpu", "--json"]
    # From a small process: the peak of a child begins with what its parent had when it forked.
    code = "import sys, json; sys.path.insert(0, sys.argv[1]); import out_of_core; print(json.dumps(out_of_core.measure(sys.argv[2:])))"
    done = subprocess.run([sys.executable, "-c", code, BENCHMARKS, *base, "--quiet", *arguments], capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def result(folder):
    return files.read_safetensors(folder / "out.safetensors")


def test_long_sequence_with_a_window(tool, tmp_path):
    out_of_core.write_inputs(tmp_path / "in.safetensors", 65536, "f32")  # 48 MiB, and 16 MiB of output
    window = ("--causal", "bottom_right", "--window", "255,0", "--check")
    report, resident = measured(tool, tmp_path, *window, "--memory", "8MiB")
    _, in_memory = measured(tool, tmp_path, *window)
    assert report["check"]["pass"] and report["plan"]["place_q"] == "mapped"
    assert report["run"]["peak_host_bytes"] <= report["plan"]["peak_host_bytes"] <= 8 * MIB
    assert resident <= 40 * MIB and in_memory >= 64 * MIB


def test_all_keys_pass_by_in_windows(tool, tmp_path):
    write(tmp_path, operands(heads=2, seqlen_q=64, seqlen_k=98304))  # 48 MiB of keys and values
    report, resident = measured(tool, tmp_path, "--memory", "4MiB", "--check", "8")
    assert report["check"]["pass"] and report["run"]["tasks"] > 10
    assert report["run"]["peak_host_bytes"] <= report["plan"]["peak_host_bytes"] <= 4 * MIB
    assert resident <= 36 * MIB


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("arguments", [(), ("--causal", "top_left"), ("--window", "70,30")])
def test_bits_do_not_depend_on_windows(run, tmp_path, layout, arguments):
    shape = {"heads": 4, "kv_heads": 2, "seqlen_q": 1100, "seqlen_k": 1500}
    tensors = operands(**shape)
    if layout == "bshd":
        tensors = {name: np.ascontiguousarray(a.swapaxes(1, 2)) for name, a in tensors.items()}
    write(tmp_path, tensors)
    call = ["attention", "in.safetensors", "-o", "out.safetensors", "--layout", layout, "--lse", "--json", *arguments]
    run(*call)
    whole = result(tmp_path)
    seen = set()
    for memory in ("2200KiB", "1600KiB"):
        report = json.loads(run(*call, "--memory", memory, "--check").stdout)
        assert report["check"]["pass"] and report["plan"]["place_q"] == "mapped" and report["plan"]["schedule"] == "stream"
        assert report["run"]["peak_host_bytes"] <= report["plan"]["peak_host_bytes"]
        seen.add(report["plan"]["tile_q"])
        for name, array in whole.items():
            np.testing.assert_allclose(result(tmp_path)[name], array, rtol=0, atol=3e-6)


def test_varlen_mask_bias_and_scales(run, tmp_path):
    random = np.random.default_rng(8)
    starts = np.array([0, 700, 700, 1500, 2000], "<i4")
    tensors = {name: random.standard_normal((2000, heads, 64)).astype("<f4") for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    write(tmp_path, {**tensors, "cu_seqlens_q": starts, "cu_seqlens_k": starts, "seqused_k": np.array([650, 0, 3, 500], "<i4")})
    report = json.loads(run("attention", "in.safetensors", "-o", "out.safetensors", "--memory", "1600KiB", "--causal", "top_left",
                            "--check", "200", "--lse", "--json").stdout)
    assert report["check"]["pass"] and report["run"]["tasks"] > 4 and report["plan"]["place_q"] == "mapped"
    more = {"mask": random.random((1, 1, 300, 2000)) > 0.3, "bias": random.standard_normal((1, 2, 300, 2000)).astype("<f4"),
            "sinks": np.array([0.5, -1], "<f4")}
    write(tmp_path, {**operands(heads=2, seqlen_q=300, seqlen_k=2000), **more})
    report = json.loads(run("attention", "in.safetensors", "-o", "out.safetensors", "--memory", "3MiB", "--check", "200", "--json").stdout)
    assert report["check"]["pass"] and report["run"]["tasks"] > 4 and report["plan"]["place_q"] == "mapped"


def start_long_run(tool, folder, *arguments):
    q = np.zeros((1, 8, 16384, 64), "<f4")
    write(folder, {"q": q, "k": q, "v": q})
    command = [tool, "attention", "in.safetensors", "-o", "out.safetensors", "--threads", "1", "--backend", "cpu", *arguments]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()  # the plan's line: the run begins
    time.sleep(0.1)
    return process


def test_input_that_shrinks(tool, tmp_path):
    process = start_long_run(tool, tmp_path, "--memory", "16MiB")
    os.truncate(tmp_path / "in.safetensors", 4096)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1 and error.startswith("cqsa: a mapped file became shorter") and error.count("\n") == 1
    assert os.listdir(tmp_path) == ["in.safetensors"]


def test_input_that_changes(tool, tmp_path):
    tensors = operands(heads=8, kv_heads=8, seqlen_q=2048, seqlen_k=2048)
    write(tmp_path, tensors)
    command = [tool, "attention", "in.safetensors", "-o", "out.safetensors", "--threads", "1", "--backend", "cpu"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    with open(tmp_path / "in.safetensors", "r+b") as file:
        file.seek(-4, 2)
        file.write(b"\0\0\0\0")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1 and "in.safetensors: was changed during the run" in error and error.count("\n") == 1
    assert os.listdir(tmp_path) == ["in.safetensors"]


@pytest.mark.parametrize("arguments", [(), ("--resume", "state")])
def test_file_that_may_not_grow(tool, tmp_path, arguments):
    write(tmp_path, operands(seqlen_q=4096))
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
    done = subprocess.run([tool, "attention", "in.safetensors", "-o", "out.safetensors", *arguments], cwd=tmp_path, preexec_fn=limit,
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("cqsa: out.safetensors") and "File too large" in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and os.listdir(tmp_path) == ["in.safetensors"]


def test_folders_that_cannot_be_used(run, tmp_path):
    write(tmp_path, operands())
    for arguments in (("in.safetensors/x.safetensors", "-o", "o.npy"), ("in.safetensors", "-o", "in.safetensors/o.npy"),
                      ("in.safetensors", "-o", "o.npy", "--resume", "in.safetensors/state")):
        done = run("attention", *arguments, status=1)
        assert "Not a directory" in done.stderr
