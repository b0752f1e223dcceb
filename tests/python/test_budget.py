# SPDX-License-Identifier: Apache-2.0
"""Any budget gives the same answer and is kept; plans say what runs do."""
import json
import re

import numpy as np
import pytest

import cqsa
import exact


@pytest.fixture
def operands(random):
    shapes = (1, 4, 300, 64), (1, 2, 300, 64), (1, 2, 300, 64)
    return tuple(random.standard_normal(shape).astype(np.float32) for shape in shapes)


def least_bytes(operands, **options):
    """The least budget, from the message that refuses one byte."""
    with pytest.raises(MemoryError) as caught:
        cqsa.attention(*operands, memory_limit=1, backend="cpu", **options)
    assert caught.value.status_name == "CQSA_ERROR_BUDGET_TOO_SMALL"
    return int(re.findall(r"\d+", str(caught.value))[-1])


@pytest.mark.parametrize("options", [{}, {"causal": "bottom_right"}, {"window": (40, 10), "softcap": 3.0}], ids=str)
def test_any_budget_gives_the_same_answer(operands, options):
    wanted, wanted_lse = exact.attention(*operands, **options)
    _, unlimited = cqsa.attention(*operands, backend="cpu", return_info=True, **options)
    least, most = least_bytes(operands, **options), unlimited["plan"]["peak_host_bytes"]
    assert least <= most
    for limit in sorted({int(x) for x in np.geomspace(least, most, 8)} | {least, most}):
        out, lse, info = cqsa.attention(*operands, memory_limit=limit, backend="cpu", return_lse=True, return_info=True,
                                        **options)
        exact.assert_close(out, wanted)
        exact.assert_close(lse, wanted_lse)
        assert info["run"]["peak_host_bytes"] <= info["plan"]["peak_host_bytes"] <= limit
    with pytest.raises(MemoryError):
        cqsa.attention(*operands, memory_limit=least - 1, backend="cpu", **options)


def test_a_refused_budget_leaves_out_alone(operands):
    out = np.full((1, 4, 300, 64), np.nan, np.float32)
    with pytest.raises(cqsa.CqsaMemoryError):
        cqsa.attention(*operands, memory_limit=1, backend="cpu", out=out)
    assert np.isnan(out).all()


def test_limits_as_text_and_host_limit(operands):
    least = least_bytes(operands)
    for limit in ("2MiB", "2 MiB", "0.5gib", "3000000B", "3 MB", np.int64(1 << 21)):
        cqsa.attention(*operands, memory_limit=limit)
    for options in ({"host_memory_limit": least - 1}, {"host_memory_limit": least - 1, "memory_limit": "1GiB"},
                    {"host_memory_limit": "1GiB", "memory_limit": least - 1}):
        with pytest.raises(MemoryError):
            cqsa.attention(*operands, backend="cpu", **options)
    cqsa.attention(*operands, backend="cpu", host_memory_limit=least, memory_limit="1GiB", pinned_memory_limit=1)


@pytest.mark.parametrize("causal", ["none", "top_left"])
@pytest.mark.parametrize("schedule, cqs", [("direct", None), ("stream", None), ("cqs", None), ("cqs", (3, 1)), ("cqs", (7, 1)),
                                           ("cqs", (3, 2)), ("cqs", (13, 1)), ("cqs", (0, 0))], ids=str)
def test_schedules(operands, schedule, cqs, causal):
    out, lse, info = cqsa.attention(*operands, schedule=schedule, cqs=cqs, causal=causal, backend="cpu", return_lse=True,
                                    return_info=True)
    wanted, wanted_lse = exact.attention(*operands, causal=causal)
    exact.assert_close(out, wanted)
    exact.assert_close(lse, wanted_lse)
    assert info["plan"]["schedule"] == schedule
    if cqs and all(cqs):
        assert (info["plan"]["c"], info["plan"]["itr"]) == cqs
    again = cqsa.attention(*operands, schedule=schedule, cqs=cqs, causal=causal, backend="cpu")
    np.testing.assert_array_equal(again, out)


def test_cqs_is_for_self_attention(operands):
    q, k, v = operands
    with pytest.raises(cqsa.CqsaError) as caught:
        cqsa.attention(q[:, :, :200], k, v, schedule="cqs")
    assert "seqlen_q" in str(caught.value)


def test_batch_invariant(random):
    q, k, v = (random.standard_normal((5, 2, 40, 64)).astype(np.float32) for _ in "qkv")
    whole = cqsa.attention(q, k, v, batch_invariant=True, deterministic=True)
    for b in range(5):
        alone = cqsa.attention(q[b:b + 1], k[b:b + 1], v[b:b + 1], batch_invariant=True)
        np.testing.assert_array_equal(whole[b:b + 1], alone)


def test_info(operands):
    out, info = cqsa.attention(*operands, backend="cpu", return_info=True)
    assert set(info) == {"line", "plan", "run"}
    assert info["plan"]["backend"] == "cpu" and info["plan"]["implementation"].startswith("cpu_")
    assert info["run"]["tasks"] == info["plan"]["tasks"] >= 1
    assert info["run"]["seconds"] > 0 and info["run"]["retries"] == 0
    assert info["plan"]["schedule"] in info["line"] and "\n" not in info["line"]
    np.testing.assert_array_equal(out, cqsa.attention(*operands, backend="cpu"))


# -------------------------------------------------------------------------------------------------------------- plans

H200 = {"name": "H200", "backend": "cuda", "host": False, "pinned": True, "device_bytes": 150 << 30, "host_bytes": 128 << 30,
        "workers": 16, "flops_64": 4e14, "flops_128": 6e14, "copy_in": 5.5e10, "copy_out": 5.5e10, "host_copy": 5e10,
        "launch_seconds": 1e-5}
KEYS = {"schedule", "implementation", "c", "itr", "tasks", "tile_q", "tile_k", "peak_device_bytes", "peak_host_bytes",
        "peak_pinned_bytes", "workspace_bytes", "bytes_in", "bytes_out", "flops", "seconds"}


def test_plan_of_arrays_is_the_plan_of_the_run(operands):
    plan = cqsa.attention_plan(*operands, causal="top_left", memory_limit="300KiB", backend="cpu")
    _, info = cqsa.attention(*operands, causal="top_left", memory_limit="300KiB", backend="cpu", return_info=True)
    assert plan.describe() == info["plan"]
    assert plan.line() in repr(plan) and plan.explain()
    of_shapes = cqsa.attention_plan((1, 4, 300, 64), (1, 2, 300, 64), (1, 2, 300, 64), causal="top_left",
                                    memory_limit="300KiB", backend="cpu")
    assert of_shapes.describe() == plan.describe()


def test_plan_as_json(operands):
    plan = cqsa.attention_plan(*operands, backend="cpu")
    told, described = json.loads(plan.json()), plan.describe()
    assert KEYS <= set(told) and KEYS <= set(described)
    for key in KEYS - {"seconds", "flops"}:
        assert told[key] == described[key]
    assert described["flops"] == 2 * (64 + 64) * 300 * 300 * 4


@pytest.mark.parametrize("hardware", ["dict", "text", "path"])
def test_plan_for_a_machine_that_is_not_here(tmp_path, hardware):
    given = {"dict": H200, "text": json.dumps(H200), "path": tmp_path / "h200.json"}[hardware]
    if hardware == "path":
        given.write_text(json.dumps(H200))
    shape = (1, 32, 1 << 20, 128)
    plan = cqsa.attention_plan(shape, (1, 8, 1 << 20, 128), hardware=given, dtype="bfloat16", causal="bottom_right",
                               memory_limit="3GiB")
    numbers = plan.describe()
    assert 0 < numbers["peak_device_bytes"] <= 3 << 30
    assert numbers["seconds"] > 1 and numbers["bytes_in"] >= 2 * 32 * (1 << 20) * 128
    assert "H200" in plan.explain() or numbers["backend"] == "cuda"


def test_plans_of_shapes_need_no_memory():
    shape = (1, 64, 1 << 24, 128)  # 8 TiB of float32 each
    with pytest.raises(MemoryError):
        cqsa.attention_plan(shape, shape, hardware={**H200, "device_bytes": 1 << 20}, dtype="float16", memory_limit=1000)
    options = {"mask": (1, 1, 1, 1 << 24), "sinks": (64,), "return_lse": True, "progress": print}
    assert cqsa.attention_plan((1, 64, 5, 128), shape, hardware=H200, dtype="float16", **options).describe()["seconds"] > 0


def test_plan_of_8_bit_shapes():
    k = (2, 2, 500, 64)
    plan = cqsa.attention_plan((2, 4, 9, 64), k, dtype=("float16", "int8"), k_scale=(2, 2, 500, 2), v_scale=(2, 2, 500, 2))
    assert plan.describe()["tasks"] >= 1
    cqsa.attention_plan((2, 4, 9, 64), k, dtype=("bfloat16", "float8_e4m3fn"), k_scale=(2,), v_scale=0.5)
    with pytest.raises(ValueError):
        cqsa.attention_plan((2, 4, 9, 64), k, dtype="int8")


def test_plan_of_segments():
    plan = cqsa.attention_plan((30, 4, 64), (41, 2, 64), cu_seqlens_q=[0, 10, 30], cu_seqlens_k=[0, 21, 41])
    assert plan.describe()["tasks"] >= 1


def test_plan_errors(tmp_path):
    shape = (1, 2, 30, 64)
    for hardware in ("{not json", "[1]", 5, {"flops_64": 1e12}, {**H200, "colour": "red"}):
        with pytest.raises((ValueError, OSError)):
            cqsa.attention_plan(shape, shape, hardware=hardware)
    with pytest.raises(OSError):
        cqsa.attention_plan(shape, shape, hardware=str(tmp_path / "absent.json"))
    for bad in ((1, 2, -30, 64), (1, 2, 30), (1 << 40, 1 << 20, 1 << 20, 64)):
        with pytest.raises(ValueError) as caught:
            cqsa.attention_plan(bad, shape)
        assert caught.value.status_name in ("CQSA_ERROR_SHAPE", "CQSA_ERROR_INVALID_ARGUMENT")
    with pytest.raises(TypeError):
        cqsa.attention_plan(shape, shape, colour="red")
