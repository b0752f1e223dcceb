# SPDX-License-Identifier: Apache-2.0
"""The conformance vectors of tests/vectors through the Python package, with the default schedule."""
import json
import pathlib
import sys

import numpy as np
import pytest

import cqsa

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "vectors"
sys.path.insert(0, str(FOLDER))
import make_vectors  # noqa: E402

CASES = json.loads((FOLDER / "manifest.json").read_text())["cases"]
NUMPY = dict(make_vectors.STORAGE, f16=np.float16, bool=np.bool_)
NAMES = {"bf16": "bfloat16", "e4m3fn": "float8_e4m3fn", "e5m2": "float8_e5m2"}


def buffer_of(record, data):
    """All elements of a tensor's buffer, as numpy has them."""
    if "seed" in record:
        stored = make_vectors.random_elements(record["seed"], record["elements"], record["dtype"], record.get("scale", 1.0),
                                              record.get("shift", 0.0))
    elif "at" in record:
        storage = np.dtype(make_vectors.STORAGE[record["dtype"]]).newbyteorder("<")
        stored = np.frombuffer(data, storage, record["elements"], record["at"]).astype(storage.newbyteorder("="))
    else:
        stored = np.full(record["elements"] * np.dtype(NUMPY[record["dtype"]]).itemsize, 0xFF, np.uint8)
    return stored.view(NUMPY[record["dtype"]])


def view_of(record, buffer):
    strides = [stride * buffer.itemsize for stride in record["strides"]]
    return np.lib.stride_tricks.as_strided(buffer[record.get("first", 0):], record["shape"], strides)


def values_of(array, dtype):
    return make_vectors.decode(array, "bf16") if dtype == "bf16" else array.astype(np.float64)


def keywords_of(params):
    window = (params.get("window_left", 0), params.get("window_right", 0)) if "window" in params["flags"] else None
    types = {params[key] for key in ("dtype_q", "dtype_kv", "dtype_out", "dtype_bias") if key in params}
    return dict(causal=params.get("causal", "none"), window=window, softmax_scale=params.get("softmax_scale"),
                softcap=params.get("softcap", 0.0), kv_group=params.get("kv_group"), return_lse="lse" in params["flags"],
                dtype=[NAMES[dtype] for dtype in sorted(types) if dtype in NAMES] or None)


def check(got, record, expected, key, data):
    stored = np.dtype(make_vectors.STORAGE[expected["dtype"]]).newbyteorder("<")
    want = np.frombuffer(data, stored, got.size, expected[key + "_at"]).reshape(got.shape).astype(np.float64)
    got = values_of(got, record["dtype"])
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    error = np.abs(got[finite] - want[finite]) / np.maximum(1, np.abs(want[finite]))
    assert error.max(initial=0) <= expected[key + "_tolerance"], key


def untouched(record, buffer):
    """Are the bytes between the elements of an output as they were?"""
    between = np.ones(buffer.size, bool)
    view_of(record, between)[...] = False
    return (buffer[between].view(np.uint8) == 0xFF).all()


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_vector(case):
    data = (FOLDER / case["file"]).read_bytes()
    buffers = {key: buffer_of(record, data) for key, record in {**case["inputs"], **case["outputs"]}.items()}
    before = {key: buffers[key].copy() for key in case["inputs"]}
    views = {key: view_of(record, buffers[key]) for key, record in {**case["inputs"], **case["outputs"]}.items()}
    keywords = keywords_of(case["params"])
    inputs = {key: views[key] for key in case["inputs"]}
    out = (views["out"], views["lse"]) if keywords["return_lse"] else views["out"]
    cqsa.attention(inputs.pop("q"), inputs.pop("k"), inputs.pop("v"), out=out, backend="cpu", **inputs, **keywords)
    for key, record in case["outputs"].items():
        check(views[key], record, case["expected"], key, data)
        assert untouched(record, buffers[key]), key
    for key, array in before.items():
        assert array.tobytes() == buffers[key].tobytes(), key


def test_files_are_those_that_the_generator_writes():
    files = make_vectors.make()
    assert {path.name for path in FOLDER.glob("*.bin")} == set(files) - {"manifest.json"}
    for name, data in files.items():
        assert (FOLDER / name).read_bytes() == data, name


def test_the_reference_in_closed_form():
    """Equal logits give the mean of the values and lse = s + ln n; a linear bias gives a geometric sum."""
    case = make_vectors.Case("closed", "", batch=1, heads=1, kv_heads=1, sq=2, sk=8, d=1, dv=1,
                             q=make_vectors.Tensor("f64", (1, 1, 2, 1), 0.0), k=make_vectors.Tensor("f64", (1, 1, 8, 1), 1.0),
                             v=make_vectors.Tensor("f64", (1, 1, 8, 1), np.arange(8.0)[:, None]), dtype="f64").problem()
    out, lse = make_vectors.reference(case)
    np.testing.assert_allclose(out[0, 0, :, 0], 3.5)
    np.testing.assert_allclose(lse, np.log(8))
    case.bias = -np.log(2) * np.arange(8.0)[None, None, None, :]
    out, lse = make_vectors.reference(case)
    np.testing.assert_allclose(lse, np.log(2 - 0.5**7))
    np.testing.assert_allclose(out[0, 0, 0, 0], sum(j * 0.5**j for j in range(8)) / (2 - 0.5**7))


@pytest.mark.parametrize("dtype", sorted(make_vectors.FLOATS))
def test_codes_survive_decoding_and_encoding(dtype):
    codes = np.arange(1 << 8 * np.dtype(make_vectors.STORAGE[dtype]).itemsize).astype(make_vectors.STORAGE[dtype])
    values = make_vectors.decode(codes, dtype)
    finite = np.isfinite(values)
    np.testing.assert_array_equal(make_vectors.encode(values[finite], dtype), codes[finite])
    if dtype == "f16":
        np.testing.assert_array_equal(values, codes.view(np.float16).astype(np.float64))
        x = make_vectors.random_elements(9, 5000, "f32", 2.0**-12, 0.0)
        np.testing.assert_array_equal(make_vectors.encode(x, dtype), x.astype(np.float16).view(np.uint16))
