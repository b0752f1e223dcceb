# SPDX-License-Identifier: Apache-2.0
"""torch's CPU tensors as operands and outputs, and the replacement of its scaled_dot_product_attention."""
import gc
import threading
import weakref

import numpy as np
import pytest

import cqsa
import exact
from test_calls import run_python

try:
    import torch
except ImportError as error:  # absent, or a wheel whose libraries are not here
    pytest.skip(f"no torch: {error}", allow_module_level=True)
F = torch.nn.functional
DTYPES = ["float32", "float16", "bfloat16"]


@pytest.fixture
def packed():
    torch.manual_seed(7)
    return torch.randn(2, 4, 19, 32), torch.randn(2, 2, 23, 32), torch.randn(2, 2, 23, 32)


def refused(status_name, call, *words):
    with pytest.raises(cqsa.CqsaError) as caught:
        call()
    assert caught.value.status_name == "CQSA_ERROR_" + status_name, str(caught.value)
    for word in words:
        assert word in str(caught.value)


def wanted_of(*tensors, **options):
    return exact.attention(*(x.detach().double().numpy() for x in tensors), **options)[0]


# ----------------------------------------------------------------------------------------------------------- operands


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_in_torch_out(packed, dtype):
    q, k, v = (x.to(getattr(torch, dtype)) for x in packed)
    out, lse = cqsa.attention(q, k, v, causal="bottom_right", return_lse=True)
    assert type(out) is torch.Tensor and out.dtype == q.dtype and lse.dtype == torch.float32 and tuple(lse.shape) == (2, 4, 19)
    exact.assert_close(out.double().numpy(), wanted_of(q, k, v, causal="bottom_right"), dtype)
    turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    assert torch.equal(cqsa.attention(*turned, layout="bshd", causal="bottom_right").transpose(1, 2), out)
    assert torch.equal(cqsa.attention(*(x.transpose(1, 2) for x in turned), causal="bottom_right"), out)


def test_a_call_made_before(packed):
    for turn in range(4):  # from the third on only the addresses are new
        torch.manual_seed(turn)
        q, k, v = (torch.randn_like(x) for x in packed)
        out, lse = cqsa.attention(q, k, v, causal="bottom_right", softmax_scale=0.25, return_lse=True)
        wanted, wanted_lse = exact.attention(*(x.double().numpy() for x in (q, k, v)), causal="bottom_right", softmax_scale=0.25)
        exact.assert_close(out.numpy(), wanted, "float32")
        exact.assert_close(lse.numpy(), wanted_lse, "float32")
        refused("SHAPE", lambda: cqsa.attention(q, k, v[:, :, :-1], causal="bottom_right"), "args->v")
        refused("OVERLAP", lambda: cqsa.attention(q, k, v, out=q), "args->out")
    kept = weakref.ref(q)
    del q, k, v, out, lse
    gc.collect()
    assert kept() is None


def test_windows_of_any_kind(packed):
    wanted = cqsa.attention(*packed, window=(3, 0))
    for window in ((3, 0), [3, 0], np.array([3, 0]), (3, 0), (3, 1)) * 3:
        assert torch.equal(cqsa.attention(*packed, window=window), wanted) == (tuple(window) == (3, 0))
    with pytest.raises(cqsa.CqsaError):
        cqsa.attention(*packed, window=(3.0, 0))


def test_calls_made_before_on_threads(packed):
    q, k, v = packed
    cases = [(x, cqsa.attention(x, k, v)) for x in (q, q * 2, q * 3, q * 4)]
    failures = []

    def work(case):
        try:
            for _ in range(200):
                assert torch.equal(cqsa.attention(case[0], k, v), case[1])
        except BaseException as error:
            failures.append(error)
    threads = [threading.Thread(target=work, args=(case,)) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_outputs_of_either_kind(packed):
    wanted = cqsa.attention(*packed)
    arrays = [x.numpy() for x in packed]
    out = np.zeros(wanted.shape, np.float32)
    assert cqsa.attention(*packed, out=out) is out
    np.testing.assert_array_equal(out, wanted.numpy())
    tensor = torch.zeros(2, 19, 4, 32).transpose(1, 2)
    version = tensor._version
    assert cqsa.attention(*arrays, out=tensor) is tensor and torch.equal(tensor, wanted)
    assert tensor._version > version  # autograd sees that it was written
    lse = torch.zeros(2, 4, 19)
    result = cqsa.attention(*arrays, out=(tensor, lse), return_lse=True)
    assert result[1] is lse and lse.abs().sum() > 0
    assert type(cqsa.attention(*arrays)) is np.ndarray
    assert type(cqsa.attention(packed[0], *arrays[1:])) is torch.Tensor
    assert cqsa.attention(*packed, out=torch.zeros(2, 4, 19, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_float8_keys(packed):
    q, k, v = packed
    for name in ("float8_e4m3fn", "float8_e5m2"):
        dtype = getattr(torch, name, None)
        if dtype is None:
            pytest.skip("a torch without float8")
        eight = [x.to(dtype) for x in (k, v)]
        out = cqsa.attention(q, *eight, k_scale=torch.tensor(0.5), v_scale=torch.tensor([2.0, 0.25]))
        scale = torch.tensor([2.0, 0.25])[:, None, None]
        exact.assert_close(out.numpy(), wanted_of(q, eight[0].float() * 0.5, eight[1].float() * scale))
        assert torch.equal(cqsa.attention(q, *(x.view(torch.uint8) for x in eight), dtype=dtype),
                           cqsa.attention(q, *eight))


def test_small_operands_and_masks(packed):
    q, k, v = packed
    mask = torch.rand(19, 23) > 0.3
    bias = torch.randn(4, 19, 23)
    options = {"mask": mask, "bias": bias, "sinks": torch.randn(4), "alibi_slopes": torch.rand(4), "seqused_k": torch.tensor([20, 23])}
    assert torch.equal(cqsa.attention(q, k, v, **options),
                       torch.from_numpy(cqsa.attention(*(x.numpy() for x in packed), **{n: x.numpy() for n, x in options.items()})))
    flat = [x.transpose(1, 2).reshape(-1, x.shape[1], 32) for x in packed]
    starts = torch.tensor([0, 19, 38], dtype=torch.int32), torch.tensor([0, 23, 46])
    out = cqsa.attention(*flat, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1])
    torch.testing.assert_close(out, cqsa.attention(*packed).transpose(1, 2).reshape(-1, 4, 32))


class OnlyDLPack:
    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **keywords):
        return self.tensor.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def test_torchs_own_capsules(packed):
    wanted = cqsa.attention(*packed)
    out = torch.zeros_like(wanted)
    got = cqsa.attention(*(OnlyDLPack(x) for x in packed), out=OnlyDLPack(out))
    assert isinstance(got, OnlyDLPack) and torch.equal(out, wanted)
    half = [x.bfloat16() for x in packed]
    got = cqsa.attention(*(OnlyDLPack(x) for x in half))
    assert np.array_equal(got.view(np.int16), cqsa.attention(*half).view(torch.int16).numpy())
    freed = weakref.WeakSet()
    for _ in range(50):
        lent = torch.randn(2, 4, 19, 32)
        freed.add(lent)
        cqsa.attention(OnlyDLPack(lent), *packed[1:])
    del lent
    gc.collect()
    assert not freed
    tracked = OnlyDLPack(packed[0].clone().requires_grad_())
    refused("INVALID_ARGUMENT", lambda: cqsa.attention(tracked, *packed[1:]), "q does not lend its memory")


def test_int8_keys(packed):
    q, k, v = (x.half() for x in packed)
    k, v = ((x * 20).to(torch.int8) for x in (k, v))
    scale = torch.full((2, 2, 23, 1), 0.05, dtype=torch.float16)
    out = cqsa.attention(q, k, v, k_scale=scale, v_scale=scale, kv_group=32)
    exact.assert_close(out.double().numpy(), wanted_of(q, k * scale.double(), v * scale.double()), "float16")


def test_merge(packed):
    q, k, v = packed
    parts = [cqsa.attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 9), slice(9, None))]
    out, lse = cqsa.attention_merge(*parts[0], *parts[1])
    assert type(out) is torch.Tensor and type(lse) is torch.Tensor
    torch.testing.assert_close(out, cqsa.attention(q, k, v))


def test_grad(packed):
    q, k, v = packed
    tracked = q.clone().requires_grad_()
    refused("INVALID_ARGUMENT", lambda: cqsa.attention(tracked, k, v), "q requires grad", "no_grad")
    refused("INVALID_ARGUMENT", lambda: cqsa.attention(q, k, v, out=tracked), "out requires grad")
    with torch.no_grad():
        assert torch.equal(cqsa.attention(tracked, k, v), cqsa.attention(q, k, v))
    assert torch.equal(cqsa.attention(tracked.detach(), k, v), cqsa.attention(q, k, v))
    with torch.inference_mode():
        assert torch.equal(cqsa.attention(q.clone(), k, v, out=torch.empty_like(q)), cqsa.attention(q, k, v))


def test_tensors_that_are_refused(packed):
    q, k, v = packed
    refused("INVALID_ARGUMENT", lambda: cqsa.attention(q.to_sparse(), k, v), "layout")
    refused("DEVICE", lambda: cqsa.attention(q.to("meta"), k, v), "meta")
    refused("DTYPE", lambda: cqsa.attention(q.to(torch.complex64), k, v), "complex64")
    refused("DTYPE", lambda: cqsa.attention(q, k, v, sinks=torch.zeros(4, dtype=torch.bfloat16)), "sinks")
    refused("INVALID_ARGUMENT", lambda: cqsa.attention(torch._neg_view(q), k, v), "resolve_neg")
    refused("OVERLAP", lambda: cqsa.attention(q, k, v, out=q))
    refused("STRIDES", lambda: cqsa.attention(q, k, v, out=torch.zeros(1, 1, 1, 32).expand(2, 4, 19, 32)))
    with pytest.raises(ValueError):
        torch.vmap(lambda x: cqsa.attention(x, x, x))(torch.randn(2, 1, 1, 5, 16))


# -------------------------------------------------------------------------------------------------------------- patch


@pytest.fixture
def patched():
    original = F.scaled_dot_product_attention
    cqsa.patch_torch_sdpa(min_tokens=0)
    yield original
    cqsa.unpatch_torch_sdpa()
    assert F.scaled_dot_product_attention is original


@pytest.fixture
def ours(monkeypatch):
    """Counts the calls that this library answered."""
    calls = []
    real = cqsa._patch.attention
    monkeypatch.setattr(cqsa._patch, "attention", lambda *a, **k: calls.append(1) or real(*a, **k))
    return calls


CASES = {
    "plain": {}, "causal": {"is_causal": True}, "scale": {"scale": 0.3}, "bool": {"attn_mask": torch.rand(19, 23) > 0.4},
    "float": {"attn_mask": torch.randn(2, 1, 19, 23)}, "heads": {"attn_mask": torch.randn(4, 1, 23)},
    "one column": {"attn_mask": torch.randn(19, 1)}, "bool per batch": {"attn_mask": torch.rand(2, 1, 1, 23) > 0.2},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_patched_is_torchs(patched, ours, packed, case, dtype):
    q, k, v = packed
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    q, k, v = (x.to(getattr(torch, dtype)) for x in (q, k, v))
    options = dict(CASES[case])
    mask = options.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        options["attn_mask"] = mask.to(q.dtype)
    got = F.scaled_dot_product_attention(q, k, v, **options)
    assert len(ours) == 1 and got.dtype == q.dtype
    if mask is not None and mask.dtype != torch.bool:
        options["attn_mask"] = options["attn_mask"].double()
    wanted = patched(*(x.double() for x in (q, k, v)), **options)
    exact.assert_close(got.double().numpy(), wanted.numpy(), dtype)


def test_patched_rows_without_keys(patched, ours, packed):
    q, k, v = packed[0][:, :2], packed[1], packed[2]
    mask = torch.ones(19, 23, dtype=torch.bool)
    mask[3] = False
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert ours and not out[:, :, 3].any()
    torch.testing.assert_close(out[:, :, 4:], patched(q, k, v, attn_mask=mask)[:, :, 4:])


def test_patched_gqa_and_three_axes(patched, ours, packed):
    q, k, v = packed
    torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
                               patched(q, *(x.repeat_interleave(2, 1) for x in (k, v))))
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, k, v)  # torch's own error
    assert len(ours) == 1
    q, k, v = q[:, 0], k[:, 0], v[:, 0]
    mask = torch.rand(2, 19, 23) > 0.3
    torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, mask), patched(q, k, v, mask))
    assert len(ours) == 2


@pytest.mark.filterwarnings("ignore")  # torch deprecates its tracer and warns about speed
def test_what_goes_to_torch(patched, ours, packed):
    q, k, v = (packed[0][:, :2],) + packed[1:]
    sdpa = F.scaled_dot_product_attention
    torch.manual_seed(1)
    dropped = sdpa(q, k, v, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(dropped, patched(q, k, v, dropout_p=0.5))
    tracked = q.clone().requires_grad_()
    sdpa(tracked, k, v).sum().backward()
    assert tracked.grad is not None
    mask = torch.zeros(19, 23, requires_grad=True)
    assert sdpa(q, k, v, attn_mask=mask).requires_grad
    assert sdpa(q.double(), k.double(), v.double()).dtype == torch.float64
    assert sdpa(q[:1].expand(2, 2, 19, 32), k[:1], v[:1]).shape == q.shape  # broadcast over the batch
    assert sdpa(q.to("meta"), k.to("meta"), v.to("meta")).device.type == "meta"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sdpa(q, k, v).dtype == torch.bfloat16
    assert torch.vmap(sdpa)(q, k, v).shape == q.shape
    with pytest.raises(RuntimeError):
        sdpa(q, k, v, attn_mask=torch.ones(19, 23, dtype=torch.bool), is_causal=True)
    assert sdpa(q[:, :, :0], k, v).shape == (2, 2, 0, 32)
    traced = torch.jit.trace(lambda *x: sdpa(*x), (q, k, v), check_trace=False)
    assert "scaled_dot_product_attention" in str(traced.graph)
    nested = torch.nested.nested_tensor([q[0].transpose(0, 1), q[1, :, :9].transpose(0, 1)], layout=torch.jagged).transpose(1, 2)
    assert sdpa(nested, nested, nested).is_nested
    assert not ours
    with torch.no_grad():
        torch.testing.assert_close(sdpa(tracked, k, v), patched(q, k, v))
    assert len(ours) == 1


def test_a_module_uses_it(patched, ours):
    torch.manual_seed(3)
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True).train()
    x = torch.randn(2, 50, 32)
    with torch.no_grad():
        got = module(x, x, x, need_weights=False)[0]
        assert ours
        cqsa.unpatch_torch_sdpa()
        torch.testing.assert_close(got, module(x, x, x, need_weights=False)[0], atol=1e-5, rtol=1e-5)


def test_min_tokens_and_memory_limit(patched, ours, packed):
    q, k, v = (packed[0][:, :2],) + packed[1:]
    cqsa.patch_torch_sdpa(min_tokens=24)
    F.scaled_dot_product_attention(q, k, v)
    assert not ours
    cqsa.patch_torch_sdpa(min_tokens=23, memory_limit=1)
    with pytest.raises(MemoryError):
        F.scaled_dot_product_attention(q, k, v)
    cqsa.patch_torch_sdpa(min_tokens=23, memory_limit="1MiB")
    F.scaled_dot_product_attention(q, k, v)
    assert len(ours) == 2
    for bad in ({"min_tokens": -1}, {"min_tokens": "x"}, {"memory_limit": "lots"}):
        with pytest.raises(ValueError):
            cqsa.patch_torch_sdpa(**bad)


def test_patch_twice_unpatch_once(packed):
    original = F.scaled_dot_product_attention
    cqsa.unpatch_torch_sdpa()
    cqsa.patch_torch_sdpa()
    first = F.scaled_dot_product_attention
    cqsa.patch_torch_sdpa(min_tokens=3)
    assert F.scaled_dot_product_attention is first is not original
    assert first.__name__ == original.__name__
    cqsa.unpatch_torch_sdpa()
    cqsa.unpatch_torch_sdpa()
    assert F.scaled_dot_product_attention is original
    q = packed[0]
    assert torch.equal(first(q, q, q), original(q, q, q))  # a name kept from then goes to torch


def test_somebody_elses_patch_stays(monkeypatch, ours, packed):
    original = F.scaled_dot_product_attention
    cqsa.patch_torch_sdpa(0)
    inner = F.scaled_dot_product_attention
    outer = lambda *a, **k: inner(*a, **k)  # noqa: E731
    F.scaled_dot_product_attention = outer
    try:
        cqsa.unpatch_torch_sdpa()
        assert F.scaled_dot_product_attention is outer
        q = packed[0]
        assert torch.equal(outer(q, q, q), original(q, q, q)) and not ours
    finally:
        F.scaled_dot_product_attention = original


def test_patching_from_many_threads(packed):
    original = F.scaled_dot_product_attention
    q = packed[0]
    wanted = original(q, q, q)
    failures = []

    def work(index):
        try:
            for turn in range(200):
                (cqsa.patch_torch_sdpa, cqsa.unpatch_torch_sdpa)[(index + turn) % 2]()
                torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q), wanted)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cqsa.unpatch_torch_sdpa()
    assert not failures, failures[0]
    assert F.scaled_dot_product_attention is original


def test_compile_sees_torchs_function(patched, ours, packed):
    q, k, v = (packed[0][:, :2],) + packed[1:]
    compiled = torch.compile(lambda *x: F.scaled_dot_product_attention(*x) * 2, backend="eager")
    torch.testing.assert_close(compiled(q, k, v), patched(q, k, v) * 2)


def test_attention_imports_no_torch():
    done = run_python("""
import sys, numpy as np, cqsa
cqsa.attention(*(np.ones((1, 1, 3, 4), np.float32),) * 3)
assert "torch" not in sys.modules and "ml_dtypes" not in sys.modules
""")
    assert done.returncode == 0, done.stderr
