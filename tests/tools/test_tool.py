# SPDX-License-Identifier: Apache-2.0
"""The command `cqsa` from outside: what good input gives, compared with fp64, and what every kind of bad use says."""
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

import files

ROOT = Path(__file__).resolve().parents[2]
HARDWARE = ROOT / "examples" / "data" / "hardware"
REAL = ROOT / "examples" / "data" / "minilm_qkv.safetensors"
SIZES = {"<f4": 2e-6, "<f2": 2e-3}  # what is left for the type of the result


def operands(dtype="<f4", batch=2, heads=4, kv_heads=2, seqlen_q=70, seqlen_k=70, dim=32, dim_v=32, seed=0):
    random = np.random.default_rng(seed)
    shapes = {"q": (batch, heads, seqlen_q, dim), "k": (batch, kv_heads, seqlen_k, dim), "v": (batch, kv_heads, seqlen_k, dim_v)}
    return {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def write(folder, tensors, **more):
    (folder / "in.safetensors").write_bytes(files.safetensors(tensors, **more))


def attention(run, folder, tensors, *arguments, **more):
    """Runs the command on tensors; its result as a dictionary of arrays."""
    write(folder, tensors, **more)
    run("attention", "in.safetensors", "-o", "out.safetensors", *arguments)
    return files.read_safetensors(folder / "out.safetensors")


def close(got, want, tolerance):
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=tolerance)


# ------------------------------------------------------------------------------------------------------------- good runs

MASKS = [
    ((), {}),
    (("--causal", "top_left"), {"causal": "top_left"}),
    (("--causal", "bottom_right"), {"causal": "bottom_right"}),
    (("--window", "8,0"), {"window": (8, 0)}),
    (("--window", "-1,3", "--causal", "none"), {"window": (-1, 3)}),
    (("--softcap", "5", "--softmax-scale", "0.3"), {"softcap": 5.0, "scale": 0.3}),
]


@pytest.mark.parametrize("dtype", ["<f4", "<f2"])
@pytest.mark.parametrize("arguments, meaning", MASKS)
def test_attention_equals_fp64(run, tmp_path, dtype, arguments, meaning):
    tensors = operands(dtype, seqlen_q=50, seqlen_k=77, dim=40, dim_v=24)
    got = attention(run, tmp_path, tensors, *arguments, "--lse", "--check", "1000000")
    out, lse = files.attention(**tensors, **meaning)
    assert got["out"].dtype == dtype
    close(got["out"], out, SIZES[dtype])
    close(got["lse"], lse, 1e-5)


def test_attention_with_every_operand_of_the_file(run, tmp_path):
    random = np.random.default_rng(3)
    tensors = operands()
    extra = {
        "mask": random.random((2, 1, 70, 70)) > 0.3,
        "bias": random.standard_normal((1, 4, 70, 70)).astype("<f4"),
        "alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0625], "<f4"),
        "sinks": np.array([0.0, 1.0, -1.0, 3.0], "<f4"),
    }
    extra["mask"][0, 0, 5] = False  # a row that only the sink is left of
    others = {"unrelated": np.arange(3)}
    got = attention(run, tmp_path, {**others, **tensors, **extra}, "--lse", "--check", "1000000")
    renamed = {"slopes": extra.pop("alibi_slopes"), **extra}
    out, lse = files.attention(**tensors, **renamed)
    close(got["out"], out, 3e-6)
    close(got["lse"], lse, 1e-5)


def test_varlen(run, tmp_path):
    flat = {name: array[0].swapaxes(0, 1).copy() for name, array in operands(batch=1).items()}
    ends = np.array([0, 20, 20, 61], "<i4")  # the second segment is empty; rows from 61 on belong to none
    got = attention(run, tmp_path, {**flat, "cu_seqlens_q": ends, "cu_seqlens_k": ends}, "--causal", "bottom_right", "--lse",
                    "--check", "1000000")
    for begin, end in ((0, 20), (20, 61)):
        part = {name: array[None, begin:end].swapaxes(1, 2) for name, array in flat.items()}
        out, lse = files.attention(**part, causal="bottom_right")
        close(got["out"][begin:end].swapaxes(0, 1), out[0], 2e-6)
        close(got["lse"][:, begin:end], lse[0], 1e-5)
    assert not got["out"][61:].any() and (got["lse"][:, 61:] == -np.inf).all()


def test_paged(run, tmp_path):
    tensors = operands(seqlen_q=9, seqlen_k=48)
    order = np.array([[5, 0, 3], [1, 4, 2]], "<i4")  # page j of sequence b
    pools = {}
    for name in "kv":
        pool = np.empty((6, 16, 2, 32), "<f4")
        for b in range(2):
            for page in range(3):
                pool[order[b, page]] = tensors[name][b, :, 16 * page : 16 * page + 16].swapaxes(0, 1)
        pools[name] = pool
    used = np.array([48, 35], "<i4")
    got = attention(run, tmp_path, {"q": tensors["q"], **pools, "page_table": order, "seqused_k": used}, "--check", "1000000")
    for b in range(2):
        part = {"q": tensors["q"][b : b + 1], **{name: tensors[name][b : b + 1, :, : used[b]] for name in "kv"}}
        close(got["out"][b], files.attention(**part)[0][0], 2e-6)


def test_int8_keys_with_scales(run, tmp_path):
    random = np.random.default_rng(5)
    tensors = {"q": operands(dim=64)["q"]}
    for name in "kv":
        codes = random.integers(-127, 128, (2, 2, 70, 64)).astype("i1")
        scales = random.uniform(0.005, 0.02, (2, 2, 70, 2)).astype("<f2")
        tensors.update({name: codes, name + "_scale": scales})
    got = attention(run, tmp_path, tensors, "--check", "1000000")
    whole = {name: tensors[name] * np.repeat(tensors[name + "_scale"].astype(np.float64), 32, -1) for name in "kv"}
    close(got["out"], files.attention(tensors["q"], **whole)[0], 2e-5)


def test_bshd_layout(run, tmp_path):
    tensors = operands()
    swapped = {name: array.swapaxes(1, 2) for name, array in tensors.items()}
    got = attention(run, tmp_path, swapped, "--layout", "bshd", "--causal", "top_left", "--lse", "--check", "1000000")
    out, lse = files.attention(**tensors, causal="top_left")
    close(got["out"], out.swapaxes(1, 2), 2e-6)
    close(got["lse"], lse, 1e-5)


def test_bfloat16(run, tmp_path):
    tensors = {name: files.bf16_bits(array) for name, array in operands().items()}
    got = attention(run, tmp_path, tensors, "--check", "1000000", types=dict.fromkeys("qkv", "BF16"))
    close(got["out"], files.attention(**{name: files.bf16_values(bits) for name, bits in tensors.items()})[0], 1.6e-2)


def test_out_dtype(run, tmp_path):
    tensors = operands("<f2")
    got = attention(run, tmp_path, tensors, "--out-dtype", "f32", "--check", "1000000")
    assert got["out"].dtype == "<f4"
    close(got["out"], files.attention(**tensors)[0], 2e-6)


def test_fp64(run, tmp_path):
    tensors = operands("<f8")
    got = attention(run, tmp_path, tensors, "--check", "1000000")
    close(got["out"], files.attention(**tensors)[0], 1e-14)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_npy(run, tmp_path, version):
    tensors = operands()
    for name, array in tensors.items():
        (tmp_path / f"{name}.npy").write_bytes(files.npy(array, version))
    run("attention", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "-o", "out.npy", "--lse")
    out, lse = files.attention(**tensors)
    close(np.load(tmp_path / "out.npy"), out, 2e-6)
    close(np.load(tmp_path / "out.lse.npy"), lse, 1e-5)


@pytest.mark.parametrize("arguments", [("--memory", "256KiB"), ("--schedule", "stream"), ("--schedule", "direct"), ("--cqs", "7,1")])
def test_every_schedule_gives_the_same(run, tmp_path, arguments):
    tensors = operands(seqlen_q=300, seqlen_k=300)
    write(tmp_path, tensors)
    done = run("attention", "in.safetensors", "-o", "out.safetensors", "--json", "--causal", "top_left", *arguments)
    report = json.loads(done.stdout)
    assert report["run"]["peak_host_bytes"] <= report["plan"]["peak_host_bytes"]
    if "--memory" in arguments:
        assert report["run"]["max_host_bytes"] == 256 << 10 and report["run"]["peak_host_bytes"] <= 256 << 10
    close(files.read_safetensors(tmp_path / "out.safetensors")["out"], files.attention(**tensors, causal="top_left")[0], 2e-6)


def test_real_data_passes_the_check(run, tmp_path):
    done = run("attention", REAL, "-o", "out.safetensors", "--memory", "4MiB", "--check", "--json")
    report = json.loads(done.stdout)
    assert report["check"]["pass"] and report["check"]["rows"] == 64
    assert report["check"]["max_abs"] <= report["check"]["allowed_max_abs"] and report["check"]["cosine"] > 0.999999
    assert report["output"] == "out.safetensors"


def test_text_of_a_run(run, tmp_path):
    write(tmp_path, operands())
    done = run("attention", "in.safetensors", "-o", "out.safetensors", "--memory", "1MiB", "--check", "5")
    assert "check 5 rows: " in done.stdout and ": PASS" in done.stdout and " of 1.00 MiB" in done.stdout
    assert done.stderr == ""
    assert run("attention", "in.safetensors", "-o", "out.safetensors", "--quiet", "--check").stdout == ""


def test_empty_problem(run, tmp_path):
    got = attention(run, tmp_path, operands(seqlen_q=0), "--check")
    assert got["out"].shape == (2, 4, 0, 32)
    got = attention(run, tmp_path, operands(seqlen_k=0), "--check", "--lse")
    assert not got["out"].any() and (got["lse"] == -np.inf).all()


# ------------------------------------------------------------------------------------------------------------------ plan

PLAN = ("plan", "--seqlen", "64K", "--heads", "8", "--head-dim", "64")


def test_plan_text(run):
    done = run(*PLAN, "--memory", "64MiB", "--causal", "top_left", "--backend", "cpu", "--explain")
    for word in ("schedule", "tiles", "peak memory", "predicted"):
        assert word in done.stdout


def test_plan_json(run):
    plan = json.loads(run(*PLAN, "--memory", "64MiB", "--backend", "cpu", "--json").stdout)
    assert plan["peak_host_bytes"] <= 64 << 20
    for key in "schedule implementation c itr tasks tile_q tile_k workspace_bytes bytes_in bytes_out flops seconds".split():
        assert key in plan
    assert plan["flops"] == pytest.approx(2 * 128 * 8 * 65536**2)


def test_plan_takes_sizes_as_people_write_them(run):
    def flops(n):
        return json.loads(run("plan", "--seqlen", n, "--heads", "1", "--head-dim", "64", "--json").stdout)["flops"]

    assert flops("64K") == flops("65536") and flops("1M") == flops("1048576") and flops("1m") == flops("1024K")
    for size in ("65536000", "64MiB", "67.1MB", "64M", "0.0625GiB", "64 mib", "67108864B"):
        run(*PLAN, "--memory", size)


@pytest.mark.parametrize("card", ["card-8gb.json", "card-80gb.json"])
def test_plan_for_a_card_that_is_not_here(run, card):
    plan = json.loads(run("plan", "--seqlen", "1M", "--heads", "32", "--kv-heads", "8", "--head-dim", "128", "--memory", "3GiB",
                          "--causal", "bottom_right", "--hardware", HARDWARE / card, "--json").stdout)
    assert 0 < plan["peak_device_bytes"] <= 3 << 30


def test_hardware_of_doctor_is_hardware_for_plan(run, tmp_path):
    report = json.loads(run("doctor", "--json").stdout)
    (tmp_path / "here.json").write_text(json.dumps(report["backends"][0]["hardware"]))
    here = json.loads(run(*PLAN, "--backend", "cpu", "--memory", "16MiB", "--json").stdout)
    there = json.loads(run(*PLAN, "--hardware", "here.json", "--memory", "16MiB", "--json").stdout)
    assert there["schedule"] == here["schedule"]
    assert there["peak_host_bytes"] <= 16 << 20


def test_doctor(run):
    done = run("doctor")
    assert "backend cpu: ready" in done.stdout and "FAIL" not in done.stdout and done.stdout.endswith("PASS\n")
    report = json.loads(run("doctor", "--json").stdout)
    assert report["pass"] is True
    cpu = report["backends"][0]
    assert cpu["name"] == "cpu" and cpu["state"] == "ready"
    assert [row["seqlen"] for row in cpu["capacity"]["lengths"]] == [1 << 16, 1 << 20, 1 << 24]
    for other in report["backends"][1:]:
        assert other["state"] == "ready" or other["reason"]


def test_least_budget_of_doctor_is_exact(run):
    rows = json.loads(run("doctor", "--json").stdout)["backends"][0]["capacity"]["lengths"]
    plan = ("plan", "--heads", "8", "--head-dim", "64", "--causal", "top_left", "--backend", "cpu", "--seqlen", rows[0]["seqlen"])
    run(*plan, "--memory", rows[0]["least_budget"])
    run(*plan, "--memory", rows[0]["least_budget"] - 1, status=1)


# -------------------------------------------------------------------------------------------------------------- bad usage

def refused(run, *arguments, words=()):
    error = run(*arguments, status=1).stderr
    for word in words:
        assert word in error, error
    return error


@pytest.mark.parametrize("arguments, words", [
    ((), []),
    (("nonsense",), []),
    (("plan",), ["--seqlen"]),
    ((*PLAN, "--memory", "many"), ["many", "512MiB"]),
    ((*PLAN, "--memory", "-5"), []),
    ((*PLAN, "--memory", "0"), ["--memory"]),
    ((*PLAN, "--memory", "99999999999TiB"), ["not a size"]),
    ((*PLAN, "--memory", "1e3"), ["not a size"]),
    ((*PLAN, "--dtype", "f7"), ["f7"]),
    ((*PLAN, "--causal", "left"), ["top_left"]),
    ((*PLAN, "--window", "3"), ["comma"]),
    ((*PLAN, "--schedule", "best"), ["best"]),
    ((*PLAN, "--cqs", "7"), ["comma"]),
    ((*PLAN, "--cqs", "8,1"), ["8"]),
    ((*PLAN, "--cqs", "7,1", "--schedule", "direct"), ["contradicts"]),
    ((*PLAN, "--kv-heads", "3"), ["num_kv_heads"]),
    (("plan", "--seqlen", "12Q", "--heads", "1", "--head-dim", "64"), ["12Q"]),
    (("plan", "--seqlen", "1K", "--heads", "1", "--head-dim", "6400"), ["head_dim"]),
    ((*PLAN, "--hardware", "absent.json"), ["absent.json", "No such file"]),
    ((*PLAN, "--backend", "cpu", "--memory", "1MiB", "--host-memory", "1MiB"), ["same budget"]),
    (("attention", "-o", "out.npy"), ["--q"]),
    (("attention", "a.safetensors", "--q", "q.npy", "-o", "out.npy"), ["--q"]),
    (("attention", "a.safetensors"), ["--output"]),
    (("attention", "absent.safetensors", "-o", "out.safetensors"), ["absent.safetensors", "No such file"]),
    (("attention", ".", "-o", "out.safetensors"), ["regular file"]),
    (("attention", "/dev/zero", "-o", "out.safetensors"), ["regular file"]),
])
def test_bad_arguments(run, arguments, words):
    refused(run, *arguments, words=words)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"flops_64": "fast"}', '{"flops_64": 1e12, "speed": 3}', '{"host": 1}', "{}"])
def test_bad_hardware(run, tmp_path, text):
    (tmp_path / "hw.json").write_text(text)
    refused(run, *PLAN, "--hardware", "hw.json")


def test_budget_too_small_names_the_least(run, tmp_path):
    write(tmp_path, operands(seqlen_q=300, seqlen_k=300))
    error = refused(run, "attention", "in.safetensors", "-o", "out.safetensors", "--memory", "100", "--backend", "cpu")
    least = max(int(word) for word in error.replace(",", " ").split() if word.isdigit())
    assert least > 100
    run("attention", "in.safetensors", "-o", "out.safetensors", "--memory", least, "--backend", "cpu", "--check")
    refused(run, "attention", "in.safetensors", "-o", "out.safetensors", "--memory", least - 1, "--backend", "cpu")


@pytest.mark.parametrize("backend", ["cuda", "hip", "warp"])
def test_missing_backend_says_why(run, tmp_path, backend):
    states = {b["name"]: b["state"] for b in json.loads(run("doctor", "--json").stdout)["backends"]}
    if states.get(backend) == "ready":
        pytest.skip(f"{backend} is here")
    write(tmp_path, operands())
    error = refused(run, "attention", "in.safetensors", "-o", "out.safetensors", "--backend", backend)
    assert backend in error and len(error) > 30
    assert not (tmp_path / "out.safetensors").exists()


def test_help_and_version(run):
    assert "attention" in run("--help").stdout
    assert run("--version").stdout.startswith("cqsa ")
    for command in ("doctor", "plan", "attention"):
        assert "--json" in run(command, "--help").stdout


# --------------------------------------------------------------------------------------------------------------- outputs

def test_output_replaces_the_old_file_at_once(run, tmp_path):
    write(tmp_path, operands())
    target, link = tmp_path / "real.safetensors", tmp_path / "out.safetensors"
    target.write_bytes(b"old")
    link.symlink_to(target.name)
    run("attention", "in.safetensors", "-o", "out.safetensors", umask=0o022)
    assert link.is_symlink() and "out" in files.read_safetensors(target)
    assert target.stat().st_mode & 0o777 == 0o644
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.safetensors", "out.safetensors", "real.safetensors"]


def test_output_must_not_be_the_input(run, tmp_path):
    write(tmp_path, operands())
    before = (tmp_path / "in.safetensors").read_bytes()
    (tmp_path / "link.safetensors").symlink_to("in.safetensors")
    for output in ("in.safetensors", "link.safetensors"):
        error = run("attention", "in.safetensors", "-o", output, status=1).stderr
        assert "is an input" in error
    assert (tmp_path / "in.safetensors").read_bytes() == before


@pytest.mark.parametrize("output, words", [
    ("out.bin", [".safetensors", ".npy"]),
    ("absent/out.npy", ["absent/out.npy", "No such file"]),
    ("/dev/null.npy/x.npy", []),
    ("folder.npy", ["regular file"]),
])
def test_bad_outputs(run, tmp_path, output, words):
    write(tmp_path, operands())
    (tmp_path / "folder.npy").mkdir()
    refused(run, "attention", "in.safetensors", "-o", output, words=words)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder.npy", "in.safetensors"]


def test_npy_has_no_bfloat16(run, tmp_path):
    write(tmp_path, {name: files.bf16_bits(a) for name, a in operands().items()}, types=dict.fromkeys("qkv", "BF16"))
    refused(run, "attention", "in.safetensors", "-o", "out.npy", words=["bf16", "--out-dtype"])
    run("attention", "in.safetensors", "-o", "out.npy", "--out-dtype", "f32")


def test_failed_run_keeps_the_old_output(run, tmp_path):
    write(tmp_path, operands())
    (tmp_path / "out.safetensors").write_bytes(b"old")
    refused(run, "attention", "in.safetensors", "-o", "out.safetensors", "--memory", "1")
    assert (tmp_path / "out.safetensors").read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_leaves_nothing(tool, tmp_path, number):
    q = np.zeros((1, 8, 16384, 64), "<f4")
    write(tmp_path, {"q": q, "k": q, "v": q})
    command = [tool, "attention", "in.safetensors", "-o", "out.safetensors", "--threads", "1", "--backend", "cpu"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()  # the plan's line: the run begins
    time.sleep(0.3)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error == "cqsa: interrupted; no output was written\n"
    assert os.listdir(tmp_path) == ["in.safetensors"]


# -------------------------------------------------------------------------------------------------------- bad .safetensors

def described(**changes):
    """A header of q, k, v as f32 [1, 1, 2, 2] with changes of q, and its 48 bytes of data."""
    header = {n: {"dtype": "F32", "shape": [1, 1, 2, 2], "data_offsets": [16 * i, 16 * i + 16]} for i, n in enumerate("qkv")}
    header["q"].update(changes)
    header["q"] = {key: value for key, value in header["q"].items() if value is not None}
    return files.from_header(json.dumps(header).encode(), b"\0" * 48)


GOOD = described()
BAD_SAFETENSORS = {
    "empty": (b"", "8"),
    "short length": (b"\x01\x02", "2 bytes"),
    "header past the end": (b"\xff\0\0\0\0\0\0\0{}", "255"),
    "length of 2^64 - 1": (b"\xff" * 8 + b"{}", "18446744073709551615"),
    "truncated header": (GOOD[:50], "truncated"),
    "truncated data": (GOOD[:-1], "47 bytes"),
    "data after the last tensor": (GOOD + b"x", "49 bytes"),
    "not JSON": (files.from_header(b"{'q': 1}", b""), "not JSON"),
    "not UTF-8": (files.from_header(b'{"\xff": 1}', b""), "not JSON"),
    "no header": (files.from_header(b"", b""), "not JSON"),
    "list": (files.from_header(b"[]", b""), "object"),
    "deep": (files.from_header(b"[" * 100000 + b"]" * 100000, b""), "deeper"),
    "deep objects": (files.from_header(b'{"a":' * 100000, b""), "deeper"),
    "twice": (files.from_header(b'{"q": {}, "q": {}}', b""), "twice"),
    "key twice": (files.from_header(b'{"q": {"dtype": "F32", "dtype": "F16"}}', b""), "twice"),
    "entry is a number": (files.from_header(b'{"q": 5}', b""), "object"),
    "no q": (files.from_header(b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}', b""), 'no tensor "q"'),
    "no dtype": (described(dtype=None), "dtype"),
    "no shape": (described(shape=None), "shape"),
    "no offsets": (described(data_offsets=None), "data_offsets"),
    "dtype of another kind": (described(dtype=3), "dtype"),
    "unknown dtype": (described(dtype="F31"), "F31"),
    "dtype that is no operand's": (described(dtype="U32"), "U32"),
    "shape of another kind": (described(shape="big"), "list"),
    "shape with a text": (described(shape=[1, 1, 2, "2"]), "integers"),
    "negative size": (described(shape=[1, 1, -2, -2]), "integers"),
    "fraction": (described(shape=[1, 1, 2, 2.0]), "integers"),
    "overflowing shape": (described(shape=[2**40, 2**40, 2, 2]), "larger than any memory"),
    "size of 2^64": (described(shape=[2**64, 1, 2, 2]), "integers"),
    "shape too small": (described(shape=[1, 1, 2, 1]), "16 bytes"),
    "three offsets": (described(data_offsets=[0, 16, 32]), "3 data_offsets"),
    "offsets backwards": (described(data_offsets=[16, 0]), "16 to 0"),
    "offsets past the end": (described(data_offsets=[48, 64]), "48 bytes"),
    "huge offsets": (described(data_offsets=[2**63 - 17, 2**63 - 1]), "48 bytes"),
    "overlap": (described(data_offsets=[8, 24]), "no tensor"),
    "same place": (described(data_offsets=[16, 32]), "no tensor"),
    "inside another": (files.from_header(json.dumps({
        "q": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
        "k": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}}).encode(), b"\0" * 24), "inside another"),
    "3 axes": (described(shape=[1, 2, 2]), "4 axes"),
    "5 axes": (described(shape=[1, 1, 1, 2, 2]), "axes"),
    "wrong head dim": (described(shape=[1, 1, 1, 4]), "k"),
}


@pytest.mark.parametrize("name", BAD_SAFETENSORS)
def test_bad_safetensors(run, tmp_path, name):
    blob, word = BAD_SAFETENSORS[name]
    (tmp_path / "in.safetensors").write_bytes(blob)
    refused(run, "attention", "in.safetensors", "-o", "out.safetensors", words=[word])
    assert not (tmp_path / "out.safetensors").exists()


def test_the_good_one_of_these_is_good(run, tmp_path):
    (tmp_path / "in.safetensors").write_bytes(GOOD)
    run("attention", "in.safetensors", "-o", "out.safetensors")


def test_huge_header(run, tmp_path):
    with open(tmp_path / "in.safetensors", "wb") as file:  # sparse
        file.write((200_000_000).to_bytes(8, "little") + b"{")
        file.truncate(200_000_100)
    refused(run, "attention", "in.safetensors", "-o", "out.safetensors", words=["200000000", "at most"])


def test_unaligned_data_is_fine(run, tmp_path):
    tensors = operands()
    blob = files.safetensors({"pad": np.zeros(1, "i1"), **tensors})
    (tmp_path / "in.safetensors").write_bytes(blob)
    run("attention", "in.safetensors", "-o", "out.safetensors", "--check")
    close(files.read_safetensors(tmp_path / "out.safetensors")["out"], files.attention(**tensors)[0], 2e-6)


# ---------------------------------------------------------------------------------------------------------------- bad .npy

ARRAY = np.zeros((1, 1, 2, 2), "<f4")
GOOD_NPY = files.npy(ARRAY)


def header(text):
    return files.npy(ARRAY, header=text)


BAD_NPY = {
    "empty": (b"", "NUMPY"),
    "magic only": (GOOD_NPY[:6], "truncated"),
    "wrong magic": (b"PK\x03\x04" + GOOD_NPY[4:], "NUMPY"),
    "version 4": (GOOD_NPY[:6] + b"\x04" + GOOD_NPY[7:], "4.0"),
    "version 1.1": (GOOD_NPY[:7] + b"\x01" + GOOD_NPY[8:], "1.1"),
    "truncated header": (GOOD_NPY[:40], "truncated"),
    "long header": (b"\x93NUMPY\x02\0\xff\xff\xff\xff{}", "4294967295"),
    "truncated data": (GOOD_NPY[:-1], "15 bytes"),
    "more data": (GOOD_NPY + b"x", "17 bytes"),
    "big-endian": (files.npy(ARRAY.astype(">f4")), "big-endian"),
    "Fortran order": (header("{'descr': '<f4', 'fortran_order': True, 'shape': (1, 1, 2, 2), }"), "Fortran"),
    "complex": (files.npy(ARRAY.astype("<c8")), "<c8"),
    "objects": (header("{'descr': '|O', 'fortran_order': False, 'shape': (1, 1, 2, 2), }"), "|O"),
    "records": (header("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (4,), }"), "records"),
    "raw two bytes": (header("{'descr': '<V2', 'fortran_order': False, 'shape': (1, 1, 2, 2), }"), "bfloat16"),
    "not a dictionary": (header("[1, 2]"), "dictionary"),
    "no shape": (header("{'descr': '<f4', 'fortran_order': False, }"), "lacks"),
    "no descr": (header("{'fortran_order': False, 'shape': (1, 1, 2, 2), }"), "lacks"),
    "repeated": (header("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1, 1, 2, 2)}"), "repeated"),
    "unknown key": (header("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1, 2, 2), 'x': 1}"), "unknown"),
    "order is a number": (header("{'descr': '<f4', 'fortran_order': 0, 'shape': (1, 1, 2, 2)}"), "fortran_order"),
    "negative size": (header("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1, -2, -2)}"), "shape"),
    "size of 2^64": (header("{'descr': '<f4', 'fortran_order': False, 'shape': (18446744073709551616, 1, 2, 2)}"), "shape"),
    "overflowing shape": (header("{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904, 4, 2, 2)}"), "larger"),
    "shape says more": (header("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1, 2, 3)}"), "24"),
    "open shape": (header("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1, 2, 2"), "missing"),
    "many axes": (header("{'descr': '<f4', 'fortran_order': False, 'shape': (" + "1, " * 40 + ")}"), "axes"),
    "text after": (header("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1, 2, 2)} {}"), "closing brace"),
    "2 axes": (files.npy(ARRAY[0, 0]), "4 axes"),
}


@pytest.mark.parametrize("name", BAD_NPY)
def test_bad_npy(run, tmp_path, name):
    blob, word = BAD_NPY[name]
    (tmp_path / "good.npy").write_bytes(GOOD_NPY)
    (tmp_path / "bad.npy").write_bytes(blob)
    refused(run, "attention", "--q", "bad.npy", "--k", "good.npy", "--v", "good.npy", "-o", "out.npy", words=[word])
    assert not (tmp_path / "out.npy").exists()


def test_damaged_files_never_crash(run, tool, tmp_path):
    """Random changes of good files: the command either works or refuses with one line."""
    random = np.random.default_rng(int(os.environ.get("CQSA_SEED", "1")))
    (tmp_path / "good.npy").write_bytes(GOOD_NPY)
    for turn in range(120):
        safetensors = turn % 2 == 0
        blob = bytearray(GOOD if safetensors else GOOD_NPY)
        header_end = len(blob) - (48 if safetensors else 16)
        for _ in range(random.integers(1, 4)):
            blob[random.integers(0, header_end)] = random.integers(0, 256)
        (tmp_path / "bad").write_bytes(blob[: random.integers(0, len(blob))] if turn % 5 == 0 else blob)
        source = ["bad"] if safetensors else ["--q", "bad", "--k", "good.npy", "--v", "good.npy"]
        done = subprocess.run([tool, "attention", *source, "-o", "out.npy"], cwd=tmp_path, capture_output=True, timeout=60)
        assert done.returncode in (0, 1), (turn, blob, done)
        assert done.returncode == 0 or (done.stderr.startswith(b"cqsa: ") and done.stderr.count(b"\n") == 1), (turn, done)
