# SPDX-License-Identifier: Apache-2.0
"""Quantized matrices against the decoders and quantizers of gguf on random bytes, closed forms for what it has not, GGUF files, and bad input."""
import gc
import pathlib
import struct
import subprocess
import sys

import numpy as np
import pytest

import cqsa
from cqsa import _ffi
from oracle import gguf

TOOLS = pathlib.Path(__file__).parents[2] / "tools"
FORMATS = ("F32 F16 BF16 Q1_0 Q2_0 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS TQ1_0 TQ2_0 "
           "MXFP4 NVFP4").split()
NOT_IN_GGUF = ("Q1_0", "Q2_0")
QUANTIZED = ("Q2_0", "Q4_0", "Q8_0", "IQ4_NL", "MXFP4", "F32", "F16", "BF16")


def random_blocks(random, name, rows, cols):
    format = cqsa.quant_formats()[name]
    return random.integers(0, 256, (rows, cols // format.block_elements * format.block_bytes), dtype=np.uint8)


def same_bits(got, wanted):
    """Bit for bit; one NaN is as good as another, and ours is always the same."""
    assert got.dtype == wanted.dtype == np.float32
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(np.uint32)[~nan], wanted.view(np.uint32)[~nan])


def refused(status, text, call, *arguments, **keywords):
    with pytest.raises(ValueError) as caught:
        call(*arguments, **keywords)
    assert caught.value.status_name == "CQSA_ERROR_" + status and text in str(caught.value), str(caught.value)


def test_formats_are_those_of_the_header():
    header = (pathlib.Path(__file__).parents[2] / "include" / "cqsa.h").read_text()
    assert list(cqsa.quant_formats()) == FORMATS
    for format in cqsa.quant_formats().values():
        line = next(line for line in header.splitlines() if f" CQSA_QUANT_{format.name} =" in line)
        words = line.replace("*/", "").replace(",", " ").replace(".", " ").split()
        assert int(words[2]) == format.id
        assert int(words[words.index("ggml") + 1]) == format.ggml_type
        assert f"{format.block_bytes}/{format.block_elements}" in words
        assert format.can_quantize == (format.name in QUANTIZED)


def test_sizes_are_those_of_gguf():
    constants = gguf("constants")
    for format in cqsa.quant_formats().values():
        if format.name != "Q2_0":
            kind = constants.GGMLQuantizationType[format.name]
            assert (format.ggml_type, (format.block_elements, format.block_bytes)) == (kind, constants.GGML_QUANT_SIZES[kind])


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in NOT_IN_GGUF])
def test_decode_is_that_of_gguf(random, name):
    """Random bytes: scales that are NaN, infinite and subnormal among them."""
    quants, kind = gguf("quants"), gguf("constants").GGMLQuantizationType[name]
    data = random_blocks(random, name, 300, 1024)
    with np.errstate(all="ignore"):
        wanted = quants.dequantize(data, kind)
    if name not in ("MXFP4", "NVFP4"):  # their scales know no NaN
        assert np.isnan(wanted).any()
    same_bits(cqsa.QuantTensor(data, name).dequantize(), wanted)


def test_every_code_of_every_scale_byte(random):
    """MXFP4 and NVFP4 have few scales: all of them."""
    quants, kinds = gguf("quants"), gguf("constants").GGMLQuantizationType
    for name, scales in (("MXFP4", 1), ("NVFP4", 4)):
        data = random_blocks(random, name, 256, cqsa.quant_formats()[name].block_elements)
        data[:, :scales] = np.arange(256, dtype=np.uint8)[:, None]
        data[:, scales:scales + 8] = [0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe]
        with np.errstate(all="ignore"):
            same_bits(cqsa.QuantTensor(data, name).dequantize(), quants.dequantize(data, kinds[name]))


def test_codebooks_are_those_of_gguf():
    text = (pathlib.Path(__file__).parents[2] / "backends" / "quant_codebooks.h").read_text()
    quants = gguf("quants")
    for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"):
        kind = getattr(quants, name)
        kind.init_grid()
        body = text.split(f" {name.lower()}_grid, ")[1].split("{")[1].split("}")[0]
        ours = np.array([int(word, 16) for word in body.replace(",", " ").split()], np.uint64).view(np.int8).reshape(-1, 8)[:, :kind.grid_shape[1]]
        np.testing.assert_array_equal(ours, kind.grid.reshape(kind.grid_shape))


def closed_q1_0(block):
    d = block[:2].view(np.float16).astype(np.float32)
    return d * (np.unpackbits(block[2:], bitorder="little").astype(np.float32) * 2 - 1)


def closed_q2_0(block):
    d = block[:2].view(np.float16).astype(np.float32)
    return d * ((block[2:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).astype(np.float32) - 1).ravel()


@pytest.mark.parametrize("name, closed", [("Q1_0", closed_q1_0), ("Q2_0", closed_q2_0)])
def test_decode_of_what_gguf_has_not(random, name, closed):
    data = random_blocks(random, name, 400, 128)
    with np.errstate(all="ignore"):
        wanted = np.array([np.concatenate([closed(block) for block in row.reshape(-1, 18)]) for row in data], np.float32)
    assert np.isnan(wanted).any()
    same_bits(cqsa.QuantTensor(data, name).dequantize(), wanted)


def awkward(random, rows, cols):
    """Sizes from tiny to huge, zeros, equals and ties."""
    x = (random.standard_normal((rows, cols)) * 10.0 ** random.integers(-4, 4, (rows, 1))).astype(np.float32)
    x[0], x[1], x[2] = 0, np.sign(x[1]), np.round(x[2] * 2) / 2
    x[3, ::2] = 0
    return x


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "MXFP4", "BF16", "F16"])
def test_quantize_is_that_of_gguf(random, name):
    x = awkward(random, 400, 256)
    got = cqsa.quantize_rows(x, name)
    assert got.shape == x.shape and got.format == name and got.nbytes == got.data.size
    with np.errstate(all="ignore"):
        wanted = gguf("quants").quantize(x, gguf("constants").GGMLQuantizationType[name])
    np.testing.assert_array_equal(got.data, wanted.view(np.uint8).reshape(got.data.shape))


def test_quantize_q2_0(random):
    x = awkward(random, 50, 128)
    data = cqsa.quantize_rows(x, "Q2_0").data.reshape(-1, 18)
    blocks = x.reshape(-1, 64)
    d = np.abs(blocks).max(1, keepdims=True)
    with np.errstate(divide="ignore"):
        q = blocks * np.where(d == 0, 0, np.float32(1) / d).astype(np.float32)
    codes = np.clip(np.sign(q) * np.floor(np.abs(q) + np.float32(0.5)) + 1, 0, 3).astype(np.uint8).reshape(-1, 16, 4)
    np.testing.assert_array_equal(data[:, :2], d.astype(np.float16).view(np.uint8))
    np.testing.assert_array_equal(data[:, 2:], (codes << np.array([0, 2, 4, 6], np.uint8)).sum(2, dtype=np.uint8))


def test_quantize_iq4_nl(random):
    """Each code is the nearest value, and the scale the best for the codes."""
    x = awkward(random, 50, 64)
    back = cqsa.quantize_rows(x, "IQ4_NL").dequantize()
    error = np.linalg.norm(back - x, axis=1) / np.maximum(np.linalg.norm(x, axis=1), 1e-30)
    assert back[0].max() == back[0].min() == 0 and error[4:].max() < 0.12 and error[4:].mean() < 0.09


def test_rows_types_and_outputs(random):
    w = cqsa.QuantTensor(random_blocks(random, "Q5_K", 9, 512) & 0x7b, "Q5_K")  # no scale with all exponent bits
    whole = w.dequantize()
    assert np.isfinite(whole).all() and (w.rows, w.cols, w.experts, w.shape) == (9, 512, None, (9, 512))
    np.testing.assert_array_equal(cqsa.dequantize_rows(w, slice(2, 5)), whole[2:5])
    np.testing.assert_array_equal(cqsa.dequantize_rows(w, slice(20, None)), whole[20:])
    np.testing.assert_array_equal(cqsa.dequantize_rows(w, [8, 0, 8]), whole[[8, 0, 8]])
    np.testing.assert_array_equal(cqsa.dequantize_rows(w, np.array([3, 1], np.int32)), whole[[3, 1]])
    with np.errstate(over="ignore"):
        half = whole.astype(np.float16)
    np.testing.assert_array_equal(w.dequantize("float16"), half)
    bits = whole.view(np.uint32)
    np.testing.assert_array_equal(w.dequantize("bfloat16").view(np.uint16), ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(np.uint16))
    out = np.full((512, 20), 7, np.float32).T
    assert cqsa.dequantize_rows(w, out=out[1:19:2]) is not None
    np.testing.assert_array_equal(out[1:19:2], whole)
    assert (out[::2] == 7).all() and (out[19] == 7).all()
    refused("INDEX", "row_ids[1] is 9, wanted 0 to 8", cqsa.dequantize_rows, w, [0, 9])
    refused("INVALID_ARGUMENT", "step 2", cqsa.dequantize_rows, w, slice(0, 5, 2))
    refused("SHAPE", "row_ids has shape [2], wanted [3]", cqsa.dequantize_rows, w, [0, 1], out=np.zeros((3, 512), np.float32))
    refused("DTYPE", "dtype is 'int8'", w.dequantize, "int8")


def test_matrices_in_larger_memory(random):
    """Rows of gate and up in turn: a view of every other row; experts; bytes."""
    data = random_blocks(random, "Q8_0", 12, 64)
    whole = cqsa.QuantTensor(data, "Q8_0").dequantize()
    same_bits(cqsa.QuantTensor(data[1::2], "Q8_0").dequantize(), whole[1::2])
    same_bits(cqsa.QuantTensor(data.tobytes(), "Q8_0", rows=12, cols=64).dequantize(), whole)
    same_bits(cqsa.QuantTensor(data.ravel(), "Q8_0", rows=12).dequantize(), whole)
    experts = cqsa.QuantTensor(data.reshape(3, 4, 68), "Q8_0")
    assert experts.shape == (3, 4, 64) and experts.experts == len(experts) == len(list(experts)) == 3
    same_bits(experts.dequantize(), whole.reshape(3, 4, 64))
    same_bits(experts[-1].dequantize(), whole[8:])
    np.testing.assert_array_equal(experts[1].data, data[4:8])
    assert not experts.data.flags.writeable
    with pytest.raises(IndexError):
        experts[3]
    x = random.standard_normal((3, 4, 64)).astype(np.float32)
    np.testing.assert_array_equal(cqsa.quantize_rows(x, "Q8_0")[2].data, cqsa.quantize_rows(x[2], "Q8_0").data)
    np.testing.assert_array_equal(cqsa.quantize_rows(x.transpose(0, 2, 1)[:, :, :4].transpose(0, 2, 1), "Q8_0").data, cqsa.quantize_rows(x, "Q8_0").data)


def test_torch(random):
    torch = pytest.importorskip("torch")
    data = random_blocks(random, "Q4_0", 4, 64) & 0x7b
    got = cqsa.QuantTensor(torch.from_numpy(data), "Q4_0").dequantize()
    assert torch.is_tensor(got)
    np.testing.assert_array_equal(got.numpy(), cqsa.QuantTensor(data, "Q4_0").dequantize())


def test_bad_matrices(random):
    data = random_blocks(random, "Q4_K", 3, 512)
    refused("INVALID_ARGUMENT", "format is 'Q4_X'", cqsa.QuantTensor, data, "Q4_X")
    refused("SHAPE", "cols is 500, wanted a multiple of 256", cqsa.QuantTensor, data, "Q4_K", cols=500)
    refused("SHAPE", "rows of 287 bytes, wanted a multiple of 144", cqsa.QuantTensor, data[:, :-1], "Q4_K")
    refused("SHAPE", "rows of 287 bytes, wanted 288", cqsa.QuantTensor, data[:, :-1], "Q4_K", cols=512)
    refused("SHAPE", "863 bytes, wanted 864", cqsa.QuantTensor, data.ravel()[:-1], "Q4_K", rows=3, cols=512)
    refused("SHAPE", "is 3 rows, but rows is 4", cqsa.QuantTensor, data, "Q4_K", rows=4)
    refused("SHAPE", "wanted rows whose bytes", cqsa.QuantTensor, np.zeros((3, 576), np.uint8)[:, ::2], "Q4_K")
    refused("SHAPE", "wanted rows whose bytes", cqsa.QuantTensor, data[::-1], "Q4_K")
    refused("DTYPE", "data is float32, wanted uint8", cqsa.QuantTensor, np.zeros((3, 288), np.float32), "Q4_K")
    refused("INVALID_ARGUMENT", "even address", cqsa.QuantTensor(np.zeros(289, np.uint8)[1:], "Q4_K", rows=1).dequantize)
    refused("SHAPE", "33 columns", cqsa.quantize_rows, np.zeros((2, 33), np.float32), "Q8_0")
    refused("SHAPE", "wanted [rows, cols]", cqsa.quantize_rows, np.zeros(32, np.float32), "Q8_0")
    with pytest.raises(NotImplementedError, match="Q4_K, which can be read only"):
        cqsa.quantize_rows(np.zeros((2, 256), np.float32), "Q4_K")
    empty = cqsa.QuantTensor(np.zeros((0, 288), np.uint8), "Q4_K")
    assert empty.dequantize().shape == (0, 512)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    subprocess.run([sys.executable, TOOLS / "make_gguf.py", path], check=True, stdout=subprocess.DEVNULL)
    return path


def test_gguf_file(model):
    file = cqsa.Gguf(model)
    assert len(file.names) == 10 and file.metadata["general.architecture"] == "moe-test"
    assert (file.metadata["moe-test.expert_count"], file.metadata["moe-test.expert_used_count"]) == (64, 4)
    assert file.metadata["moe-test.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6) and "general.tags" not in file.metadata
    name = "blk.1.ffn_down_exps.weight"
    assert file.tensors[name][:4] == (name, (64, 512, 256), "Q2_0", 42)
    experts, whole = file.experts(name), file.tensor(name)
    assert len(experts) == 64 and whole.shape == (64, 512, 256) and experts[5].shape == (512, 256)
    wanted = whole.dequantize()
    for e in (0, 5, 63):
        np.testing.assert_array_equal(experts[e].dequantize(), wanted[e])
    assert 0.8 < wanted.std() * 16 < 1.4
    router = file.tensor("blk.0.ffn_gate_inp.weight").dequantize()
    assert router.shape == (64, 512)
    with pytest.raises(ValueError, match="no tensor"):
        file.tensor("blk.7")
    file.close()
    del file, whole
    gc.collect()
    np.testing.assert_array_equal(experts[63].dequantize(), wanted[63])  # they keep the file


def test_gguf_file_is_one_for_gguf(model):
    """The reader of gguf sees the same tensors; it knows no Q2_0."""
    path = model.with_name("others.gguf")
    subprocess.run([sys.executable, TOOLS / "make_gguf.py", path, "--formats", "Q4_K,Q6_K,IQ4_XS", "--experts", "3"], check=True, stdout=subprocess.DEVNULL)
    reader, file = gguf("gguf_reader").GGUFReader(path), cqsa.Gguf(path)
    assert [tensor.name for tensor in reader.tensors] == file.names
    for tensor in reader.tensors:
        ours = file.tensor(tensor.name)
        assert tuple(int(size) for size in reversed(tensor.shape)) == file.tensors[tensor.name].shape
        assert tensor.data_offset == file.tensors[tensor.name].file_offset
        np.testing.assert_array_equal(tensor.data.view(np.uint8).ravel(), ours.data.ravel())


def test_gguf_lies(model, tmp_path):
    data = model.read_bytes()[:4096]
    bad = tmp_path / "bad.gguf"
    for change, text in ((b"GGML" + data[4:], "wanted the bytes GGUF"), (data[:4] + struct.pack("<I", 9) + data[8:], "version 9"),
                         (data, "but the data of the file are"), (data[:700], "the file ends in")):
        bad.write_bytes(change)
        with pytest.raises(cqsa.CqsaRuntimeError, match=text) as caught:
            cqsa.Gguf(bad)
        assert caught.value.status_name == "CQSA_ERROR_IO"
    with pytest.raises(cqsa.CqsaRuntimeError, match="cannot be opened"):
        cqsa.Gguf(tmp_path / "none.gguf")


def test_same_arguments_same_file(model, tmp_path):
    for seed, equal in ((1, True), (2, False)):
        again = tmp_path / "again.gguf"
        subprocess.run([sys.executable, TOOLS / "make_gguf.py", again, "--seed", str(seed)], check=True, stdout=subprocess.DEVNULL)
        assert (again.read_bytes() == model.read_bytes()) == equal


def test_formats_end_at_the_first_unknown():
    info = _ffi.QuantFormatInfo(24)
    assert _ffi.library().cqsa_quant_format_query(1, info) == 2 and "struct_size is 24" in _ffi.library().cqsa_last_error().decode()
